"""Every ZeRO stage trains the model that plain data parallelism trains: 20 fp32 steps on each of many layouts.

The four stages of a layout add the same fp32 numbers in another order, and nothing else. Loss, gradient norm and each
gradient of steps 1, 10 and 20 are compared, relative to plain data parallelism on the same layout; counts and
expert_bias bit for bit.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config import rules
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.doctor.compare import Tolerances, compare
from megatron_moe_tools.doctor.measure import Request
from tests.numbers import test_layout_matrix as matrix

STEPS = 20
STAGES = {"plain": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8, "use_distributed_optimizer": False}

AXES: dict[str, dict[str, Any]] = {
    **{"tp2": matrix.TP2, "ep2": matrix.EP2, "ep4": matrix.EP4, "cp2": matrix.CP2, "cp4": matrix.CP4},
    **{"etp1": matrix.ETP1, "etp2": matrix.ETP2, "allgather": matrix.ALLGATHER, "loop": matrix.LOOP},
    **{"all recomputed": matrix.ALL_AGAIN, "recomputed": matrix.PARTS_AGAIN, "fused": matrix.FUSED},
    **{"dp2": {}, "dp4": {}, "dp8": {}},
}
LAYOUTS: dict[tuple[str, int], str] = {
    ("deepseek", 2): "dp2, ep2, cp2, dp2 + all recomputed, dp2 + fused",
    ("per token", 2): "dp2",
    ("further tokens", 2): "dp2",
    ("capacity", 2): "ep2",
    ("tied", 2): "dp2",
    ("dense", 2): "dp2",
    ("every loss", 2): "ep2",
    ("aux_loss", 2): "ep2 + allgather",
    ("deepseek", 4): "tp2, ep2, cp2, cp4, cp2 + ep2, tp2 + ep2 + etp1, tp2 + ep2 + etp2",
    ("per token", 4): "ep4",
    ("further tokens", 4): "tp2, ep2 + recomputed",
    ("capacity", 4): "cp2",
    ("tied", 4): "tp2 + fused",
    ("every loss", 4): "cp2 + ep2",
    ("aux_loss", 4): "dp4 + loop",
    ("dense", 4): "cp2",
    ("deepseek", 8): "dp8, tp2 + ep2 + etp1, tp2 + cp2 + ep2 + etp1",
    ("every loss", 8): "tp2 + cp2 + ep2 + etp2",
    ("further tokens", 8): "ep2",
    ("per token", 8): "ep4 + all recomputed",
    ("tied", 8): "dp8",
}
ROWS = {
    matrix.name_of(model, ranks, layout): (model, ranks, layout)
    for (model, ranks), text in LAYOUTS.items()
    for layout in ({part: AXES[part] for part in one.split(" + ")} for one in text.split(", "))
}
# A choice that is decided by more than this is not left to rounding; how many draws of samples are tried for one.
CLEAR, DRAWS = 2e-6, 6
# Relative: of a gradient, to the norm of all; of a weight, to what the steps added to it.
BOUNDS = Tolerances(scalar=1e-6, gradient=1e-6, update=1e-3, floor=1.0)


def request(model: str, ranks: int, layout: dict[str, dict[str, Any]], stage: str, draw: int) -> Request:
    flags, samples = matrix.MODELS[model]
    run = replace(
        Run(), **{**flags, **BATCH, **matrix.flags_of(layout), "data_parallel_sharding_strategy": STAGES[stage]}
    )
    rules.check(run, ranks)
    return Request(run, matrix.PADDED_VOCABULARY, STEPS, (1, STEPS // 2, STEPS), samples + draw)


@pytest.mark.parametrize("row", ROWS)
def test_every_stage_trains_what_plain_data_parallelism_trains(gloo: Any, tmp_path: Path, row: str) -> None:
    model, ranks, layout = ROWS[row]
    measured = matrix.Measured(gloo, tmp_path)

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
        assert comparison.agrees, matrix.tell(comparison.differences)
