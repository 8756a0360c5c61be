"""The part of stage 3 about what only our kernels compute: router, sort, positions of heads; and Adam.

Each operation is called as the package calls it, on the device, where a kernel computes, and compared with its form in
torch on the CPU: integers bit for bit, others with that form in fp64.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.engine.adam import Adam
from megatron_moe.kernels import choice
from megatron_moe.model.mla import _JoinPositions
from megatron_moe.moe import routing as own
from megatron_moe.moe import rows as moves
from megatron_moe.optim.adam import adam_update
from megatron_moe.optim.muon import orthogonalized, steps_of
from megatron_moe.platform.pinned_memory import CopyStream, OffloadedStorage, PinnedPool
from megatron_moe.precision.packed_state import AdamStep
from tests.gpu.operators import compare, draw, error_of, poison, rotary_tables, turned
from tests.gpu.stage import Stage
from tests.numbers import reference_muon
from tests.precision import packed_cases

# (experts, options of a router): those of DeepSeek-V3, DeepSeek-V2, megatron-core and Qwen3.
ROUTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "DeepSeek-V3": (256, {"topk": 8, "num_groups": 8, "group_topk": 4, "group_score": "top2"}),
    "DeepSeek-V2": (160, {"topk": 6, "num_groups": 8, "group_topk": 3, "group_score": "max"}),
    "megatron-core": (64, {"topk": 8, "num_groups": 8, "group_topk": 4, "group_score": "megatron"}),
    "Qwen3": (128, {"topk": 8, "score_function": "softmax", "scaling_factor": None}),
    "no power of two": (60, {"topk": 4, "score_function": "softmax", "pre_softmax": True, "norm_topk_prob": False}),
}


def which(stage: Stage) -> None:
    """Record which form of the operations computes here: without kernels the rest of the stage says nothing of them."""
    if stage.dry:
        stage.impossible("kernels in Triton compute", "a CPU computes with torch's operations")
        return
    why = choice.why_no_triton() or "MEGATRON_MOE_KERNELS says otherwise"
    stage.holds("kernels in Triton compute", choice.takes_kernels(torch.ones(1, device=stage.device)), why)


def _options(**changes: Any) -> Any:
    plain = {"num_groups": None, "group_topk": None, "group_score": "top2", "score_function": "sigmoid"}
    plain |= {"pre_softmax": False, "norm_topk_prob": True, "scaling_factor": 2.5, "enable_expert_bias": True}
    return SimpleNamespace(**(plain | changes))


def routing(stage: Stage, size: int) -> None:
    """Compare choice, counts, weights and their gradients: the first two of equal scores are equal bit for bit."""
    for name, (experts, changes) in ROUTERS.items():
        with stage.attempt(f"router, {name}"):
            how = _options(**changes)
            generator = torch.Generator().manual_seed(experts)
            logits = torch.randn(37 * size, experts, generator=generator)
            bias = 0.1 * torch.randn(experts, generator=generator)
            padding = torch.rand(len(logits), generator=generator) < 0.1
            scores = own.scores_from_logits(logits, how)
            ranked = own.ranked_values(logits, scores, how)
            there = [one.to(stage.device) for one in (ranked, bias, padding, logits, scores)]
            poison(stage.device)
            ids = own.choose_experts(there[0], there[1], how)
            wanted = own.choose_experts(ranked, bias, how)
            stage.holds(f"router, {name}: the choice", torch.equal(ids.cpu(), wanted), "experts differ")
            for sequences in (1, 37):
                counts = own.count_tokens(ids, experts, there[2], sequences).cpu()
                right = own.count_tokens(wanted, experts, padding, sequences)
                stage.holds(f"router, {name}: counts of {sequences}", torch.equal(counts, right), "counts differ")
            exact, found = (
                _weights(*tensors, how, generator.manual_seed(1))
                for tensors in ((logits.double(), wanted, padding), (there[3], ids, there[2]))
            )
            errors = {part: error_of(found[part].cpu(), exact[part]) for part in exact}
            stage.within(f"router, {name}: weights", max(errors.values()), 4e-6, **errors)


def _weights(logits: Tensor, ids: Tensor, padding: Tensor, how: Any, generator: Any) -> dict[str, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    weights = own.weigh_experts(leaf, own.scores_from_logits(leaf, how), ids, how, padding)
    upstream = torch.randn(weights.shape, generator=generator).to(weights)
    return {"result": weights.detach(), "gradient": torch.autograd.grad(weights, leaf, upstream)[0]}


def sorting(stage: Stage, size: int) -> None:
    """Compare the sort by expert: order, inverse and ends are equal bit for bit."""
    generator = torch.Generator().manual_seed(7)
    tokens = 129 * size
    cases = {
        "256 experts": (torch.randint(256, (tokens, 8), generator=generator), 256),
        "all on one": (torch.full((tokens, 2), 4), 5),
        "one row each": (torch.randperm(64, generator=generator).view(8, 8), 64),
        "no rows": (torch.zeros(0, 2, dtype=torch.int64), 3),
    }
    for name, (ids, experts) in cases.items():
        with stage.attempt(f"sort by expert, {name}"):
            found, wanted = (
                (*moves.sort_by_expert(one, experts, False, counts), counts)
                for one in (ids.to(stage.device), ids)
                for counts in (one.new_empty(experts),)
            )
            equal = all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
            stage.holds(f"sort by expert, {name}", equal, "order, inverse, ends or counts differ")
    counts = torch.randint(300, (8, 32), generator=generator)
    counts[3], counts[:, 5] = 0, 0
    with stage.attempt("sort of arrived rows"):
        found = moves.sort_arrived(counts.to(stage.device), int(counts.sum()))
        wanted = moves.sort_arrived(counts, int(counts.sum()))
        equal = all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
        stage.holds("sort of arrived rows", equal, "order, inverse or ends differ")


def positions(stage: Stage, dtype: torch.dtype, size: int) -> None:
    """Compare latent attention's heads: both parts joined and the second rotated, one each or one for all heads."""
    tables = rotary_tables()

    def truth(rest: Tensor, positional: Tensor) -> Tensor:
        return torch.cat((rest, turned(positional, *tables).expand(*rest.shape[:-1], -1)), dim=-1)

    def ours(rest: Tensor, positional: Tensor) -> Tensor:
        return _JoinPositions.apply(rest, positional, *(one.to(rest.device) for one in tables))

    for name, heads in (("one for all heads", 1), ("of each head", 4 * size)):
        inputs = [draw(31, 2, 4 * size, 128, dtype=dtype), draw(31, 2, heads, 64, dtype=dtype, seed=1)]
        compare(stage, f"heads with positions, {name}", ours, inputs, truth)


