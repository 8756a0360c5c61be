"""Configuration files as people have them become settings of this framework."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config import cli, rules, schema
from megatron_moe.config import deepspeed_keys as keys
from megatron_moe.config.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_parser")

FILES = Path(__file__).with_name("deepspeed")
TINY = "--preset tiny --mock-data --vocab-size 256 --train-iters 5000"


@dataclass
class Case:
    """What a file turns into: fields with their values, and texts that the notes contain."""

    sets: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    flags: str = ""
    world: int = 8


ZEROPP = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "zero_quantized_weights": True,
    "zero_quantized_gradients": "int8",
}

TAKEN = {
    "transformers_zero3_auto": Case(
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
            "log_interval": 2000,
            "lr_decay_style": "constant",
            # "auto": the flags and the preset decide
            "bf16": True,
            "fp16": False,
            "lr": 1e-3,
            "adam_beta2": 0.95,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "initial_loss_scale": 2.0**16,
            "lr_warmup_iters": 0,
            "micro_batch_size": 2,
            "global_batch_size": 16,
        },
        ["stage3_max_live_parameters", "pin_memory", "stage3_gather_16bit_weights_on_model_save", "warm-up is linear"],
        flags="--bf16 --global-batch-size 16",
    ),
    "zeropp_bf16_failing_in_deepspeed": Case(
        {
            **ZEROPP,
            "zero_hpz_partition_size": 8,
            "bf16": True,
            "fp16": False,
            "optimizer_cpu_offload": True,
            "clip_grad": 1.0,
            "log_interval": 10,
            "micro_batch_size": 2,
            "global_batch_size": 64,
        },
        ["hybrid_engine", "memory_efficient_linear", "prescale_gradients", "stage3_param_persistence_threshold"],
        world=16,
    ),
    "zeropp_fp16_tutorial": Case(
        {
            **ZEROPP,
            "zero_hpz_partition_size": 16,
            "fp16": True,
            "loss_scale_window": 500,
            "micro_batch_size": 8,
            "global_batch_size": 128,
            "log_interval": 1,
        },
        ["reduce_bucket_size"],
        world=16,
    ),
    "hand_written_zero1": Case(
        {
            "data_parallel_sharding_strategy": "optim",
            "bf16": True,
            "lr": 1e-4,
            "global_batch_size": 32,
            "micro_batch_size": 4,  # as DeepSpeed infers it: 32 / DP 8, without accumulation
        },
        ["torch_adam", "leaves out gradient_clipping", "--weight-decay 0.01", "--adam-beta2 0.95"],
    ),
}


def run_of(name: str, flags: str, world: int) -> schema.Run:
    words = [*shlex.split(f"{TINY} {flags}"), "--deepspeed-config", str(FILES / f"{name}.json")]
    return cli.parse(words, world_size=world)


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_becomes_settings_that_keep_the_rules(name):
    case = TAKEN[name]
    run = run_of(name, case.flags, case.world)
    flat = schema.flatten(run)
    assert {key: flat[key] for key in case.sets} == case.sets
    rules.check(run, case.world)
    text = "\n".join(run.notes)
    for fragment in case.notes:
        assert fragment in text
    assert all(line.startswith(f"{name}.json") for line in run.notes)


def leaves(mapping: dict[str, Any], above: str = "") -> list[str]:
    """The keys that are not "auto"."""
    found = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            found += leaves(value, f"{above}{name}.")
        elif value != "auto":
            found.append(above + name)
    return found


@pytest.mark.parametrize("name", [name for name in TAKEN if name != "hand_written_zero1"])
def test_no_key_of_a_file_is_read_past_in_silence(name):
    notes = "\n".join(run_of(name, TAKEN[name].flags, TAKEN[name].world).notes)
    for key in leaves(json.loads((FILES / f"{name}.json").read_text())):
        parts = key.split(".")
        prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if key not in keys.TAKEN and not prefixes & keys.REFUSED.keys():
            assert any(prefix in notes for prefix in prefixes), key


def test_the_published_failing_file_is_refused_where_its_machines_are_smaller():
    """Its secondary partition is a machine of 8 ranks; the rule names the key that has to change."""
    run = run_of("zeropp_bf16_failing_in_deepspeed", "--global-batch-size 64", 4)
    with pytest.raises(ConfigError) as caught:
        rules.check(run, 4)
    message = str(caught.value)
    assert "--zero-hpz-partition-size 8 (zero_optimization.zero_hpz_partition_size in zeropp_bf16" in message
    assert "use one of 2, 4" in message
    rules.check(run_of("zeropp_bf16_failing_in_deepspeed", "--zero-hpz-partition-size 4", 4), 4)


def test_a_checkpoint_stores_the_settings_and_not_how_they_were_read():
    run = run_of("zeropp_fp16_tutorial", "", 16)
    flags_that_the_first_note_names = shlex.split(run.notes[0].partition(" sets ")[2])
    typed = cli.parse([*shlex.split(TINY), *flags_that_the_first_note_names])
    assert schema.flatten(run) == schema.flatten(typed) and run == typed
    assert "notes" not in schema.flatten(run) and "deepspeed_config" not in schema.flatten(run)
