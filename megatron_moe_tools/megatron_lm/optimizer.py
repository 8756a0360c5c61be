"""The optimizer's plain values, in Megatron-LM's checkpoints and in ours: step counts and groups of weights.

Its tensors are mapped by their names (`names.py`). Learning rate, betas and epsilon are settings of a run: the groups
carry them, and loading replaces them here by the run's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.schema import Run
from megatron_moe_tools.megatron_lm.contents import Contents, MegatronCheckpoint

STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "param"
SETTINGS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
"""Settings that the groups of weights carry. Megatron-LM trains on with the betas and the epsilon of a checkpoint."""
_WITHOUT = "add --no-optim to convert the weights alone"


def require_mapped(contents: Contents, checkpoint: MegatronCheckpoint, half: str | None) -> None:
    """Check that the optimizer's state of a checkpoint is one that can be converted to the bit.

    Args:
        half: the dtype of the weights where it is no fp32.

    Raises:
        ConfigError: it is not; the message says why and what to do.
    """
    where = f"--load {checkpoint.path}"
    if contents.unmapped:
        raise ConfigError(
            f"{where}: its optimizer is stored by the layout that wrote it ({contents.unmapped[0]}), not by weights; "
            "save it with Megatron-LM's --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or "
            f"{_WITHOUT}"
        )
    if half == "float16":
        raise ConfigError(f"{where}: has the optimizer of an fp16 run, whose loss scale is not converted; {_WITHOUT}")


def wanted_keys(weights: Mapping[str, Any], fp32_state: frozenset[str], *, half: bool) -> dict[str, Any]:
    """Return what our optimizer has for a model's weights, by key, with the weights' values.

    An fp32 run has no main weights besides its weights.
    """
    kinds = (MAIN, *MOMENTS) if half else MOMENTS
    return {f"{STATE}{kind}.{key}": value for kind in kinds for key, value in weights.items() if key not in fp32_state}


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's settings among arguments or a configuration, those of `SETTINGS` that are there.

    Raises:
        ConfigError: one is no number.
    """
    fields = all_fields()
    found = {name: values[name] for name in SETTINGS if values.get(name) is not None}
    return {name: from_file(fields[name], value, fields[name].flag) for name, value in found.items()}


def step_of(common: Mapping[str, Any], where: str) -> int:
    """Return how many updates the optimizer has made.

    Raises:
        ConfigError: its groups do not say it, or disagree.
    """
    steps = set(_steps(common.get("optimizer")))
    if len(steps) != 1:
        shown = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{where}: its optimizer has no one number of updates (found: {shown}); {_WITHOUT}")
    return steps.pop()


def _steps(state: Any) -> Iterator[int]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in ("step", "common_step"):
                number = value.item() if hasattr(value, "item") else value
                if isinstance(number, (int, float)) and number == int(number):
                    yield int(number)
            else:
                yield from _steps(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _steps(value)


def plain_values(run: Run, step: int) -> dict[Any, Any]:
    """Return the plain values of our optimizer: one for all weights but the routed experts', one for these."""

    def group(*, experts: bool, decays: bool) -> dict[str, Any]:
        options = run.optimizer
        return {
            "is_expert_parallel": experts,
            "default_config": True,
            "wd_mult": 1.0 if decays else 0.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": options.lr,
            "min_lr": options.min_lr,
            "lr": options.lr,
            "betas": (options.adam_beta1, options.adam_beta2),
            "eps": options.adam_eps,
            "weight_decay": options.weight_decay if decays else 0.0,
            "step": step,
        }

    dense = [group(experts=False, decays=True), group(experts=False, decays=False)]
    first = {"optimizer": {"param_groups": dense}}
    if not any(run.derived.moe_layer_pattern):
        return first
    return {0: first, 1: {"optimizer": {"param_groups": [group(experts=True, decays=True)]}}}


def scheduler(run: Run, steps: int) -> dict[str, Any]:
    """Return a schedule's state after a number of steps; all else of it is a setting, which the next run has."""
    options = run.optimizer
    return {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": 0,
        "num_steps": steps,
        "lr_decay_style": options.lr_decay_style,
        "lr_decay_steps": max(steps, 1),
        "start_wd": options.weight_decay,
        "end_wd": options.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(steps, 1),
    }