def adam(stage: Stage, size: int) -> None:
    """Compare our Adam, torch's fused kernel over all tensors, with AdamW over each in fp64, after ten steps."""
    if stage.dry:
        stage.impossible("Adam over all tensors", "torch's optimizers ask the driver whether a graph is captured")
        return
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    shapes = [(3, 5), (17,), (0,), (64 * size, 33)]
    generator = torch.Generator().manual_seed(11)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(10)]

    def updated(kind: Any, **where: Any) -> list[Tensor]:
        params = [torch.nn.Parameter(one.to(**where, copy=True)) for one in start]
        optimizer = kind(params, **options)
        for step in gradients:
            for param, gradient in zip(params, step):
                param.grad = gradient.to(**where)
            optimizer.step()
        return [param.detach().cpu() for param in params]

    with stage.attempt("Adam over all tensors"):
        found = updated(Adam, device=stage.device)
        exact = updated(partial(torch.optim.AdamW, foreach=False), dtype=torch.float64)
        errors = {str(shape): error_of(one, other) for shape, one, other in zip(shapes, found, exact)}
        stage.within("Adam over all tensors", max(errors.values()), 2e-6, **errors)


def packed_adam(stage: Stage, size: int) -> None:
    """Compare one update of packed state, in every form, with torch's operations on the CPU."""
    step = AdamStep(3e-3, (0.9, 0.95), 1e-8, 0.1, 7)
    sizes = (1000 * size + 5, 17, 4096)  # updated at once
    for name in packed_cases.FORMATS:
        for packed in (False, True):
            what = f"packed state, moments {name}, main weights {'packed' if packed else 'fp32'}"
            with stage.attempt(what):
                cases = [packed_cases.values(numel, seed) for seed, numel in enumerate(sizes)]
                drawn = [packed_cases.rounding(numel, 1000) for numel in sizes]
                grads = [grad for grad, *_ in cases]
                wanted, made = (
                    [packed_cases.state(*numbers, (name, name), packed) for _, *numbers in cases] for _ in range(2)
                )
                found = [packed_cases.on(one, stage.device) for one in made]
                adam_update.eager(grads, wanted, step, drawn)  # type: ignore[attr-defined]
                there = [one._replace(row_ids=one.row_ids.to(stage.device)) for one in drawn]
                adam_update([grad.to(stage.device) for grad in grads], found, step, there)
                found = [packed_cases.on(one, torch.device("cpu")) for one in found]
                shares = {}
                for part, kind in enumerate(("main weights", "first moments", "second moments")):
                    ours, theirs = (
                        torch.cat([packed_cases.unpacked(one)[part] for one in states]) for states in (found, wanted)
                    )
                    shares[kind] = float((~torch.isclose(ours, theirs, rtol=4e-6, atol=1e-8)).double().mean())
                # The last bit of a product decides now and then which neighbour is taken.
                stage.within(f"{what}: share of other numbers", max(shares.values()), 0.003, **shares)


