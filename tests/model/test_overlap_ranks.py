"""Two micro-batches at a time, by the engine's schedule: losses, gradients, counts and biases are those of one by one.

The streams take notes and queue nothing: what is tested is the order of the nodes, on which stream rows travel, how
gradients are passed on, and that nothing that backward needs was freed. That kernels overlap on a card is not.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import utils

from megatron_moe import platform
from megatron_moe.config.schema import Run, replace
from megatron_moe.engine.schedules import configured
from megatron_moe.model import build, engine_config
from megatron_moe.moe.grouped_gemm import DelayedWgrad
from megatron_moe.parallel import groups
from megatron_moe.training.start_notes import _expert_notes
from tests.helpers.rows import rows
from tests.model import mtp_cases
from tests.model.test_build_ranks import EP2, MODELS, SP2, VPP2
from tests.moe import deep_ep_stub

pytestmark = pytest.mark.engine

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
LATER = {**OVERLAP, "delay_wgrad_compute": True}
MODEL = {**MODELS["experts"], "micro_batch_size": 1, "lr": 1e-2, "adam_eps": 1e-2}


class _Stream:
    def __init__(self, device: Any = None, name: str = "side", **_: Any) -> None:
        self.name = name


class _Event:
    def wait(self, stream: Any = None) -> None: ...

    def record(self, stream: Any = None) -> None: ...


@contextlib.contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """Within the block there are streams; nodes of the schedule, exchanges of rows and later gradients are noted."""
    compute = DelayedWgrad.compute

    def computed(self: Any) -> None:
        notes.append("later gradients")
        compute(self)

    current = [_Stream(name="main")]
    exchange = dist.all_to_all_single

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    def exchanged(out: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        if given.is_floating_point():
            notes.append(f"rows on {current[-1].name}")
        return exchange(out, given, *args, **options)

    def named(way: str) -> Any:
        stock = getattr(utils.ScheduleNode, f"_{way}")

        def run(self: Any, *tensors: Any) -> Any:
            notes.append(f"{self.name} {way}".replace("pre_dispatch_computation", "attn"))  # 0.19.2's name of it
            return stock(self, *tensors)

        return mock.patch.object(utils.ScheduleNode, f"_{way}", run)

    streams = {"Stream": _Stream, "Event": _Event, "stream": stream, "current_stream": lambda device=None: current[-1]}
    with (
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch.multiple(torch.cuda.nvtx, range_push=lambda *_: None, range_pop=lambda *_: None),
        mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None),
        mock.patch.object(platform, "has_streams", lambda: True),
        mock.patch.object(dist, "all_to_all_single", exchanged),
        mock.patch.object(DelayedWgrad, "compute", computed),
        named("forward"),
        named("backward"),
    ):
        yield


@contextlib.contextmanager
def in_fp32() -> Iterator[None]:
    """Within the block the engine's configuration is not asked whether it likes the schedule in fp32: it does not."""

    def unasked(run: Run) -> Any:
        config = engine_config.transformer_config(replace(run, overlap_moe_expert_parallel_comm=False))
        for name in ("overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"):
            setattr(config, name, getattr(run.moe, name))
        return config

    with mock.patch.object(build, "transformer_config", unasked):
        yield


def steps(run: Run) -> dict[str, Any]:
    """A step, with notes where micro-batches overlap."""
    notes: list[str] = []
    if run.moe.moe_alltoall_by_node:
        groups.pretend_machines(2)
    with contextlib.ExitStack() as stack:
        if run.moe.moe_token_dispatcher_type == "flex":
            stack.enter_context(deep_ep_stub.installed())
        if run.moe.overlap_moe_expert_parallel_comm:
            stack.enter_context(noted(notes))
            stack.enter_context(contextlib.nullcontext() if run.precision.bf16 else in_fp32())
        return {**mtp_cases.steps(run), "notes": notes}


