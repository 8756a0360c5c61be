"""The optimizer and the schedule of a DeepSpeed configuration file, as settings of this framework.

Taken are the schedules that one here equals, as functions of the iteration. With t iterations done, W iterations of
warm-up, and rates `low` and `high`, these are in DeepSpeed:

    WarmupLR, linear        low + (high - low) min(t / W, 1)
    WarmupDecayLR, linear   the same up to W, then low + (high - low) max((T - t) / (T - W), 0)
    OneCycle                low + (high - low) t / W up to W, down again in the same way until T, then low

and the schedules `constant` and `linear` here, with `low` as `--lr-warmup-init` and `--min-lr`. DeepSpeed counts the
steps of the first two from the second step on: its first two steps use `low`, where here the first does.
"""

from __future__ import annotations

from typing import Any

from megatron_moe_tools.compat.deepspeed_file import DeepSpeedFile
from megatron_moe_tools.compat.deepspeed_keys import SCHEDULERS

Settings = dict[str, dict[str, Any]]
"""Key of the file -> the fields that it sets."""

_PARAMS = "scheduler.params."


def optimizer_settings(file: DeepSpeedFile) -> Settings:
    """Return what `optimizer` sets, in addition to the parameters that are taken as they are.

    Raises:
        ConfigError: Adam's weight decay is an L2 penalty, or the betas are no pair.
    """
    found: Settings = {}
    kind, params = file.values.get("optimizer.type"), "optimizer.params."
    if kind is None:
        given = [key for key in file.values if key.startswith(params)]
        if given and "optimizer.type" not in file.automatic:
            raise file.refusal(given[0], 'DeepSpeed reads it with a type alone; add "type": "AdamW" to optimizer')
    decoupled = file.values.get(f"{params}adam_w_mode", True)
    if kind is not None and kind.lower() == "adam" and not decoupled:
        decay = file.values.get(f"{params}weight_decay", 0.0)
        if decay != 0.0:
            raise file.refusal(
                f"{params}adam_w_mode",
                f"makes the weight_decay of {decay:g} an L2 penalty, which Adam divides by the second moment, and here"
                " weights decay by themselves; use true, or a weight_decay of 0",
            )
        found[f"{params}adam_w_mode"] = {"weight_decay": 0.0}
    betas = file.values.get(f"{params}betas")
    if betas is not None:
        if len(betas) != 2 or not all(type(beta) in (int, float) for beta in betas):
            raise file.refusal(f"{params}betas", "takes two numbers, e.g. [0.9, 0.95]")
        found[f"{params}betas"] = {"adam_beta1": float(betas[0]), "adam_beta2": float(betas[1])}
    return found


def scheduler_settings(file: DeepSpeedFile) -> tuple[Settings, list[str]]:
    """Return what `scheduler` sets, and notes.

    Raises:
        ConfigError: the schedule is none that can be expressed here exactly.
    """
    kind = file.values.get("scheduler.type")
    given = [key for key in (*file.values, *sorted(file.automatic)) if key.startswith(_PARAMS)]
    if kind is None:
        if given and "scheduler.type" not in file.automatic:
            raise file.refusal(given[0], 'DeepSpeed reads it with a type alone; add "type": "WarmupLR" to scheduler')
        return {}, []
    stray = [key for key in given if key.removeprefix(_PARAMS) not in SCHEDULERS[kind]]
    if stray:
        raise file.refusal(stray[0], f"{kind} has no such parameter; it has {', '.join(SCHEDULERS[kind])}")
    return _one_cycle(file) if kind == "OneCycle" else _warmup(file, kind)