def orthogonalization(stage: Stage, size: int) -> None:
    """Compare Muon's iteration with singular values in fp64, over the error that is to be expected."""
    for dtype, unit, most in ((torch.float32, 2.0**-24, 10.0), (torch.bfloat16, 2.0**-9, 3.0)):
        what = f"orthogonalization, {str(dtype).removeprefix('torch.')}"
        with stage.attempt(what):
            shares = {}
            for rows, columns in ((32 * size, 48 * size), (40 * size, 16 * size)):
                generator = torch.Generator().manual_seed(rows)
                batch = torch.randn(3, rows, columns, generator=generator)
                found = orthogonalized(batch.to(stage.device), steps_of("quintic", 5), dtype).double().cpu()
                for matrix, one in zip(batch, found):
                    wanted = reference_muon.orthogonalized(matrix, reference_muon.QUINTIC)
                    expected = reference_muon.expected_error(matrix, reference_muon.QUINTIC, unit)
                    share = float((one - wanted).norm()) / expected
                    shares[f"{rows} x {columns}"] = max(share, shares.get(f"{rows} x {columns}", 0.0))
            stage.within(what, max(shares.values()), most, **shares)


def pinned_memory(stage: Stage, size: int) -> None:
    """Move layers of activations to host memory and back while products run; compare their bits, and the memory."""
    what = "activations on the host and back"
    with stage.attempt(what):
        pool, there, back = PinnedPool(), CopyStream(), CopyStream()
        generator = torch.Generator().manual_seed(size)
        weight = torch.randn(32 * size, 32 * size, generator=generator).to(stage.device, torch.bfloat16)
        on_device, wrong = [], 0
        for _ in range(3):  # the second and the third time with host memory that was used before
            layers: list[tuple[torch.Tensor, torch.Tensor, OffloadedStorage]] = []
            for _ in range(8):
                kept = weight @ weight
                layers.append((kept, kept.double().sum(), OffloadedStorage(kept, pool, there)))
                if len(layers) > 1:
                    layers[-2][2].free()
                weight = (weight @ kept.tanh()).tanh()
            on_device.append(sum(one.untyped_storage().nbytes() > 0 for one, *_ in layers))
            arrived = layers[-1][2].return_to_device(back)
            for index in reversed(range(8)):
                back.make_current_wait(arrived)
                if index:
                    arrived = layers[index - 1][2].return_to_device(back)
                kept, total, _ = layers[index]
                wrong += int(kept.double().sum() != total)
                weight = (weight @ kept.tanh()).tanh()
        stage.holds(
            what,
            wrong == 0 and on_device == [1, 1, 1] and pool.in_use == 0,
            f"{wrong} of 24 differ, {on_device} of 8 were on the device, {pool.in_use} bytes in use",
        )