RECOMPUTED = ("core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
EVERYTHING = {
    "recompute_granularity": "selective",
    "recompute_modules": RECOMPUTED,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.1,),
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_gate": True,
    "hidden_dropout": 0.1,
    "calculate_per_token_loss": True,
}
HALF = {"bf16": True, "fp32_residual_connection": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
ETP1 = {"expert_tensor_parallel_size": 1}
# One case for each way that tensors can take: name -> (ranks, flags, how micro-batches overlap).
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "all-to-all": (2, EP2, OVERLAP),
    "everything recomputed, auxiliary losses, dropout": (2, {**EP2, **EVERYTHING}, LATER),
    "bf16 with an fp32 residual, overlapped reduction": (2, {**EP2, **HALF}, LATER),
    "TP2 with sequence parallelism, dropout": (2, {**SP2, **EP2, **ETP1, "hidden_dropout": 0.1}, OVERLAP),
    "PP2 in two chunks each, further predictions": (4, {**EP2, **VPP2, "mtp_num_layers": 1}, LATER),
    "packed documents": (2, {**EP2, **mtp_cases.APART}, OVERLAP),
    "ETP2": (4, {**SP2, **EP2}, OVERLAP),
    "capacity": (2, {**EP2, "moe_expert_capacity_factor": 0.75}, LATER),
    "by node": (4, {"expert_model_parallel_size": 4, "moe_alltoall_by_node": True}, LATER),
    "DeepEP": (2, {**EP2, "moe_token_dispatcher_type": "flex"}, OVERLAP),
    "HybridEP": (2, {**EP2, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, LATER),
}
IN_TEST = list(CASES)[:6]


# What a layer's forward pass of one micro-batch and another's backward pass of the one before are put together to.
TOGETHER = [
    ("moe_combine backward", "rows on side", "attn forward", "mlp backward", "moe_dispatch forward", "rows on side"),
    ("moe_dispatch backward", "rows on side", "mlp forward", "moe_combine forward", "rows on side", "attn backward"),
]


def overlapped(once: Any, case: str) -> Any:
    ranks, flags, how = CASES[case]
    return once(ranks, steps, run=replace(Run(), **{**MODEL, **flags, **how}))


@pytest.mark.parametrize(("case", "between"), [(IN_TEST[0], ()), (IN_TEST[2], ("later gradients",))])
def test_exchanges_of_one_micro_batch_are_queued_next_to_the_products_of_another(once: Any, case, between) -> None:
    for found in overlapped(once, case):
        wanted = [*TOGETHER[0], *between, *TOGETHER[1]]
        notes = found["notes"]
        starts = [at for at in range(len(notes)) if notes[at : at + len(wanted)] == wanted]
        assert len(starts) == 2, "a step of two micro-batches, two pairs of layers with experts at both ends"


@pytest.mark.parametrize("case", rows(CASES, test=IN_TEST))
def test_losses_gradients_and_counts_are_those_of_one_micro_batch_after_the_other(gloo, once, case: str) -> None:
    ranks, flags, _ = CASES[case]
    plain = gloo.run(ranks, steps, run=replace(Run(), **{**MODEL, **flags}))
    for got, wanted in zip(overlapped(once, case), plain, strict=True):
        assert_same_bits(got, wanted)
        # No row travels on the stream of the products, but in the last node, which has multi-token prediction.
        exchanges = {note for note in got["notes"] if note.startswith("rows")}
        assert exchanges - ({"rows on main"} if "mtp_num_layers" in flags else set()) == {"rows on side"}


def test_a_replay_runs_micro_batches_one_after_the_other() -> None:
    configs = [types.SimpleNamespace(overlap_moe_expert_parallel_comm=True) for _ in range(2)]
    chunks: Any = [types.SimpleNamespace(config=config) for config in configs]
    with configured(chunks, overlap_moe_expert_parallel_comm=False):
        assert [config.overlap_moe_expert_parallel_comm for config in configs] == [False, False]
    assert [config.overlap_moe_expert_parallel_comm for config in configs] == [True, True]


@pytest.mark.parametrize("flag", ["overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"])
def test_a_run_without_streams_says_that_nothing_overlaps(flag: str) -> None:
    run = replace(Run(), **{"num_experts": 4, "moe_shared_expert_intermediate_size": 8, flag: True})
    trainer: Any = types.SimpleNamespace(run=run)
    (note,) = _expert_notes(trainer)
    assert note.startswith(f"--{flag.replace('_', '-')} has no effect")
    with mock.patch.object(platform, "has_cuda", lambda: True):
        assert _expert_notes(trainer) == []


def assert_same_bits(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["losses"] == wanted["losses"]
    assert got["grad_norms"] == wanted["grad_norms"]
    assert got["counts"] == wanted["counts"]
    for name, (_, weight, grad) in wanted["tensors"].items():
        assert torch.equal(got["tensors"][name][1], weight), name
        assert torch.equal(got["tensors"][name][2], grad), name
