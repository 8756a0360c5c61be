"""Every ZeRO stage trains the model that plain data parallelism trains: 20 fp32 steps on each of many layouts.

The four stages of a layout add the same fp32 numbers in another order, and nothing else. Loss, gradient norm and each
gradient of steps 1, 10 and 20 are compared, relative to plain data parallelism on the same layout; counts and
expert_bias bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_moe.apps.doctor.compare import Tolerances, compare
from megatron_moe.apps.doctor.measure import Request
from megatron_moe.config import rules
from megatron_moe.config.schema import Run, replace
from tests.numbers.test_layout_matrix import (
    ALL_AGAIN,
    ALLGATHER,
    CP2,
    CP4,
    EP2,
    EP4,
    ETP1,
    ETP2,
    FUSED,
    LOOP,
    MODELS,
    PADDED_VOCABULARY,
    PARTS_AGAIN,
    TP2,
    Measured,
    flags_of,
    name_of,
    tell,
)

STEPS = 20
STAGES = {"plain": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8, "use_distributed_optimizer": False}

LAYOUTS: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    ("deepseek", 2, {"dp2": {}}),
    ("deepseek", 2, {"ep2": EP2}),
    ("deepseek", 2, {"cp2": CP2}),
    ("deepseek", 2, {"dp2": {}, "all recomputed": ALL_AGAIN}),
    ("deepseek", 2, {"dp2": {}, "fused": FUSED}),
    ("per token", 2, {"dp2": {}}),
    ("further tokens", 2, {"dp2": {}}),
    ("capacity", 2, {"ep2": EP2}),
    ("tied", 2, {"dp2": {}}),
    ("dense", 2, {"dp2": {}}),
    ("every loss", 2, {"ep2": EP2}),
    ("aux_loss", 2, {"ep2": EP2, "allgather": ALLGATHER}),
    ("deepseek", 4, {"tp2": TP2}),
    ("deepseek", 4, {"ep2": EP2}),
    ("deepseek", 4, {"cp2": CP2}),
    ("deepseek", 4, {"cp4": CP4}),
    ("deepseek", 4, {"cp2": CP2, "ep2": EP2}),
    ("deepseek", 4, {"tp2": TP2, "ep2": EP2, "etp1": ETP1}),
    ("deepseek", 4, {"tp2": TP2, "ep2": EP2, "etp2": ETP2}),
    ("per token", 4, {"ep4": EP4}),
    ("further tokens", 4, {"tp2": TP2}),
    ("further tokens", 4, {"ep2": EP2, "recomputed": PARTS_AGAIN}),
    ("capacity", 4, {"cp2": CP2}),
    ("tied", 4, {"tp2": TP2, "fused": FUSED}),
    ("every loss", 4, {"cp2": CP2, "ep2": EP2}),
    ("aux_loss", 4, {"dp4": {}, "loop": LOOP}),
    ("dense", 4, {"cp2": CP2}),
    ("deepseek", 8, {"dp8": {}}),
    ("deepseek", 8, {"tp2": TP2, "ep2": EP2, "etp1": ETP1}),
    ("deepseek", 8, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp1": ETP1}),
    ("every loss", 8, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp2": ETP2}),
    ("further tokens", 8, {"ep2": EP2}),
    ("per token", 8, {"ep4": EP4, "all recomputed": ALL_AGAIN}),
    ("tied", 8, {"dp8": {}}),
]
ROWS = {name_of(*row): row for row in LAYOUTS}
# A choice that is decided by more than this is not left to rounding; how many draws of samples are tried for one.
CLEAR, DRAWS = 2e-6, 6
# Relative: of a gradient, to the norm of all; of a weight, to what the steps added to it.
BOUNDS = Tolerances(scalar=1e-6, gradient=1e-6, update=1e-3, floor=1.0)


def request(model: str, ranks: int, layout: dict[str, dict[str, Any]], stage: str, draw: int) -> Request:
    flags, samples = MODELS[model]
    run = replace(Run(), **{**flags, **BATCH, **flags_of(layout), "data_parallel_sharding_strategy": STAGES[stage]})
    rules.check(run, ranks)
    return Request(run, PADDED_VOCABULARY, STEPS, (1, STEPS // 2, STEPS), samples + draw)


def test_there_are_as_many_layouts_as_the_page_says() -> None:
    assert len(ROWS) == len(LAYOUTS) >= 24 and {ranks for _, ranks, _ in LAYOUTS} == {2, 4, 8}


@pytest.mark.parametrize("row", ROWS)
def test_every_stage_trains_what_plain_data_parallelism_trains(gloo: Any, tmp_path: Path, row: str) -> None:
    model, ranks, layout = ROWS[row]
    measured = Measured(gloo, tmp_path)

    def measure(*names: str) -> None:
        jobs = {f"{stage}-{draw}": (request(model, ranks, layout, stage, draw), ranks) for stage in names}
        measured.measure(max(ranks, 4), jobs)

    # Where a choice of an expert is a close call, rounding decides it, and then all that follows: other samples do.
    for draw in range(DRAWS):
        measure("plain")
        wanted = measured.whole(f"plain-{draw}")
        if model == "dense" or wanted.smallest_margin > CLEAR:
            break
    measure("zero1", "zero2", "zero3")
    assert all(step["committed"] for step in wanted.steps)
    for stage in ("zero1", "zero2", "zero3"):
        comparison = compare(measured.whole(f"{stage}-{draw}"), wanted, BOUNDS)
        print(row, stage, {kind: f"{error:.1e}" for kind, error in comparison.largest.items()}, flush=True)
        assert comparison.agrees, tell(comparison.differences)
