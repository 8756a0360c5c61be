"""Runs that record routes and replay them: on the same layout to the bit, and on others as one rank does."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import SMALL, TINY, lines, trained

FLAGS = {
    **TINY,
    **SMALL,
    "num_layers": 4,
    "moe_layer_freq": "[0,1,1,1]",
    "mtp_num_layers": 1,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "make_vocab_size_divisible_by": 192,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
VPP2 = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
CP2 = {"context_parallel_size": 2}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "micro-batches of 1": (1, {"micro_batch_size": 1}),
    "TP2": (2, TP2),
    "CP2": (2, CP2),
    "EP2, sharded optimizer": (2, {**EP2, **DISTRIBUTED}),
    "PP2": (2, PP2),
    "VPP2, all recomputed": (2, {**VPP2, **FULL, "micro_batch_size": 1}),
    "all recomputed": (1, FULL),
    "experts recomputed": (1, SELECTIVE),
    "ZeRO 2": (2, ZERO_2),
    "ZeRO 3, experts recomputed": (2, {**ZERO_3, **SELECTIVE}),
    "TP2, PP2, all recomputed": (4, {**TP2, **PP2, **FULL}),
    "CP2, TP2, EP2, overlapped": (4, {**CP2, **TP2, **EP2, **OVERLAP}),
    "CP2, PP2, recomputed": (4, {**CP2, **PP2, **SELECTIVE}),
}


def run(folder: Path, name: str, **flags: Any) -> dict[str, Any]:
    """A run of FLAGS, which writes its metrics there."""
    return trained({**FLAGS, "metrics_file": str(folder / f"{name}.jsonl"), **flags})


def routes_of(folder: Path) -> dict[tuple[int, int], numpy.ndarray]:
    """Sample and layer -> the routes [S, K] in the files of a folder."""
    from megatron_moe.config.schema import build
    from megatron_moe.training.route_files import RouteShape, read_part

    found = {}
    for file in folder.rglob("*.safetensors"):
        part = read_part(file, RouteShape.from_run(build(FLAGS)))
        assert part.recorded.all()
        for row, sample in enumerate(part.samples.tolist()):
            for column, layer in enumerate(part.layers.tolist()):
                assert (sample, layer) not in found
                found[sample, layer] = part.routes[row, :, column]
    return found


@pytest.fixture(scope="module")
def recorded(once, folder):
    """A folder with the routes and metrics of a run on one rank, and those of another run's replay of them."""
    once(1, run, folder=folder, name="recorded", moe_routing_trace_path=str(folder / "routes"))
    once(1, run, folder=folder, name="replayed", init_method_std=0.05, moe_enable_routing_replay=str(folder / "routes"))
    return folder


def test_a_replay_on_the_same_layout_is_the_recorded_run_to_the_bit(gloo, recorded, tmp_path):
    gloo.run(1, run, folder=tmp_path, name="plain")
    gloo.run(1, run, folder=tmp_path, name="again", moe_enable_routing_replay=str(recorded / "routes"))
    steps = [lines(path) for path in (recorded / "recorded.jsonl", tmp_path / "plain.jsonl", tmp_path / "again.jsonl")]
    for wanted, *others in zip(*steps, strict=True):
        for key in ("loss", "mtp_losses", "grad_norm", "tokens_per_expert", "expert_bias_hash", "aux_losses"):
            assert [step[key] for step in others] == [wanted[key]] * 2, key


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["VPP2, all recomputed", "CP2, TP2, EP2, overlapped"]))
def test_every_layout_replays_the_recorded_choice_of_other_weights(gloo, recorded, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    both = {"moe_enable_routing_replay": str(recorded / "routes"), "moe_routing_trace_path": str(tmp_path / "routes")}
    gloo.run(ranks, run, folder=tmp_path, name="mine", init_method_std=0.05, **both, **flags)
    replayed, recorded_steps = lines(recorded / "replayed.jsonl"), lines(recorded / "recorded.jsonl")
    for mine, wanted, there in zip(lines(tmp_path / "mine.jsonl"), replayed, recorded_steps, strict=True):
        assert mine["tokens_per_expert"] == there["tokens_per_expert"] and mine["loss"] != there["loss"]
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1.6e-7)
        assert mine["mtp_losses"] == pytest.approx(wanted["mtp_losses"], rel=1.6e-7)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    mine, there = routes_of(tmp_path / "routes"), routes_of(recorded / "routes")
    assert mine.keys() == there.keys() and all(numpy.array_equal(mine[key], there[key]) for key in there)
