"""Comparison of a checkpoint's configuration with that of the run that loads it. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import ModelConfig, MoEConfig
from megatron_moe.config.module_names import kept_in_fp32
from megatron_moe.config.schema import Run, fields_by_name, flatten, replace

_TRAINING_STATE = ("bf16", "fp16")
"""Settings that the optimizer's state depends on; free where only weights are loaded."""


def architecture_keys() -> list[str]:
    """Return the configuration keys that a checkpoint and the run that loads it must agree on."""
    compared = [field for section in (ModelConfig, MoEConfig) for field in dataclasses.fields(section)]
    return [field.name for field in compared if not field.metadata["free"]]


def check_matches(run: Run, saved: dict[str, Any], where: str, *, weights_only: bool = False) -> None:
    """Refuse a checkpoint of another model, or of another kind of optimizer state.

    Keys that the checkpoint does not have, because it is older than they are, are not compared.

    Args:
        weights_only: it was converted, and holds no optimizer's state.

    Raises:
        ConfigError: with every key that differs.
    """
    current = flatten(run)
    keys = architecture_keys()
    if weights_only or not (run.checkpoint.finetune or run.checkpoint.no_load_optim):
        keys = [*keys, *_TRAINING_STATE]
    differing = [name for name in keys if name in saved and saved[name] != current[name]]
    if not differing and _kept_otherwise(run, saved):
        differing = ["keep_fp32"]
    if not differing:
        return
    lines = [f"  --{name.replace('_', '-')}: checkpoint {saved[name]}, this run {current[name]}" for name in differing]
    hint = "use the checkpoint's values, which --use-checkpoint-args takes, or another folder"
    if differing == ["keep_fp32"]:
        hint = "use the checkpoint's value: its weights have these dtypes, and weights are never cast silently"
    elif all(name in _TRAINING_STATE for name in differing):
        hint = "use the checkpoint's values, or load the weights alone with --finetune or --no-load-optim"
        if weights_only:
            hint = "weights are never cast silently: use its dtype, or convert them to another with --dtype"
    raise ConfigError("\n".join([f"--load {where}: the checkpoint does not fit this run; {hint}:", *lines]))


def _kept_otherwise(run: Run, saved: dict[str, Any]) -> bool:
    """Return whether other modules are fp32 in the checkpoint; other patterns for the same modules do not count."""
    half = run.precision.bf16 or run.precision.fp16
    if not half or "keep_fp32" not in saved:
        return False
    patterns = saved["keep_fp32"]
    before = replace(run, keep_fp32=None if patterns is None else tuple(patterns))
    return kept_in_fp32(run) != kept_in_fp32(before)


def changed_settings(run: Run, saved: dict[str, Any]) -> list[str]:
    """Return what else differs and is allowed to, as `name: old -> new`, for a resumed run to report."""
    current = flatten(run)
    reported = {name for name, (_, field) in fields_by_name().items() if field.metadata["reported"]}
    return [
        f"{name}: {saved[name]} -> {current[name]}"
        for name in sorted(saved.keys() & reported)
        if saved[name] != current[name]
    ]
