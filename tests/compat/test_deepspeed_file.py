"""Configuration files as people have them become settings of this framework."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_moe.config import rules, schema
from megatron_moe_tools import compat
from tests.config.refused import refused

FILES = Path(__file__).with_name("deepspeed")
TINY = "--preset tiny --mock-data --vocab-size 256 --train-iters 5000"


@dataclass
class Case:
    """What a file turns into: the flags that it stands for, and texts that the notes contain."""

    sets: str
    notes: list[str]
    flags: str = ""
    world: int = 8


ZEROPP = "--data-parallel-sharding-strategy optim_grads_params --zero-quantized-weights --zero-quantized-gradients int8"

TAKEN = {
    # "auto": the flags and the preset decide
    "transformers_zero3_auto": Case(
        "--data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload --log-interval 2000"
        " --lr-decay-style constant",
        ["stage3_max_live_parameters", "pin_memory", "stage3_gather_16bit_weights_on_model_save", "warm-up is linear"],
        flags="--bf16 --global-batch-size 16",
    ),
    "zeropp_bf16_failing_in_deepspeed": Case(
        f"{ZEROPP} --zero-hpz-partition-size 8 --bf16 --optimizer-cpu-offload --log-interval 10 --micro-batch-size 2"
        " --global-batch-size 64",
        ["hybrid_engine", "memory_efficient_linear", "prescale_gradients", "stage3_param_persistence_threshold"],
        world=16,
    ),
    "zeropp_fp16_tutorial": Case(
        f"{ZEROPP} --zero-hpz-partition-size 16 --fp16 --loss-scale-window 500 --micro-batch-size 8"
        " --global-batch-size 128",
        ["reduce_bucket_size"],
        world=16,
    ),
    # its micro-batch as DeepSpeed infers it: 32 / DP 8, without accumulation
    "hand_written_zero1": Case(
        "--data-parallel-sharding-strategy optim --bf16 --lr 1e-4 --global-batch-size 32 --micro-batch-size 4",
        ["torch_adam", "leaves out gradient_clipping", "--weight-decay 0.01", "--adam-beta2 0.95"],
    ),
}


def run_of(name: str, flags: str, world: int) -> schema.Run:
    words = [*shlex.split(f"{TINY} {flags}"), "--deepspeed-config", str(FILES / f"{name}.json")]
    return compat.parse(words, world_size=world)


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_becomes_settings_that_keep_the_rules_as_if_its_flags_were_typed(name):
    case = TAKEN[name]
    run = run_of(name, case.flags, case.world)
    for flags in (case.sets, run.warnings[0].partition(" sets ")[2]):
        typed = compat.parse(shlex.split(f"{TINY} {case.flags} {flags}"))
        assert run == typed and schema.flatten(run) == schema.flatten(typed)
    assert not {"warnings", "deepspeed_config"} & schema.flatten(run).keys()
    rules.check(run, case.world)
    text = "\n".join(run.warnings)
    assert [fragment for fragment in case.notes if fragment not in text] == []
    assert all(line.startswith(f"{name}.json") for line in run.warnings)


def test_the_published_failing_file_is_refused_where_its_machines_are_smaller():
    """Its secondary partition is a machine of 8 ranks; the rule names the key that has to change."""
    run = run_of("zeropp_bf16_failing_in_deepspeed", "--global-batch-size 64", 4)
    named = "--zero-hpz-partition-size 8 (zero_optimization.zero_hpz_partition_size in zeropp_bf16"
    refused(lambda: rules.check(run, 4), named, "use one of 2, 4")
    rules.check(run_of("zeropp_bf16_failing_in_deepspeed", "--zero-hpz-partition-size 4", 4), 4)
