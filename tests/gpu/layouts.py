"""Stages 4 and 6: small models on the device against the CPU, and layouts of several ranks against one.

Both use the doctor: `measure` trains a small copy of a model for a few steps and records losses, gradients of every
parameter, counts, `expert_bias` and weights; `compare` says what differs.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import ours
from benchmarks.problem import Shape, make_problem, oracle, relative_error
from megatron_moe import platform
from megatron_moe.config import cli
from megatron_moe.config.schema import replace
from megatron_moe.moe.load_balance import updated_expert_bias
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.routing import MicroBatch, chosen_experts, route, scores_from_logits
from megatron_moe.parallel import groups
from megatron_moe_tools.doctor.compare import FP32, compare, rounding_error, tolerances_of
from megatron_moe_tools.doctor.layouts import EVERY_KIND, combinations_of, model
from megatron_moe_tools.doctor.measure import MeasuringRanks, Request, assemble, measure
from megatron_moe_tools.doctor.small_copy import PADDED_VOCABULARY
from tests.gpu.operators import one_rank
from tests.gpu.processes import RanksFailed, run_ranks
from tests.gpu.ranks import measure_layouts
from tests.gpu.stage import FAIL, PASS, Stage
from tests.helpers.errors import worst
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding

GRADIENT_BOUND = 1e-5
"""Of the first step in fp32, per parameter: nothing has been divided by a small second moment yet."""


def _request(of: str, steps: int, **changes: Any) -> Any:
    return Request(model(of)[1], PADDED_VOCABULARY, steps, tuple(range(1, steps + 1)), **changes)


def _record(stage: Stage, name: str, got: Any, oracle: Any, tolerances: Any) -> None:
    result = compare(got, oracle, tolerances)
    said = "; ".join(
        f"{one.quantity} {one.name} {one.error:.2e} of {one.allowed:.0e} {one.detail}" for one in result.differences[:6]
    )
    stage.check(name, PASS if result.agrees else FAIL, said, differences=len(result.differences), **result.largest)


def _oracle(stage: Stage, request: Any, clear: float) -> tuple[Any, Any]:
    """Return the result of one process on a CPU, and the request with samples whose choices have a clear margin."""
    with MeasuringRanks(1, 120.0) as pool:
        for seed in range(6):
            asked = dataclasses.replace(request, data_seed=seed)
            (record,) = pool.measure(asked, 1)
            whole = assemble([record])
            if whole.smallest_margin >= clear:
                break
    stage.figure("the CPU's oracle", margin=whole.smallest_margin, loss=whole.steps[0]["loss"])
    return whole, dataclasses.replace(asked, candidates=0, picked=tuple(record["picked"]))


def on_device(stage: Stage) -> None:
    """Stage 4: the layer against an fp32 oracle, a tiny model against the CPU, and integers bit for bit."""
    _equal_logits(stage)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        _layer(stage, dtype, bound)
    _shared_overlap(stage)
    with stage.attempt("tiny model in fp32 against the CPU"):
        oracle, request = _oracle(stage, _request("demo", 1 if stage.dry else 2), 1e-5)
        got = assemble([measure(request)])
        errors = {
            name: float((gradient - got.tensors["gradient, step 1"][name]).norm() / gradient.norm().clamp_min(1e-30))
            for name, gradient in oracle.tensors["gradient, step 1"].items()
        }
        which = worst(errors)
        stage.within("gradient of each parameter, step 1, fp32", errors[which], GRADIENT_BOUND, which)
        _record(stage, "tiny model in fp32 against the CPU", got, oracle, FP32)
    if stage.dry:
        # Samples without a close choice are searched among a thousand, on a CPU; how long that takes was not measured.
        stage.impossible("tiny model in bf16 against the CPU in fp32", "the search for samples takes long on a CPU")
        return
    with stage.attempt("tiny model in bf16 against the CPU in fp32"):
        half = _request("bf16", 1, initial_dtype="bfloat16", candidates=1024)
        single = dataclasses.replace(half, run=replace(half.run, bf16=False))
        oracle, request = _oracle(stage, single, rounding_error(half.run) / 2)
        got = assemble([measure(dataclasses.replace(request, run=half.run))])
        _record(stage, "tiny model in bf16 against the CPU in fp32", got, oracle, tolerances_of(half.run))


def _layer(stage: Stage, dtype: Any, bound: float) -> None:
    name = f"MoE layer, {str(dtype).removeprefix('torch.')}, output and gradients"
    with stage.attempt(name):
        shape = Shape(64, 32, 8, 2, 16, 16) if stage.dry else Shape(2048, 512, 32, 4, 256, 256)
        problem = make_problem(shape, dtype, torch.device("cpu"))
        truth = oracle(problem)
        moved = {key: value.to(stage.device) for key, value in vars(problem).items() if key != "shape"}
        with one_rank():
            layer = ours(dataclasses.replace(problem, **moved), "grouped_mm")
            layer.step()
            errors = {key: relative_error(value.cpu(), truth[key]) for key, value in layer.results().items()}
        stage.within(name, errors[worst(errors)], bound, worst(errors), **errors)


def _shared_overlap(stage: Stage) -> None:
    """Check that a layer has the same bits whether or not its shared expert computes on a stream of its own."""
    name = "the shared expert on a stream of its own, bits of output and gradients"
    with stage.attempt(name):
        case = {**random_case(5), "shared": True, "shared_gate": True, "padding": False}
        try:
            layer = build_layer(case, {})[0].to(stage.device)
            hidden, _ = tokens_and_padding(case, 16 if stage.dry else 2048, 4)
            found = []
            for beside in (False, *[platform.has_streams()] * 10):
                layer.shared_overlaps = beside
                layer.zero_grad(set_to_none=True)
                given = hidden.to(stage.device).requires_grad_()
                output, _ = layer(given)
                (output * torch.linspace(0.5, 1.5, output.shape[-1], device=output.device)).sum().backward()
                found.append([output.detach(), given.grad, *(weight.grad for weight in layer.parameters())])
        finally:
            groups.destroy()
        same = all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one))
        stage.holds(name, same, "ten passes against one without")


def _equal_logits(stage: Stage) -> None:
    """Check that equal logits choose the same experts as a CPU and move the bias by the same bits, ties or none.

    Of experts that are exactly equal the kernels take the lower one, as a stable sort does; torch promises no order.
    """
    flags = "--preset tiny --mock-data --vocab-size 512 --num-experts 16 --moe-router-topk 4 "
    flags += "--moe-router-num-groups 1 --moe-router-group-topk 1"
    options = MoEOptions.from_run(cli.parse(flags.split()))
    assert options is not None
    choice = functools.partial(chosen_experts, options, None)
    batch, zeros = MicroBatch(None, 1, True), torch.zeros(16, device=stage.device)
    generator = torch.Generator().manual_seed(6)
    cases = {
        "distinct logits": torch.rand(2000, 16, generator=generator).argsort(dim=-1).float() / 8 - 1,
        "logits with ties": torch.randint(-8, 8, (2000, 16), generator=generator).float() / 8,
    }
    for name, logits in cases.items():
        with stage.attempt(f"counts and expert_bias of {name}"):
            ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
            counts = ids.flatten().bincount(minlength=16)
            bias = updated_expert_bias(torch.zeros(16), counts, 1e-3)
            there = logits.to(stage.device)
            decision = route(there, scores_from_logits(there, options), zeros, options, batch, choice)
            found = decision.expert_ids.flatten().bincount(minlength=16)
            moved = updated_expert_bias(zeros, found, 1e-3)
            if stage.dry and "ties" in name:
                stage.impossible(f"counts and expert_bias of {name}", "without kernels torch chooses, in any order")
                continue
            stage.holds(f"token counts of {name}", torch.equal(counts, found.cpu()), f"{found.tolist()}")
            stage.holds(f"expert_bias of {name}", torch.equal(bias, moved.cpu()), f"{moved.tolist()}")
            own = decision.expert_ids.cpu()
            stage.holds(f"experts of {name}", torch.equal(ids, own), f"{int((ids != own).sum())} choices differ")
            scores = logits.double().sigmoid().gather(-1, ids)
            weights = scores / scores.sum(dim=-1, keepdim=True)
            apart = (decision.probs.cpu() / weights / (decision.probs.sum() / weights.sum()).cpu() - 1).abs().max()
            stage.within(f"weights of {name}, in proportion", float(apart), 2e-6)


# Name in the report -> the doctor's name of the layout, the model, and further flags.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "EP2": ("dp2-ep2", "demo", {}),
    "EP2, a token once to a node": ("dp2-ep2", "demo", {"moe_alltoall_by_node": True}),
    "TP2+SP": ("tp2", "demo", {}),
    "PP2": ("pp2", "demo", {}),
    "CP2, latents exchanged": ("cp2", "demo", {"mla_cp_exchange": "latent"}),
    "CP2, keys and values exchanged": ("cp2", "demo", {"mla_cp_exchange": "expanded"}),
    "DP2 with the distributed optimizer": ("dp2", "demo", {"use_distributed_optimizer": True}),
    "DP2, overlapped, a bucket for each parameter": (
        "dp2",
        "demo",
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "ddp_bucket_size": 1,
        },
    ),
    "TP2 DP2 EP2 ETP2": ("tp2-dp2-ep2-etp2", "demo", {}),
    "CP2 DP2 EP2": ("cp2-dp2-ep2", "demo", {}),
    "CP2 DP2 at ZeRO stage 3": ("cp2-dp2", "demo", {"use_torch_fsdp2": True}),
    "TP2 PP2 EP2 with multi-token prediction": ("tp2-pp2-ep2-etp1", "mtp", {}),
}
LEFT_OUT_DRY = ("CP2 DP2 EP2", "CP2, keys and values exchanged", "TP2 PP2 EP2 with multi-token prediction")


def several_ranks(stage: Stage) -> None:
    """Stage 6: layouts of two and four ranks against one, all on one card, or over NCCL where there are as many."""
    cards = 1 if stage.dry else torch.cuda.device_count()
    known = {one.name: one for one in combinations_of(model("demo")[0], EVERY_KIND, 4)}
    titles = [title for title in LAYOUTS if not (stage.dry and title in LEFT_OUT_DRY)]
    for title in LAYOUTS.keys() - titles:
        stage.impossible(title, "left out of dry runs for time")
    models = list(dict.fromkeys(LAYOUTS[title][1] for title in titles))
    jobs = [_job(stage, f"one-{of}", of, 1, {}, "staged") for of in models]
    for title in titles:
        name, of, further = LAYOUTS[title]
        flags = {**known[name].flags, "use_distributed_optimizer": False, "use_torch_fsdp2": False, **further}
        backend = "nccl" if cards >= known[name].ranks else "staged"
        jobs.append(_job(stage, f"{len(jobs)}-{name}", of, known[name].ranks, flags, backend))
    stage.doing(f"{len(titles)} layouts on up to 4 ranks")
    folder, failure = stage.folder / "ranks", ""
    try:
        most = max(job["ranks"] for job in jobs)
        run_ranks(measure_layouts, (str(folder), jobs), most, folder, stage.left - 3, stage.dry, one_device=True)
    except RanksFailed as error:
        failure = str(error)
    oracles = {}
    for job, of in zip(jobs, models):
        with stage.attempt(f"one rank, {of}"):
            oracles[of] = _assembled(folder, job, failure)
    for job, title in zip(jobs[len(models) :], titles, strict=True):
        with stage.attempt(title):
            got, of = _assembled(folder, job, failure), LAYOUTS[title][1]
            _record(stage, f"{title} ({job['ranks']} ranks, {job['backend']})", got, oracles[of], FP32)


def _job(stage: Stage, name: str, of: str, ranks: int, flags: dict[str, Any], backend: str) -> dict[str, Any]:
    request = _request(of, 1 if stage.dry else 2)
    request = dataclasses.replace(request, run=replace(request.run, **flags))
    return {"name": name, "ranks": ranks, "backend": backend, "request": request}


def _assembled(folder: Path, job: dict[str, Any], failure: str) -> Any:
    """Return the model that a job's ranks made; RuntimeError where one failed, or did not come to an end."""
    records = []
    for rank in range(job["ranks"]):
        path = folder / f"{job['name']}-{rank}.pt"
        if not path.exists():
            raise RuntimeError(f"rank {rank} did not come to its end: {failure}")
        records.append(torch.load(path, weights_only=True))
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(records) if "error" in one]
    if errors:
        raise RuntimeError("; ".join(errors))
    return assemble(records)
