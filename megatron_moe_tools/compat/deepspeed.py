"""A DeepSpeed configuration file as settings: what `--deepspeed-config` adds to a command line.

The file has a place between `--config` and `--preset`: flags and `--config` win over it, and it wins over a preset. A
value of the file that is overridden is named in a note, since the file may be shared with a program that uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron_moe.config import schema
from megatron_moe.config.fields import all_fields
from megatron_moe_tools.compat.deepspeed_file import (
    AUTO,
    DEFAULTS,
    IMPLIED,
    LOSS_SCALE_KEYS,
    RIVALS,
    SCHEDULERS,
    TAKEN,
    DeepSpeedFile,
    read,
)

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfp16": "bfloat16",
    "bfloat16": "bfloat16",
}
_MAX_SCALE_POWER = 127  # of a finite fp32 number


@dataclass(frozen=True)
class FileSettings:
    """What a DeepSpeed file sets.

    Args:
        values: field -> value, without what flags and `--config` say otherwise.
        places: field -> "key in file".
        notes: what to report at the start of the run, a line each.
    """

    values: dict[str, Any]
    places: dict[str, str]
    notes: tuple[str, ...]


def settings_of(
    path: str | None, below: Mapping[str, Any], above: Mapping[str, Any], world_size: int | None = None
) -> FileSettings:
    """Return the settings of a DeepSpeed file between those that it overrides and those that override it.

    Args:
        path: None for no file, which sets nothing.
        below: settings of the preset. above: those of flags and `--config`.
        world_size: ranks of the run, from which the batch sizes follow; None where it is not known yet.

    Raises:
        ConfigError: the file cannot be read, asks for something else than this framework does, or contradicts itself.
    """
    if path is None:
        return FileSettings({}, {}, ())
    file = read(path)
    merge = _Merge(file, below, above)
    _take_plain_settings(merge)
    _take_tensorboard(merge)
    _take_wandb(merge)
    _note_undecided_dtype(merge)
    _take_loss_scale(merge)
    _take_gradient_dtype(merge)
    _take_batch_sizes(merge, world_size)
    return merge.result()


class _Merge:
    """The settings so far, with what was said of them."""

    def __init__(self, file: DeepSpeedFile, below: Mapping[str, Any], above: Mapping[str, Any]) -> None:
        self.file, self.above = file, above
        self._without = {**below, **above}
        self.notes: list[str] = []
        self._taken: dict[str, Any] = {}
        self._places: dict[str, str] = {}

    @property
    def flat(self) -> dict[str, Any]:
        """All settings so far."""
        return {**self._without, **self._taken}

    def take(self, key: str, settings: Mapping[str, Any]) -> None:
        """Add the settings of a key, without those that flags or `--config` override."""
        for field, value in settings.items():
            winner = self._winner(field, value)
            if winner is not None:
                shown = self.file.values.get(key, value)
                self.note(f"{key} {_json(shown)} is overridden by {_typed(winner, self.above[winner])}")
            elif field not in self.above:
                self._taken[field] = value
                self._places[field] = f"{key} in {self.file.name}"
                for other, implied in IMPLIED.get((field, value), {}).items():
                    if other not in self.above and other not in self._places:
                        self._taken[other] = implied

    def _winner(self, field: str, value: Any) -> str | None:
        """Return the field of a flag or of `--config` that contradicts a setting, if there is one."""
        if field in self.above:
            return None if self.above[field] == value else field
        for rival, agreeing in RIVALS.get(field, {}).items():
            if self.above.get(rival) and value and value not in agreeing:
                return rival
        return None

    def note(self, text: str) -> None:
        """Add a note about the file."""
        self.notes.append(f"{self.file.name}: {text}")

    def result(self) -> FileSettings:
        """Return the settings, with notes: what the file sets, what it leaves to defaults, what has no meaning."""
        sets = []
        for field, value in self.flat.items():
            if value != self._without.get(field, _default(field)):
                sets.append(_typed(field, value))
        first = f"{self.file.name} sets {' '.join(sets) if sets else 'nothing that is not so already'}"
        notes = [first, *self.notes, *self._left_to_defaults(), *self.file.notes]
        return FileSettings(self._taken, self._places, tuple(notes))

    def _left_to_defaults(self) -> list[str]:
        """Say where a key that is left out has another default in DeepSpeed."""
        lines = []
        for key, defaults in DEFAULTS.items():
            of_optimizer = key != "gradient_clipping"
            given = key in self.file.values or key in self.file.automatic
            if given or (of_optimizer and "optimizer.type" not in self.file.values):
                continue
            for field, theirs in defaults.items():
                ours = self.flat.get(field, _default(field))
                if ours != theirs and field not in self.above and field not in self._places:
                    lines.append(
                        f"{self.file.name} leaves out {key}: DeepSpeed's default is {_typed(field, theirs)}, here"
                        f" {_typed(field, ours)} holds"
                    )
        return lines


def _take_plain_settings(merge: _Merge) -> None:
    """Take what each key says by itself, with the optimizer and the schedule.

    Raises:
        ConfigError: fp16 and bf16 are both enabled, or optimizer or schedule cannot be expressed.
    """
    file = merge.file
    if file.values.get("fp16.enabled") and file.values.get("bf16.enabled"):
        raise file.refusal(
            "fp16.enabled", 'and bf16.enabled true: weights have one dtype; use "enabled": false in one of the two'
        )
    found: dict[str, Mapping[str, Any]] = {}
    for key, value in file.values.items():
        taken = TAKEN[key]
        if key in LOSS_SCALE_KEYS:
            continue  # these depend on the dtype of the run
        if taken.means and value in taken.means:
            found[key] = taken.means[value]
        elif taken.sets is not None:
            found[key] = {taken.sets: value}
    schedule, notes = scheduler_settings(file)
    for key, settings in {**found, **optimizer_settings(file), **schedule}.items():
        merge.take(key, settings)
    merge.notes += notes
    offload = {name: file.values.get(f"zero_optimization.offload_{name}.device") for name in ("param", "optimizer")}
    if offload["param"] == "cpu" and offload["optimizer"] != "cpu":
        merge.note("zero_optimization.offload_param: the optimizer's state goes to host memory with the weights")


def _take_tensorboard(merge: _Merge) -> None:
    values = merge.file.values
    if not values.get("tensorboard.enabled"):
        return
    folder = values.get("tensorboard.output_path")
    if folder is None:
        merge.note("tensorboard.output_path is not given: --tensorboard-dir FOLDER records the run")
        return
    job = values.get("tensorboard.job_name", "DeepSpeedJobName")
    merge.take("tensorboard.output_path", {"tensorboard_dir": str(PurePath(folder) / job)})


def _take_wandb(merge: _Merge) -> None:
    values = merge.file.values
    if values.get("wandb.enabled"):
        merge.take("wandb.project", {"wandb_project": values.get("wandb.project", "deepspeed")})  # DeepSpeed's default


def _note_undecided_dtype(merge: _Merge) -> None:
    """Say that a dtype that the file leaves to its program is fp32 here, where no flag names another."""
    left = [key for key in ("bf16.enabled", "fp16.enabled") if key in merge.file.automatic]
    if left and not (merge.flat.get("bf16") or merge.flat.get("fp16")):
        merge.note(
            f"WARNING: {' and '.join(left)} {_json(AUTO)}: no flag names a dtype, and the run is fp32; add --bf16"
        )


def _take_loss_scale(merge: _Merge) -> None:
    """Take the settings of the loss scale in so far as they are read: in fp16, and of a constant scale that alone.

    Raises:
        ConfigError: the scale would follow another rule than the one here.
    """
    file, values = merge.file, merge.file.values
    given = [key for key in LOSS_SCALE_KEYS if key in values]
    if not merge.flat.get("fp16"):
        if given:
            merge.note(f"{', '.join(given)}: a run without fp16 has no loss scale")
        return
    scale = values.get("fp16.loss_scale")
    if scale is not None:
        merge.take("fp16.loss_scale", {"loss_scale": scale or None})
    dynamic = [key for key in given if key != "fp16.loss_scale"]
    if merge.flat.get("loss_scale") is not None:
        if dynamic:
            merge.note(f"{', '.join(dynamic)}: a constant loss scale does not change")
        return
    power = values.get("fp16.initial_scale_power")
    if power is not None:
        if not 0 <= power <= _MAX_SCALE_POWER:
            raise file.refusal(
                "fp16.initial_scale_power", f"must be at least 0 and at most {_MAX_SCALE_POWER}; e.g. 16"
            )
        merge.take("fp16.initial_scale_power", {"initial_loss_scale": 2.0**power})
    for key in dynamic:
        field = TAKEN[key].sets
        if field is not None:
            merge.take(key, {field: values[key]})
    # Refilled after every step without an overflow, a count of one is what it is without.
    if values.get("fp16.consecutive_hysteresis") and merge.flat.get("hysteresis", _default("hysteresis")) != 1:
        raise file.refusal(
            "fp16.consecutive_hysteresis",
            "overflows are counted over a whole loss_scale_window here; use false, or a hysteresis of 1",
        )


def _take_gradient_dtype(merge: _Merge) -> None:
    """Take the dtype in which gradients are accumulated and reduced: fp32, or that of the model.

    Raises:
        ConfigError: the two keys name different dtypes, or one of neither kind.
    """
    file = merge.file
    asked = {
        key: file.values[key]
        for key in ("data_types.grad_accum_dtype", "communication_data_type")
        if key in file.values
    }
    for key, word in asked.items():
        if word.lower() not in _DTYPES:
            raise file.refusal(key, "not one of fp32, bf16, fp16")
    if not asked:
        return
    key, word = next(iter(asked.items()))
    names = {_DTYPES[one.lower()] for one in asked.values()}
    if len(names) > 1:
        raise file.refusal(
            key,
            f"and communication_data_type {_json(asked['communication_data_type'])}: gradients are accumulated and"
            ' reduced in one dtype; use "fp32" in both, which is exact and works with every model',
        )
    model = schema.build(merge.flat).derived.params_dtype_name
    name = names.pop()
    if name == "float32":
        merge.take(key, {"accumulate_allreduce_grads_in_fp32": True})
    elif name != model:
        raise file.refusal(
            key, f'gradients are accumulated and reduced in fp32 or in the model\'s dtype, {model}; use "fp32"'
        )
    elif name == "bfloat16":
        merge.take(key, {"grad_reduce_in_bf16": True})
    else:
        merge.take(key, {"accumulate_allreduce_grads_in_fp32": False})


def _take_batch_sizes(merge: _Merge, world_size: int | None) -> None:
    """Take the batch sizes, and what follows from them on that many ranks.

    The global batch is micro-batch x accumulation x DP. Of these the file may leave out one, which follows from the
    others, or all but one; then there is no accumulation, as in DeepSpeed, unless the file says "auto".

    Raises:
        ConfigError: the sizes contradict each other.
    """
    file, values = merge.file, merge.file.values
    for key in (_TRAIN, _MICRO, _STEPS):
        if values.get(key, 1) < 1:
            raise file.refusal(key, f'must be at least 1; or use "{AUTO}", for the flags to decide')
    if _TRAIN in values:
        merge.take(_TRAIN, {"global_batch_size": values[_TRAIN]})
    if _MICRO in values:
        merge.take(_MICRO, {"micro_batch_size": values[_MICRO]})
    derived = schema.build(merge.flat).derived
    if world_size is None or world_size % derived.model_ranks:
        return  # the rules refuse a layout that does not fit the ranks
    sizes = _BatchSizes(merge, derived.data_parallel_size(world_size))
    if _STEPS in values:
        sizes.accumulate(values[_STEPS])
    elif {_TRAIN, _MICRO} & values.keys() and not {_TRAIN, _MICRO, _STEPS} & file.automatic:
        sizes.complete()


class _BatchSizes:
    """The batch sizes of a file and of flags, on a number of data-parallel ranks."""

    def __init__(self, merge: _Merge, data_parallel: int) -> None:
        self._merge, self._data_parallel = merge, data_parallel
        self._typed = {name for name in ("global_batch_size", "micro_batch_size") if name in merge.above}
        self._train = self._known(_TRAIN, "global_batch_size")
        self._micro = self._known(_MICRO, "micro_batch_size")

    def _known(self, key: str, field: str) -> int | None:
        if field in self._merge.above:
            return self._merge.above[field]
        return self._merge.file.values.get(key)

    def accumulate(self, steps: int) -> None:
        """Take a number of micro-batches per rank and step."""
        merge, ranks = self._merge, self._data_parallel
        if self._train is None:
            micro = self._micro or merge.flat.get("micro_batch_size", _default("micro_batch_size"))
            merge.take(_STEPS, {"global_batch_size": micro * steps * ranks})
        elif self._micro is None:
            if self._train % (steps * ranks) == 0:
                merge.take(_STEPS, {"micro_batch_size": self._train // (steps * ranks)})
            else:
                self._disagree(steps, f"{steps} x DP {ranks} = {steps * ranks} does not divide it")
        elif self._micro * steps * ranks != self._train:
            product = f"{self._micro} x {steps} x DP {ranks}"
            self._disagree(steps, f"{product} = {self._micro * steps * ranks}, not {self._train}")

    def _disagree(self, steps: int, why: str) -> None:
        """Let a flag win over the accumulation of the file; refuse a file that contradicts itself."""
        merge = self._merge
        if self._typed:
            flags = " and ".join(_typed(name, merge.above[name]) for name in sorted(self._typed))
            merge.note(f"{_STEPS} {steps} is overridden by {flags}: {why}")
            return
        given = [f"{key} {merge.file.values[key]}" for key in (_MICRO, _STEPS) if key in merge.file.values]
        raise merge.file.refusal(
            _TRAIN,
            f"{', '.join(given)}: must be micro-batch x accumulation x DP, but {why}; use {_TRAIN}"
            f" {self._multiple((self._micro or 1) * steps * self._data_parallel)}, or leave one of the keys out",
        )

    def _multiple(self, unit: int) -> int:
        """Return the multiple of a number of sequences that is next to the file's global batch, from below."""
        return unit if self._micro is not None else unit * max(1, (self._train or 0) // unit)

    def complete(self) -> None:
        """Add the size that the file leaves out, with one micro-batch per rank and step."""
        merge, ranks = self._merge, self._data_parallel
        if self._train is None and self._micro is not None:
            merge.take(_MICRO, {"global_batch_size": self._micro * ranks})
        elif self._train is not None and self._micro is None and "global_batch_size" not in self._typed:
            if self._train % ranks:
                raise merge.file.refusal(_TRAIN, f"must be a multiple of DP {ranks}; e.g. {self._multiple(ranks)}")
            merge.take(_TRAIN, {"micro_batch_size": self._train // ranks})


def _default(field: str) -> Any:
    return all_fields()[field].default


def _typed(field: str, value: Any) -> str:
    return all_fields()[field].typed(value)


def _json(value: Any) -> str:
    return json.dumps(value)


# Optimizer and schedule. The schedules that are taken equal one here, as functions of the iteration. With t iterations
# done, W iterations of warm-up, and rates `low` and `high`, these are in DeepSpeed:
#
#     WarmupLR, linear        low + (high - low) min(t / W, 1)
#     WarmupDecayLR, linear   the same up to W, then low + (high - low) max((T - t) / (T - W), 0)
#     OneCycle                low + (high - low) t / W up to W, down again in the same way until T, then low
#
# and the schedules `constant` and `linear` here, with `low` as `--lr-warmup-init` and `--min-lr`. DeepSpeed counts the
# steps of the first two from the second step on: its first two steps use `low`, where here the first does.

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