def _warmup(file: DeepSpeedFile, kind: str) -> tuple[Settings, list[str]]:
    """Return the settings of a warm-up that is followed by a constant rate, or by a linear decay."""

    def param(name: str) -> Any:
        return file.number(_PARAMS + name, SCHEDULERS[kind][name])

    decays = kind == "WarmupDecayLR"
    steps, shape, notes = param("warmup_num_steps"), f"{_PARAMS}warmup_type", []
    if shape not in file.values:
        notes.append(f"{file.name}: {kind}: the warm-up is linear here (DeepSpeed's default is logarithmic)")
    elif param("warmup_type") not in ("linear", None):
        raise file.refusal(shape, 'the warm-up here is linear; use "warmup_type": "linear"')
    found: Settings = {"scheduler.type": {"lr_decay_style": "linear" if decays else "constant"}}
    low, high = param("warmup_min_lr"), param("warmup_max_lr")
    if low is not None:
        found[f"{_PARAMS}warmup_min_lr"] = {"lr_warmup_init": low, **({"min_lr": low} if decays else {})}
    if high is not None:
        found[f"{_PARAMS}warmup_max_lr"] = {"lr": high}
        notes += _unused_rate(file, high, "warmup_max_lr")
    if steps is not None:
        if steps < 1:
            raise file.refusal(f"{_PARAMS}warmup_num_steps", "must be at least 1; leave scheduler out for no warm-up")
        # DeepSpeed's logarithm is not defined for one step, and so its shortest warm-up has two.
        found[f"{_PARAMS}warmup_num_steps"] = {"lr_warmup_iters": max(2, steps)}
        notes.append(
            f"{file.name}: {kind}: here the warm-up's first rate is that of the first step; DeepSpeed uses it for two"
        )
    if decays and f"{_PARAMS}total_num_steps" not in file.automatic:
        total = param("total_num_steps")
        if total is None:
            raise file.refusal("scheduler.type", 'needs total_num_steps; add it to params, or "auto" for --train-iters')
        found[f"{_PARAMS}total_num_steps"] = {"lr_decay_iters": total}
    return found, notes


def _one_cycle(file: DeepSpeedFile) -> tuple[Settings, list[str]]:
    """Return the settings of one linear rise and fall, which leaves Adam's betas and the last rate alone."""

    def param(name: str) -> Any:
        return file.number(_PARAMS + name, SCHEDULERS["OneCycle"][name])

    if param("cycle_momentum") is not False:
        raise file.refusal(f"{_PARAMS}cycle_momentum", "Adam's betas are constant here; use false")
    for name in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if param(name):
            raise file.refusal(_PARAMS + name, "the rate changes in every step, not in stairs; use 0")
    if param("decay_lr_rate") and param("decay_step_size"):
        raise file.refusal(f"{_PARAMS}decay_lr_rate", "after the cycle the rate is constant here; use 0")
    found: Settings = {"scheduler.type": {"lr_decay_style": "linear"}}
    for name in ("cycle_min_lr", "cycle_max_lr"):
        if param(name) is None and _PARAMS + name not in file.automatic:
            raise file.refusal("scheduler.type", f'needs {name}; add it to params, or "auto" for the flags to decide')
    low, high = param("cycle_min_lr"), param("cycle_max_lr")
    if low is not None:
        found[f"{_PARAMS}cycle_min_lr"] = {"lr_warmup_init": low, "min_lr": low}
    if high is not None:
        found[f"{_PARAMS}cycle_max_lr"] = {"lr": high}
    rise = param("cycle_first_step_size")
    fall = file.number(f"{_PARAMS}cycle_second_step_size", rise)
    if rise is not None:
        found[f"{_PARAMS}cycle_first_step_size"] = {"lr_warmup_iters": rise}
        if fall is not None:
            found[f"{_PARAMS}cycle_second_step_size"] = {"lr_decay_iters": rise + fall}
    return found, [] if high is None else _unused_rate(file, high, "cycle_max_lr")


def _unused_rate(file: DeepSpeedFile, high: float, name: str) -> list[str]:
    rate = file.values.get("optimizer.params.lr", high)
    if rate == high:
        return []
    return [f"{file.name}: optimizer.params.lr {rate:g} is not used: {name} {high:g} decides, as in DeepSpeed"]
