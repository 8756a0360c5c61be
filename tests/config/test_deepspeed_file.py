"""Configuration files as people have them become settings of this framework, or are refused by key and reason."""

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
    "transformers_zero2_fp16": Case(
        {
            "fp16": True,
            "bf16": False,
            "loss_scale": None,
            "loss_scale_window": 500,
            "initial_loss_scale": 4096.0,
            "data_parallel_sharding_strategy": "optim_grads",
            "optimizer_cpu_offload": True,
            "lr": 3e-5,
            "adam_beta1": 0.8,
            "adam_beta2": 0.999,
            "weight_decay": 3e-7,
            "lr_decay_style": "linear",
            "lr_warmup_iters": 500,
            "lr_decay_iters": 4000,
            "lr_warmup_init": 0.0,
            "min_lr": 0.0,
            "micro_batch_size": 4,
            "global_batch_size": 64,  # 4 x 2 x DP 8
        },
        ["fp16.auto_cast", "round_robin_gradients", "WarmupDecayLR"],
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
    "megatron_deepspeed_zero1_bf16": Case(
        {
            "data_parallel_sharding_strategy": "optim",
            "bf16": True,
            "accumulate_allreduce_grads_in_fp32": True,
            "grad_reduce_in_bf16": False,
            "tensorboard_dir": "output/logs/moe",
            "timing_log_level": 1,
            "micro_batch_size": 4,
            "global_batch_size": 512,
        },
        ["activation_checkpointing", "comms_logger, flops_profiler", "checkpoint", "zero_allow_untested_optimizer"],
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

REFUSED = {
    "transformers_tests_zero3": ["scheduler.params.warmup_type", "logarithmic", '"linear"'],
    "zero_infinity_nvme": ["zero_optimization.offload_param.device", '"nvme"', "--optimizer-cpu-offload"],
    "onebit_adam": ["optimizer.type", '"OneBitAdam"', "AdamW"],
    "sparse_attention_zero2": ["sparse_attention", '"mode": "fixed"', "attention is dense"],
}


def run_of(name: str, flags: str, world: int) -> schema.Run:
    words = [*shlex.split(f"{TINY} {flags}"), "--deepspeed-config", str(FILES / f"{name}.json")]
    return cli.parse(words, world_size=world)


def test_every_file_has_a_case():
    assert {path.stem for path in FILES.glob("*.json")} == TAKEN.keys() | REFUSED.keys()


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


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_asks_for_something_else_is_refused_by_key(name):
    with pytest.raises(ConfigError) as caught:
        run_of(name, "", 8)
    message = str(caught.value)
    assert message.startswith(f"--deepspeed-config {FILES / name}.json: ") and "\n" not in message
    for fragment in REFUSED[name]:
        assert fragment in message


def leaves(mapping: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in mapping.items():
        found += leaves(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]
    return found


@pytest.mark.parametrize("name", [name for name in TAKEN if name != "hand_written_zero1"])
def test_no_key_of_a_file_is_read_past_in_silence(name):
    notes = "\n".join(run_of(name, TAKEN[name].flags, TAKEN[name].world).notes)
    for key in leaves(json.loads((FILES / f"{name}.json").read_text())):
        parts = key.split(".")
        prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if key not in keys.TAKEN and not prefixes & keys.REFUSED.keys() and not is_auto(name, key):
            assert any(prefix in notes for prefix in prefixes), key


def is_auto(name: str, key: str) -> bool:
    value: Any = json.loads((FILES / f"{name}.json").read_text())
    for part in key.split("."):
        value = value[part]
    return value == "auto"


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
    typed = cli.parse([*shlex.split(TINY), *typed_flags(run)])
    assert schema.flatten(run) == schema.flatten(typed) and run == typed
    assert "notes" not in schema.flatten(run) and "deepspeed_config" not in schema.flatten(run)


def typed_flags(run: schema.Run) -> list[str]:
    """The flags that the first note of a run says the file sets."""
    return shlex.split(run.notes[0].partition(" sets ")[2])
