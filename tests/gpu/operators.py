"""Stage 3: each operator of the package against fp64, forward and backward, after its memory was filled with NaN."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.model import attention as attentions
from megatron_moe.model.build import _Lookup
from megatron_moe.model.context_parallel import OverRanks, attend_with_torch
from megatron_moe.model.cross_entropy import cross_entropy, linear_cross_entropy
from megatron_moe.model.mla import rotated
from megatron_moe.model.norm import RMSNorm
from megatron_moe.moe import experts
from megatron_moe.moe import rows as moves
from megatron_moe.moe.grouped_gemm import TorchProduct, gate_product
from megatron_moe.moe.grouped_gemm_fp8 import E4M3, E5M2, TILE, Tiles, TransformerEngineFp8, why_not_by_triton
from megatron_moe.moe.grouped_gemm_fp8 import fp8_products as kernels_of
from megatron_moe.parallel import groups
from megatron_moe.parallel.sequence import Documents
from tests.gpu.stage import Stage
from tests.helpers import tiles_where_made
from tests.helpers.errors import worst

Operator = Callable[..., Tensor]
ROUNDINGS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Allowed error of a result, in norm over the norm of the fp64 result: a few roundings to the dtype."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = tuple(NAMES)
_SEED = 20


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    groups.initialize(Run())
    try:
        yield
    finally:
        groups.destroy()


def poison(device: torch.device) -> None:
    """Fill memory that the allocator will hand out with NaN, so that what an operator leaves unwritten is seen."""
    if device.type != "cuda":
        return
    blocks = [torch.full((1 << size,), torch.nan, device=device) for size in (8, 12, 16, 18, 22, 26) for _ in range(8)]
    del blocks
    torch.cuda.synchronize()


def error_of(got: Tensor, truth: Tensor) -> float:
    """Return |got - truth| / |truth| in fp64; of an empty or zero truth, |got - truth|."""
    if got.shape != truth.shape:
        return float("inf")
    difference, size = (got.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / size if size > 0 else difference)


def compare(
    stage: Stage, name: str, operator: Operator, inputs: Sequence[Tensor], truth: Operator, bound: float | None = None
) -> None:
    """Record the largest error of an operator's result and gradients against `truth` in fp64.

    Args:
        inputs: tensors on the CPU in the dtype of the check; gradients are compared of the floating ones.
        truth: takes fp64 in place of each floating tensor.
    """
    dtype = next(one.dtype for one in inputs if one.is_floating_point())
    with stage.attempt(f"{name}, {NAMES[dtype]}"):
        grad_seed = torch.Generator().manual_seed(_SEED)
        exact = _leaves([one.double() if one.is_floating_point() else one for one in inputs])
        wanted = truth(*exact)
        upper = torch.randn(wanted.shape, generator=grad_seed, dtype=torch.float64).to(dtype)
        if wanted.numel():
            wanted.backward(upper.double())
        own = _leaves([one.to(stage.device) for one in inputs])
        poison(stage.device)
        result = operator(*own)
        poison(stage.device)
        if result.numel():
            result.backward(upper.to(result.dtype).to(stage.device))
        errors = {"result": error_of(result.detach().cpu(), wanted.detach())}
        for number, (mine, theirs) in enumerate(zip(own, exact)):
            if theirs.is_floating_point() and theirs.grad is not None:
                got = torch.zeros_like(mine) if mine.grad is None else mine.grad
                errors[f"gradient {number}"] = error_of(got.cpu(), theirs.grad)
        allowed = ROUNDINGS[dtype] if bound is None else bound
        stage.within(f"{name}, {NAMES[dtype]}", errors[worst(errors)], allowed, **errors)


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone().requires_grad_(one.is_floating_point()) for one in tensors]


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum((k + 1) * n for k, n in enumerate(shape)) + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def operators(stage: Stage) -> None:
    """Run stage 3, with the switches of sums and products that a run computes with."""
    from tests.gpu import kernels  # which compares by what is here

    once = (kernels.routing, kernels.sorting, kernels.adam, kernels.packed_adam, kernels.orthogonalization)
    by_dtype = (activation, permutation, grouped_products, norm, attention, attention_logits, rotary, kernels.positions)
    size = 1 if stage.dry else 8
    with one_rank():
        kernels.which(stage)
        for check in (*once, kernels.pinned_memory, fp8_products):
            check(stage, size)
        for dtype in DTYPES:
            for compared in by_dtype:
                compared(stage, dtype, size)
        for dtype in DTYPES[:2]:
            for compared in (loss, embedding, gate):
                compared(stage, dtype, size)


def activation(stage: Stage, dtype: torch.dtype, size: int) -> None:
    rows, width = 67 * size, 48 * size
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(1))

    def truth(gate_up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * weight.unsqueeze(-1)

    inputs = [draw(rows, 2 * width, dtype=dtype), probs]
    compare(stage, "weighted SwiGLU", experts.weighted_swiglu, inputs, truth)
    compare(stage, "weighted SwiGLU without rows", experts.weighted_swiglu, [inputs[0][:0], probs[:0]], truth)


def permutation(stage: Stage, dtype: torch.dtype, size: int) -> None:
    tokens, topk, width = 40 * size, 4, 64 * size
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(tokens * topk, generator=generator)
    source, slots = order // topk, order.argsort().view(tokens, topk)
    kept = order[: tokens * topk * 3 // 4]
    partial = torch.full((tokens * topk,), len(kept))
    partial[kept] = torch.arange(len(kept))
    partial = partial.view(tokens, topk)

    def sums(rows: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        return rows.new_zeros(tokens, width).index_add(0, source, rows)

    rows = draw(tokens * topk, width, dtype=dtype)
    compare(stage, "gather_and_sum", lambda r, s: moves.sum_copies(r, s // topk, slots.to(r.device)), [rows, order],
            lambda r, s: sums(r, s // topk, s))  # fmt: skip
    compare(stage, "gather_and_sum with missing copies",
            lambda r, s, p: moves.sum_copies(r, s, p, partial=True), [rows[: len(kept)], kept // topk, partial],
            sums)  # fmt: skip
    compare(stage, "copy_rows", lambda t, s, p: moves.copy_rows(t, s, p),
            [draw(tokens, width, dtype=dtype), source, slots], lambda t, s, p: t[s])  # fmt: skip


def grouped_products(stage: Stage, dtype: torch.dtype, size: int) -> None:
    experts, width, out = 8, 32 * size, 48 * size
    groups = {
        "even": [16 * size] * experts,
        "empty groups": [0, 40 * size, 0, 0, 88 * size, 0, 0, 0],
        "groups of one row": [1] * experts,
        "all in one group": [0] * 5 + [128 * size, 0, 0],
        "uneven": [1, 0, 37, 128 * size, 3, 0, 61, 5],
        "no rows": [0] * experts,
    }
    weights = draw(experts, out, width, dtype=dtype, scale=width**-0.5)
    for name, counts in groups.items():
        offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
        rows = draw(sum(counts), width, dtype=dtype)
        compare(stage, f"grouped product, {name}", TorchProduct(), [rows, weights, offsets], _loop)


def fp8_products(stage: Stage, size: int) -> None:
    """Compare each form of the products in FP8 with the emulation on the CPU, from the same tiles."""
    width, out = 128 * size, 128
    inputs = {"experts": [1, 0, 37, 128 * size, 3, 200], "a linear layer": [130 * size]}
    why, no_te = platform.why_no_fp8_products(), platform.why_no_transformer_engine()
    no_kernels = why_not_by_triton()
    if no_kernels is None:
        _tiles(stage, size)
    else:
        stage.impossible("tiles in FP8, bit for bit", no_kernels)
    for fp8_format in ("e4m3", "hybrid"):
        _, truth = kernels_of(fp8_format, "emulated")
        forms: dict[str, tuple[Operator | None, str]] = {
            "emulated": (truth, ""),
            "Triton's kernels": (None if no_kernels else kernels_of(fp8_format, "triton")[1], no_kernels or ""),
            "torch's scaled product": (None if why else kernels_of(fp8_format, "scaled")[1], why or ""),
            "Transformer Engine": (None if why or no_te else TransformerEngineFp8(fp8_format), why or no_te or ""),
        }
        for form, (kernel, reason) in forms.items():
            for name, counts in inputs.items():
                check = f"{fp8_format}, {form}, {name}"
                if kernel is None:
                    stage.impossible(check, reason)
                    continue
                offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
                weights = draw(len(counts), out, width, dtype=torch.bfloat16, scale=width**-0.5)
                rows = draw(sum(counts), width, dtype=torch.bfloat16)
                # The emulation and our kernels read offsets where the rows are, the others on the host.
                host = form not in ("emulated", "Triton's kernels")
                compare(stage, check, lambda r, w, o, k=kernel, h=host: k(r, w, o.cpu() if h else o),
                        [rows, weights, offsets], truth, bound=1e-2)  # fmt: skip


def _tiles(stage: Stage, size: int) -> None:
    """Compare the tiles that our kernels cut with those that torch cuts on the CPU: numbers and scales, bit for bit."""
    from megatron_moe.kernels import triton_fp8

    counts = [1, 0, 37, 128 * size, 3, 200]
    rows, offsets = draw(sum(counts), 200 * size, dtype=torch.bfloat16), torch.tensor(counts).cumsum(0).to(torch.int32)
    rows *= torch.exp(4 * draw(*rows.shape, dtype=torch.bfloat16))
    stack = draw(3, 2, 136, 200 * size, dtype=torch.bfloat16)
    on_device = [one.to(stage.device) for one in (rows, stack, offsets)]
    for dtype in (E4M3, E5M2):
        with stage.attempt(f"tiles in FP8, bit for bit, {dtype}"):
            rounded = Tiles.of(rows, 1, TILE, dtype), Tiles.of(on_device[0], 1, TILE, dtype)
            blocks = Tiles.of(stack, TILE, TILE), Tiles.of(on_device[1], TILE, TILE)
            pairs = [(a.numbers, b.numbers) for a, b in (rounded, blocks)]
            pairs += [(a.scales, b.scales) for a, b in (rounded, blocks)]
            ((numbers, scales),) = triton_fp8.cut_columns(on_device[0].unsqueeze(1), on_device[2], dtype)
            start = 0
            for expert in rows.split(counts):
                wanted = Tiles.of(expert, TILE, 1, dtype)
                end = start + wanted.numbers.shape[0]
                pairs += [(wanted.numbers, numbers[:, start:end].t())]
                pairs += [(wanted.scales, scales[start // TILE : end // TILE])]
                start = end
            same = all(torch.equal(a.float(), b.float().cpu()) for a, b in pairs)
            stage.holds(f"tiles in FP8, bit for bit, {dtype}", same)
        with stage.attempt(f"tiles in FP8 of copies and of the activation, bit for bit, {dtype}"):
            wrong = tiles_where_made.differ(*tiles_where_made.pairs(on_device[0], on_device[2], dtype))
            stage.holds(f"tiles in FP8 of copies and of the activation, bit for bit, {dtype}", not wrong, f"{wrong}")


def _loop(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    return torch.cat([rows[a:b] @ w.t() for a, b, w in zip([0, *ends], ends, weights.unbind(0))])


def norm(stage: Stage, dtype: torch.dtype, size: int) -> None:
    width = 96 * size

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, fp32_residual_connection=False)
        return RMSNorm(config, width)._kernel(x, weight, 1e-6, x.dtype)

    def truth(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    inputs = [draw(33 * size, 2, width, dtype=dtype), 1 + draw(width, dtype=dtype, scale=0.1)]
    # In half precision the weight's gradient is a sum of many rows, of which some kernels keep partial sums.
    compare(stage, "RMSNorm", normed, inputs, truth)


def attention(stage: Stage, dtype: torch.dtype, size: int) -> None:
    # (heads, groups, key width, value width): MLA's widths, grouped queries, plain.
    cases = {"192/128": (4, 4, 192, 128), "GQA 128": (8, 2, 128, 128), "64": (4, 4, 64, 64)}
    length = 24 * size
    for name, (heads, key_heads, key, value) in cases.items():
        scale = key**-0.5

        def truth(
            q: Tensor, k: Tensor, v: Tensor, firsts: Tensor, repeats: int = heads // key_heads, scale: float = scale
        ) -> Tensor:
            k, v = (one.repeat_interleave(repeats, dim=1) for one in (k, v))
            scores = (q @ k.transpose(-2, -1)) * scale
            places = torch.arange(length)
            mask = (places > places[:, None]) | (places < firsts[:2, None, :, None])
            return scores.masked_fill(mask, -torch.inf).softmax(-1) @ v

        def ours(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor, scale: float = scale) -> Tensor:
            if not firsts.any():
                return attentions._attend_cuda(q, k, v, scale, 0.0)
            alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
            over = OverRanks(attend_with_torch, alone, gathers=False)  # type: ignore[arg-type]
            return over(q, k, v, scale, 0.0, Documents.of(firsts, 2))

        shapes = [(2, heads, length, key), (2, key_heads, length, key), (2, key_heads, length, value)]
        # Equal queries and keys would attend to themselves alone, and their gradients would be differences of nothing.
        inputs = [draw(*shape, dtype=dtype, seed=1000 * number) for number, shape in enumerate(shapes)]
        one = torch.zeros(4, length, dtype=torch.int64)
        several = one.index_fill(1, torch.arange(5 * size, length), 5 * size)
        several[1, 11 * size :] = 11 * size
        # Probabilities are rounded to the dtype before the second product, and again on the way back.
        for what, firsts in (("", one), (", documents", several)):
            compare(stage, f"attention {name}{what}", ours, [*inputs, firsts], truth, bound=4 * ROUNDINGS[dtype])


def attention_logits(stage: Stage, dtype: torch.dtype, size: int) -> None:
    for heads, key_heads, width in ((4, 4, 192), (8, 2, 128)):
        name, length = f"largest attention logits {heads}/{key_heads}, {NAMES[dtype]}", 24 * size
        with stage.attempt(name):
            query, key = (
                draw(length, 2, heads, width, dtype=dtype),
                draw(length, 2, key_heads, width, dtype=dtype, seed=1),
            )
            of_heads = key.double().repeat_interleave(heads // key_heads, 2)
            scores = torch.einsum("sbnd,tbnd->nbst", query.double(), of_heads) / width**0.5
            truth = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).amax((1, 2, 3))
            poison(stage.device)
            found = attentions.largest_logits(query.to(stage.device), key.to(stage.device), None, at_a_time=5000 * size)
            # Products of half-precision numbers are exact in fp32, and so are the sums to fp32's rounding.
            stage.within(name, error_of(found.cpu(), truth), ROUNDINGS[torch.float32])


def rotary_tables() -> tuple[Tensor, Tensor]:
    """Return cosines and sines for 31 positions and 32 pairs of channels, [31, 1, 1, 32]."""
    angles = torch.outer(torch.arange(31.0), 10000.0 ** -torch.arange(0, 1, 1 / 32))[:, None, None, :]
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., 64] in fp64, each pair of neighbours rotated as a complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


def rotary(stage: Stage, dtype: torch.dtype, _size: int) -> None:
    def ours(x: Tensor) -> Tensor:
        return rotated(x, *(one.to(x.device) for one in rotary_tables()))

    compare(stage, "rotary", ours, [draw(31, 2, 4, 64, dtype=dtype)], lambda x: turned(x, *rotary_tables()))


def loss(stage: Stage, dtype: torch.dtype, size: int) -> None:
    tokens, width, vocabulary = 50 * size, 64 * size, 401 * size
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(4))
    inputs = [draw(tokens, width, dtype=dtype), draw(vocabulary, width, dtype=dtype, scale=width**-0.5), labels]

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, chunk_tokens=16 * size)

    def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.t(), labels, reduction="none")

    compare(stage, "fused loss", ours, inputs, truth)
    of_logits: Any = lambda logits, labels: cross_entropy(logits.clone(), labels)  # noqa: E731
    plain: Any = lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")  # noqa: E731
    compare(stage, "loss of logits", of_logits, [draw(tokens, vocabulary, dtype=dtype), labels], plain)


def gate(stage: Stage, dtype: torch.dtype, size: int) -> None:
    inputs = [draw(60 * size, 64 * size, dtype=dtype), draw(16, 64 * size, dtype=dtype)]
    # The logits are fp32 in any dtype; the gradients are rounded once.
    compare(stage, "the gate's product", lambda h, w: gate_product(h, w, torch.float32), inputs, lambda h, w: h @ w.t())


def embedding(stage: Stage, dtype: torch.dtype, size: int) -> None:
    """The engine's embedding with our gradient, whose sums of many tokens of one id are in fp32."""
    rows, width, tokens = 50, 32 * size, 4000 * size
    # One id is every second token: where each addition is rounded to bf16, its gradient is far off.
    ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(5))
    ids[::2] = 7
    compare(
        stage, "embedding", lambda w, i: _Lookup.apply(i, w), [draw(rows, width, dtype=dtype), ids], lambda w, i: w[i]
    )
