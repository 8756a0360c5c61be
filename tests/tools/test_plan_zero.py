"""The plan of ZeRO: which stage it recommends, what ZeRO++ saves between machines, and what is offloaded."""

from typing import Any

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe_tools.plan.cli import comparison_report, text_report
from megatron_moe_tools.plan.layouts import GIB, Machine
from megatron_moe_tools.plan.plan import make_plan, peak_gib, recommended_stage

STATE = {
    **PRESETS["tiny"], "num_layers": 4, "moe_layer_freq": 1, "hidden_size": 256, "moe_ffn_hidden_size": 256,
    "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 32, "vocab_size": 1000, "mock_data": True,
    "bf16": True,
}  # fmt: skip
STAGES = ("optim", "optim_grads", "optim_grads_params")


def run_of(**changes: Any) -> Run:
    return build({**STATE, **changes})


@pytest.fixture(scope="module")
def known():
    """What was traced so far."""
    return {}


@pytest.fixture(scope="module")
def peaks(known):
    """Strategy -> GiB of the largest of 16 ranks."""
    return {
        stage: peak_gib(run_of(data_parallel_sharding_strategy=stage), 16, Machine(), known)
        for stage in ("no_shard", *STAGES)
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_lowest_stage_that_fits_is_recommended(peaks, known, stage):
    assert [*peaks.values()] == sorted(peaks.values(), reverse=True), "each stage takes less than the one below"
    machine = Machine(memory_gib=peaks[stage] / 0.9 * 1.001)
    for asked in (
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
        {"data_parallel_sharding_strategy": "optim_grads_params", "zero_hpz_partition_size": 4},
    ):
        found = recommended_stage(run_of(**asked), 16, machine, known)
        assert (found["strategy"], found["fits"]) == (stage, True)
        assert found["max_memory_gib"] == pytest.approx(peaks[stage])
        assert stage != "optim" or not found["switches"], "ZeRO++ begins at stage 2"


def test_where_none_fits_the_smallest_is_named(peaks, known):
    machine = Machine(memory_gib=peaks["optim_grads_params"] / 2)
    found = recommended_stage(run_of(), 16, machine, known)
    assert not found["fits"] and found["strategy"] == "optim_grads_params"
    piped = recommended_stage(run_of(pipeline_model_parallel_size=2), 16, machine, known)
    assert not piped["fits"] and piped["strategy"] == "optim", "pipelines have no stage above"


def test_switches_are_for_ranks_on_several_machines(peaks, known):
    machine = Machine(memory_gib=0.99 * peaks["optim_grads"] / 0.9, gpus_per_node=4)
    run = run_of(data_parallel_sharding_strategy="optim_grads_params")
    found = recommended_stage(run, 16, machine, known)
    assert found["between_nodes_with_switches"] < 0.4 * found["between_nodes"]  # tables are much of so small a model
    assert found["max_memory_gib_with_switches"] <= 0.9 * machine.memory_gib
    whole = {"tensor_model_parallel_size": 4, "sequence_parallel": True}  # a machine has one rank of each DP group
    below = peak_gib(replace(run_of(data_parallel_sharding_strategy="optim_grads"), **whole), 16, machine, known)
    tight = Machine(memory_gib=0.99 * below / 0.9, gpus_per_node=4)
    split = recommended_stage(replace(run, **whole), 16, tight, known)
    assert split["strategy"] == "optim_grads_params" and len(split["switches"]) == 2, split
    alone = recommended_stage(run, 4, Machine(memory_gib=1e-3), known)
    assert alone["switches"] == [] and alone["between_nodes"] == 0
    shown = comparison_report({"recomputation": {}, "imbalances": {}, "alternatives": [], "zero": found})
    assert "--zero-quantized-weights" in shown and "--data-parallel-sharding-strategy" in shown


def here_and_away(stage: str) -> list[dict[str, Any]]:
    """A rank's memory with the optimizer's state on its device and in its host."""
    runs = [run_of(data_parallel_sharding_strategy=stage, optimizer_cpu_offload=offload) for offload in (False, True)]
    return [make_plan(run, 4, Machine())["ranks"][0]["memory"] for run in runs]


def test_offloaded_state_is_in_the_host_of_a_gpu():
    here, away = here_and_away("optim_grads_params")
    state = here["weights"] + here["gradients"] + here["optimizer"]
    assert away["host"] == state and here["host"] == 0
    assert away["weights"] == away["gradients"] == away["optimizer"] == 0 and away["peak"] < here["peak"] - 0.9 * state
    run = run_of(data_parallel_sharding_strategy="optim_grads_params", optimizer_cpu_offload=True)
    assert f"{state / GIB:.2g} GiB of a rank's host memory" in text_report(make_plan(run, 4, Machine()))
    cpu = make_plan(run, 4, Machine(device="cpu"))
    assert cpu["ranks"][0]["memory"]["host"] == 0


@pytest.mark.parametrize("stage", ["no_shard", "optim"])
def test_below_stage_2_the_moments_alone_are_in_the_host_of_a_gpu(stage):
    here, away = here_and_away(stage)
    assert here["host"] == 0 and away["host"] == 2 * away["optimizer"]  # two moments, one master weight
    assert here["optimizer"] == away["optimizer"] + away["host"]
    assert {**here, "optimizer": 0, "host": 0, "peak": 0} == {**away, "optimizer": 0, "host": 0, "peak": 0}
