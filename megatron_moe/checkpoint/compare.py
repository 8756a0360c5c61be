"""Comparison of a checkpoint's configuration with that of the run that loads it. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import ModelConfig, MoEConfig
from megatron_moe.config.module_names import frozen, kept_in_fp32
from megatron_moe.config.schema import Run, fields_by_name, flatten, replace

_DTYPES = ("bf16", "fp16")
"""Settings that decide the dtypes of weights, as `keep_fp32` does."""


def architecture_keys() -> list[str]:
    """Return the configuration keys that a checkpoint and the run that loads it must agree on."""
    compared = [field for section in (ModelConfig, MoEConfig) for field in dataclasses.fields(section)]
    return [field.name for field in compared if field.metadata["resume"] != "free"]


def check_matches(run: Run, saved: dict[str, Any], where: str, *, has_main_weights: bool = True) -> None:
    """Refuse a checkpoint of another model, or of weights in another dtype that cannot be made anew.

    Keys that the checkpoint does not have, because it is older than they are, are not compared.

    Args:
        has_main_weights: False if it was converted, or saved without its optimizer: weights are then as they are.

    Raises:
        ConfigError: with every key that differs.
    """
    current = flatten(run)
    keys = architecture_keys() if has_main_weights else [*architecture_keys(), *_DTYPES]
    differing = [name for name in keys if name in saved and saved[name] != current[name]]
    if not differing and not has_main_weights and _kept_otherwise(run, saved):
        differing = ["keep_fp32"]
    if not differing:
        return
    lines = [f"  --{name.replace('_', '-')}: checkpoint {saved[name]}, this run {current[name]}" for name in differing]
    hint = "use the checkpoint's values, which --use-checkpoint-args takes, or another folder"
    if all(name in (*_DTYPES, "keep_fp32") for name in differing):
        hint = (
            "weights are never cast silently, and it has no fp32 main weights to make others of: use its dtypes, or "
            "convert them to another with --dtype of megatron-moe convert"
        )
    raise ConfigError("\n".join([f"--load {where}: the checkpoint does not fit this run; {hint}:", *lines]))


def changes_dtypes(run: Run, saved: dict[str, Any]) -> bool:
    """Return whether weights of the run have other dtypes than the checkpoint's."""
    current = flatten(run)
    return any(name in saved and saved[name] != current[name] for name in _DTYPES) or _kept_otherwise(run, saved)


def _kept_otherwise(run: Run, saved: dict[str, Any]) -> bool:
    """Return whether other modules are fp32 in the checkpoint; other patterns for the same modules do not count."""
    half = run.precision.bf16 or run.precision.fp16
    if not half or "keep_fp32" not in saved:
        return False
    patterns = saved["keep_fp32"]
    before = replace(run, keep_fp32=None if patterns is None else tuple(patterns))
    return kept_in_fp32(run) != kept_in_fp32(before)


def check_frozen(run: Run, saved: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose optimizer is one of other parameters, by `--freeze`.

    Raises:
        ConfigError: with the parameters that only one of the two trains.
    """
    patterns = saved.get("freeze", saved.get("freeze_parameters"))  # the flag's name before
    before = frozen(replace(run, freeze=None if patterns is None else tuple(patterns)))
    differing = sorted(before ^ frozen(run))
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        flag = f"--freeze {' '.join(patterns)}" if patterns else "no --freeze"
        raise ConfigError(
            f"--load {where}: the checkpoint has {flag}, and its optimizer is not that of this run, for which "
            f"{', '.join(differing[:3])}{more} differ; use the same patterns, or add --no-load-optim, which starts the "
            "moments anew, or --finetune"
        )


def check_optimizer(run: Run, saved: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose optimizer is another one, with another state.

    Raises:
        ConfigError: naming both.
    """
    before = saved.get("optimizer", "adam")
    if before != run.optimizer.optimizer:
        raise ConfigError(
            f"--load {where}, --optimizer {run.optimizer.optimizer}: the checkpoint has the state of --optimizer "
            f"{before}, which is no state of this one's; use that, or add --no-load-optim, which starts the optimizer "
            "anew, or --finetune"
        )


def changed_settings(run: Run, saved: dict[str, Any]) -> list[str]:
    """Return what else differs and is allowed to, as `name: old -> new`, for a resumed run to report."""
    current = flatten(run)
    reported = {name for name, (_, field) in fields_by_name().items() if field.metadata["report"]}
    if run.training.train_samples is not None:
        reported.discard("train_iters")  # which follow from them and from the batches so far
    return [
        f"{name}: {saved[name]} -> {current[name]}"
        for name in sorted(saved.keys() & reported)
        if saved[name] != current[name]
    ]
