"""A DeepSpeed configuration file as settings: what `--deepspeed-config` adds to a command line.

The file has a place between `--config` and `--preset`: flags and `--config` win over it, and it wins over a preset. A
value of the file that is overridden is named in a note, since the file may be shared with a program that uses it.
`deepspeed_keys.yaml` says of each key whether it is taken, refused, or without a meaning here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import yaml

from megatron_moe.config import schema
from megatron_moe.config.cli import Source
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, suggestion
from megatron_moe.config.paths import read_settings

AUTO = "auto"
"""The value that leaves a key to the program that DeepSpeed is used from."""

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_MAX_SCALE_POWER = 127  # of a finite fp32 number


# ---- The tables of keys


@dataclass(frozen=True)
class Taken:
    """A key that is read.

    Args:
        kind: the type of its value, as text.
        sets: the field of the schema that takes the value as it is; None where `means` or code here says more.
        means: value -> settings, for values that are not taken as they are.
    """

    kind: str
    sets: str | None = None
    means: Mapping[Any, Mapping[str, Any]] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A key that asks for something else than this framework does.

    Args:
        rule: why. works: what works instead.
        harmless: values that ask for nothing.
        switched: of a mapping, whether it asks for nothing without an `"enabled": true` in it.
    """

    rule: str
    works: str
    harmless: tuple[Any, ...] = (False,)
    switched: bool = False


@dataclass(frozen=True)
class KeyTables:
    """`deepspeed_keys.yaml`, which says what each table is; keys have dots.

    reasons: key without a meaning here -> why. mappings: keys that hold keys.
    """

    taken: dict[str, Taken]
    refused: dict[str, Refused]
    reasons: dict[str, str]
    mappings: set[str]
    aliases: dict[str, str]
    loss_scale: list[str]
    optimizers: list[str]
    other_optimizers: dict[str, str]
    schedulers: dict[str, dict[str, Any]]
    other_schedulers: dict[str, str]
    defaults: dict[str, dict[str, Any]]
    rivals: dict[str, dict[str, list[Any]]]
    implied: dict[str, dict[Any, dict[str, Any]]]
    dtypes: dict[str, str]


@lru_cache(maxsize=1)
def tables() -> KeyTables:
    """Read `deepspeed_keys.yaml`."""
    content = yaml.safe_load(Path(__file__).with_name("deepspeed_keys.yaml").read_text(encoding="utf-8"))
    reasons = {}
    for row in content.pop("meaningless"):
        for mapping, names in row["keys"].items():
            for name in names.split():
                reasons[f"{mapping}.{name}" if mapping else name] = row["why"]
    taken = {key: Taken(**row) for key, row in content.pop("taken").items()}
    refused = {key: Refused(**row) for key, row in content.pop("refused").items()}
    mappings = {key.rpartition(".")[0] for key in (*taken, *refused, *reasons)} - {""}
    return KeyTables(taken, refused, reasons, mappings, **content)


# ---- Reading

# Strings are kept as they are; of comments and of commas before a closing bracket nothing is left.
_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)
_TEXT_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')
_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}


@dataclass(frozen=True)
class DeepSpeedFile:
    """The keys of one file that are taken.

    Args:
        path: as the flag gives it.
        values: key with dots -> value of the key's type, in the order of the file; without those that are "auto".
        automatic: keys whose value is "auto", so that flags and defaults of this framework decide.
        notes: a line for each reason why keys are read past.
    """

    path: str
    values: dict[str, Any]
    automatic: frozenset[str]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name, for notes."""
        return Path(self.path).name

    def refusal(self, key: str, rule: str) -> ConfigError:
        """Return the error to raise for a key with the value that it has."""
        return _refusal(self.path, key, self.values.get(key), rule)


def read(path: str) -> DeepSpeedFile:
    """Read a DeepSpeed configuration file.

    Comments (`//`, `#`, `/* */`) and trailing commas are accepted, as DeepSpeed accepts them, and keys that start with
    `_` or `//` count as comments. `null` is a key that is not given.

    Raises:
        ConfigError: the file cannot be read or is not JSON, a key is given twice, is unknown or asks for something that
            this framework does not do, or a value has another type than its key.
    """
    document = _document(path)
    _check_types(path, document)
    known = tables()
    keys: dict[str, Any] = {}
    _collect(path, document, "", keys)
    values: dict[str, Any] = {}
    automatic = set()
    meaningless: dict[str, list[str]] = {}
    for key, value in keys.items():
        if value == AUTO:
            automatic.add(key)
        elif key in known.taken:
            values[key] = _value_of_kind(path, key, value)
        elif key in known.refused:
            refused = known.refused[key]
            if _asks_for_something(value, refused):
                raise _refusal(path, key, value, f"{refused.rule}; use {refused.works}")
        else:
            meaningless.setdefault(known.reasons[key], []).append(key)
    notes = []
    for reason, named in meaningless.items():
        notes.append(f"{Path(path).name}: {', '.join(named)}: no meaning here: {reason}")
    return DeepSpeedFile(path, values, frozenset(automatic), tuple(notes))


def _document(path: str) -> dict[str, Any]:
    text = read_settings("--deepspeed-config", path, "JSON")

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else " "

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in sorted(pairs, key=lambda pair: pair[0]):
            if name in found:
                raise ConfigError(f"--deepspeed-config {path}: key {name} is given twice; keep one")
            found[name] = value
        return dict(pairs)

    try:
        document = json.loads(_TEXT_OR_COMMA.sub(kept, _TEXT_OR_COMMENT.sub(kept, text)), object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(
            f"--deepspeed-config {path}: is not JSON: {error}; write keys and text in double quotes"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f'--deepspeed-config {path}: holds no mapping; write {{"zero_optimization": {{"stage": 3}}}}')
    return document


def _check_types(path: str, document: dict[str, Any]) -> None:
    """Refuse optimizers and schedules of other kinds, before their parameters are called unknown."""
    known = tables()
    for block in ("optimizer", "scheduler"):
        mapping = document.get(block)
        kind = mapping.get("type") if isinstance(mapping, dict) else None
        if not isinstance(kind, str) or kind == AUTO:
            continue
        if block == "optimizer" and kind.lower() not in known.optimizers:
            rule = known.other_optimizers.get(kind.lower(), "is another optimizer")
            raise _refusal(path, "optimizer.type", kind, f"{rule}; a file names AdamW alone: use AdamW")
        if block == "scheduler" and kind not in known.schedulers:
            choices = list(known.schedulers)
            rule = known.other_schedulers.get(kind, f"not one of {', '.join(choices)}{suggestion(kind, choices)}")
            raise _refusal(path, "scheduler.type", kind, f"{rule}; without a scheduler in the file the flags decide")


def _collect(path: str, mapping: dict[str, Any], above: str, found: dict[str, Any]) -> None:
    """Put the keys of a mapping into `found`, with those of the mappings in it that are known."""
    table = tables()
    known, mappings = {*table.taken, *table.refused, *table.reasons}, table.mappings
    for name, value in mapping.items():
        if name.startswith(("_", "//")) or name in ("comment", "comments"):
            continue
        key = above + name
        key = table.aliases.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):  # the first form of the setting
            key, value = "zero_optimization.stage", int(value)
        if value is None or (value == AUTO and key in mappings):
            continue
        if key in mappings and key not in known:
            if not isinstance(value, dict):
                raise _refusal(path, key, value, f'holds keys; write {{"{name}": {{...}}}}')
            _collect(path, value, f"{key}.", found)
        elif key not in known:
            every = sorted(known | mappings)
            elsewhere = [one for one in every if one.rpartition(".")[2] == key.rpartition(".")[2]]
            near = f"; did you mean {elsewhere[0]}?" if elsewhere else suggestion(key, every) or "; remove it"
            raise ConfigError(f"--deepspeed-config {path}: {key}: unknown key{near}")
        elif key in found:
            raise ConfigError(f"--deepspeed-config {path}: key {key} is given twice; keep one")
        else:
            found[key] = value


def _asks_for_something(value: object, refused: Refused) -> bool:
    """Return whether a key that is refused has a value other than those that ask for nothing."""
    if isinstance(value, dict):
        leaves = _leaves(value)
        if refused.switched:
            return any(name == "enabled" and on is True for name, on in leaves)
        return bool(leaves)
    return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in refused.harmless)


def _leaves(mapping: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values in a mapping, at any depth, that are given."""
    found = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            found += _leaves(value)
        elif value is not None and value != AUTO:
            found.append((name, value))
    return found


def _value_of_kind(path: str, key: str, value: Any) -> Any:
    """Return a value in the type of its key. As for DeepSpeed, 5e8 is a whole number, and "true" and 1 are true."""
    taken = tables().taken[key]
    converted: Any = None
    if taken.kind == "bool":
        converted = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
    elif taken.kind in ("int", "float") and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if taken.kind == "float" and not math.isnan(number):
            converted = number
        elif number.is_integer():
            converted = int(number)
    elif type(value).__name__ == taken.kind:
        converted = value
    if converted is None:
        raise _refusal(path, key, value, f'is not {_NOUNS[taken.kind]}; or use "{AUTO}", for the flags to decide')
    if taken.means and taken.sets is None and converted not in taken.means:
        rule = f"not one of {', '.join(json.dumps(choice) for choice in taken.means)}"
        if converted == "nvme":
            rule += '; nothing is kept on NVMe, and --optimizer-cpu-offload is what "cpu" is taken for'
        raise _refusal(path, key, value, rule)
    return converted


def _refusal(path: str, key: str, value: object, rule: str) -> ConfigError:
    shown = json.dumps(value)
    if len(shown) > 80:
        shown = f"{shown[:76]} ..."
    return ConfigError(f"--deepspeed-config {path}: {key} {shown}: {rule}")


# ---- Settings


def settings_of(
    path: str | None, below: Mapping[str, Any], above: Mapping[str, Any], world_size: int | None = None
) -> tuple[Source, list[str]]:
    """Return what a DeepSpeed file sets that flags and `--config` do not, and what to report of it at the start.

    Args:
        path: None for no file, which sets nothing.
        below: settings of the preset. above: those of flags and `--config`.
        world_size: ranks of the run, from which the batch sizes follow; None where it is not known yet.

    Raises:
        ConfigError: the file cannot be read, asks for something else than this framework does, or contradicts itself.
    """
    if path is None:
        return Source({}), []
    file = read(path)
    merge = _Merge(file, below, above)
    values = file.values
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        raise file.refusal(
            "fp16.enabled", 'and bf16.enabled true: weights have one dtype; use "enabled": false in one of the two'
        )
    found: dict[str, Mapping[str, Any]] = {}
    for key, value in values.items():
        taken = tables().taken[key]
        if key in tables().loss_scale:
            continue  # these depend on the dtype of the run
        if taken.means and value in taken.means:
            found[key] = taken.means[value]
        elif taken.sets is not None:
            found[key] = {taken.sets: value}
    schedule, notes = _scheduler_settings(file)
    for key, settings in {**found, **_optimizer_settings(file), **schedule}.items():
        merge.take(key, settings)
    merge.notes += notes
    of_optimizer = values.get("zero_optimization.offload_optimizer.device")
    if values.get("zero_optimization.offload_param.device") == "cpu" and of_optimizer != "cpu":
        merge.note("zero_optimization.offload_param: the optimizer's state goes to host memory with the weights")
    if values.get("tensorboard.enabled"):
        folder = values.get("tensorboard.output_path")
        if folder is None:
            merge.note("tensorboard.output_path is not given: --tensorboard-dir FOLDER records the run")
        else:
            job = values.get("tensorboard.job_name", "DeepSpeedJobName")
            merge.take("tensorboard.output_path", {"tensorboard_dir": str(PurePath(folder) / job)})
    if values.get("wandb.enabled"):
        merge.take("wandb.project", {"wandb_project": values.get("wandb.project", "deepspeed")})
    left = [key for key in ("bf16.enabled", "fp16.enabled") if key in file.automatic]
    if left and not (merge.flat.get("bf16") or merge.flat.get("fp16")):
        merge.note(f'WARNING: {" and ".join(left)} "{AUTO}": no flag names a dtype, and the run is fp32; add --bf16')
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
                self.note(f"{key} {json.dumps(shown)} is overridden by {_typed(winner, self.above[winner])}")
            elif field not in self.above:
                self._taken[field] = value
                self._places[field] = f"{key} in {self.file.name}"
                for other, implied in tables().implied.get(field, {}).get(value, {}).items():
                    if other not in self.above and other not in self._places:
                        self._taken[other] = implied

    def _winner(self, field: str, value: Any) -> str | None:
        """Return the field of a flag or of `--config` that contradicts a setting, if there is one."""
        if field in self.above:
            return None if self.above[field] == value else field
        for rival, agreeing in tables().rivals.get(field, {}).items():
            if self.above.get(rival) and value and value not in agreeing:
                return rival
        return None

    def note(self, text: str) -> None:
        """Add a note about the file."""
        self.notes.append(f"{self.file.name}: {text}")

    def result(self) -> tuple[Source, list[str]]:
        """Return the settings, with notes: what the file sets, what it leaves to defaults, what has no meaning."""
        sets = []
        for field, value in self.flat.items():
            if value != self._without.get(field, _default(field)):
                sets.append(_typed(field, value))
        lines = [f"{self.file.name} sets {' '.join(sets) or 'nothing that is not so already'}", *self.notes]
        for key, defaults in tables().defaults.items():  # where DeepSpeed has another default
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
        return Source(self._taken, self._places), [*lines, *self.file.notes]


def _take_loss_scale(merge: _Merge) -> None:
    """Take the settings of the loss scale in so far as they are read: in fp16, and of a constant scale that alone."""
    file, values = merge.file, merge.file.values
    given = [key for key in tables().loss_scale if key in values]
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
        field = tables().taken[key].sets
        if field is not None:
            merge.take(key, {field: values[key]})
    # Refilled after every step without an overflow, a count of one is what it is without.
    if values.get("fp16.consecutive_hysteresis") and merge.flat.get("hysteresis", _default("hysteresis")) != 1:
        raise file.refusal(
            "fp16.consecutive_hysteresis",
            "overflows are counted over a whole loss_scale_window here; use false, or a hysteresis of 1",
        )


def _take_gradient_dtype(merge: _Merge) -> None:
    """Take the dtype in which gradients are accumulated and reduced: fp32, or that of the model."""
    file = merge.file
    asked: dict[str, str] = {}
    for key in ("data_types.grad_accum_dtype", "communication_data_type"):
        word = file.values.get(key)
        if word is not None and word.lower() not in tables().dtypes:
            raise file.refusal(key, "not one of fp32, bf16, fp16")
        if word is not None:
            asked[key] = tables().dtypes[word.lower()]
    if not asked:
        return
    key, name = next(iter(asked.items()))
    if len(set(asked.values())) > 1:
        raise file.refusal(
            key,
            f"and communication_data_type {json.dumps(file.values['communication_data_type'])}: gradients are"
            ' accumulated and reduced in one dtype; use "fp32" in both, which is exact and works with every model',
        )
    model = schema.build(merge.flat).derived.params_dtype_name
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
    ranks = derived.data_parallel_size(world_size)
    typed = [name for name in ("global_batch_size", "micro_batch_size") if name in merge.above]
    train = merge.above.get("global_batch_size", values.get(_TRAIN))
    micro = merge.above.get("micro_batch_size", values.get(_MICRO))
    steps = values.get(_STEPS)
    if steps is None and (not {_TRAIN, _MICRO} & values.keys() or {_TRAIN, _MICRO, _STEPS} & file.automatic):
        return
    if steps is None:  # one micro-batch per rank and step
        if train is None and micro is not None:
            merge.take(_MICRO, {"global_batch_size": micro * ranks})
        elif train is not None and micro is None and "global_batch_size" not in typed:
            if train % ranks:
                works = ranks * max(1, train // ranks)
                raise file.refusal(_TRAIN, f"must be a multiple of DP {ranks}; e.g. {works}")
            merge.take(_TRAIN, {"micro_batch_size": train // ranks})
        return
    unit = (micro or 1) * steps * ranks
    if train is None:
        micro = micro or merge.flat.get("micro_batch_size", _default("micro_batch_size"))
        merge.take(_STEPS, {"global_batch_size": micro * steps * ranks})
        return
    if micro is None and train % unit == 0:
        merge.take(_STEPS, {"micro_batch_size": train // unit})
        return
    if micro is not None and unit == train:
        return
    if micro is None:
        why = f"{steps} x DP {ranks} = {unit} does not divide it"
        unit *= max(1, train // unit)
    else:
        why = f"{micro} x {steps} x DP {ranks} = {unit}, not {train}"
    if typed:  # a flag wins over the accumulation of the file
        flags = " and ".join(_typed(name, merge.above[name]) for name in typed)
        merge.note(f"{_STEPS} {steps} is overridden by {flags}: {why}")
        return
    given = ", ".join(f"{key} {values[key]}" for key in (_MICRO, _STEPS) if key in values)
    raise file.refusal(
        _TRAIN,
        f"{given}: must be micro-batch x accumulation x DP, but {why}; use {_TRAIN} {unit}, or leave one of the keys"
        " out",
    )


def _default(field: str) -> Any:
    return all_fields()[field].default


def _typed(field: str, value: Any) -> str:
    return all_fields()[field].typed(value)


# ---- Optimizer and schedule
#
# The schedules that are taken equal one here, as functions of the iteration. With t iterations
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


def _optimizer_settings(file: DeepSpeedFile) -> Settings:
    """Return what `optimizer` sets, in addition to the parameters that are taken as they are."""
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


def _scheduler_settings(file: DeepSpeedFile) -> tuple[Settings, list[str]]:
    """Return what `scheduler` sets, and notes."""
    kind = file.values.get("scheduler.type")
    given = [key for key in (*file.values, *sorted(file.automatic)) if key.startswith(_PARAMS)]
    if kind is None:
        if given and "scheduler.type" not in file.automatic:
            raise file.refusal(given[0], 'DeepSpeed reads it with a type alone; add "type": "WarmupLR" to scheduler')
        return {}, []
    stray = [key for key in given if key.removeprefix(_PARAMS) not in tables().schedulers[kind]]
    if stray:
        raise file.refusal(stray[0], f"{kind} has no such parameter; it has {', '.join(tables().schedulers[kind])}")

    def param(name: str) -> Any:
        """Return a parameter: DeepSpeed's default where it is left out, None where it is "auto"."""
        if _PARAMS + name in file.automatic:
            return None
        return file.values.get(_PARAMS + name, tables().schedulers[kind][name])

    if kind == "OneCycle":
        return _one_cycle(file, param)
    return _warmup(file, kind, param)


def _warmup(file: DeepSpeedFile, kind: str, param: Callable[[str], Any]) -> tuple[Settings, list[str]]:
    """Return the settings of a warm-up that is followed by a constant rate, or by a linear decay."""
    decays = kind == "WarmupDecayLR"
    steps, shape, notes = param("warmup_num_steps"), f"{_PARAMS}warmup_type", []
    if shape not in file.values:
        notes.append(f"{file.name}: {kind}: the warm-up is linear here (DeepSpeed's default is logarithmic)")
    elif param("warmup_type") not in ("linear", None):
        raise file.refusal(shape, 'the warm-up here is linear; use "warmup_type": "linear"')
    found: Settings = {"scheduler.type": {"lr_decay_style": "constant"}}
    low, high = param("warmup_min_lr"), param("warmup_max_lr")
    if low is not None:
        found[f"{_PARAMS}warmup_min_lr"] = {"lr_warmup_init": low}
    if decays:
        found["scheduler.type"]["lr_decay_style"] = "linear"
        if low is not None:
            found[f"{_PARAMS}warmup_min_lr"]["min_lr"] = low
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


def _one_cycle(file: DeepSpeedFile, param: Callable[[str], Any]) -> tuple[Settings, list[str]]:
    """Return the settings of one linear rise and fall, which leaves Adam's betas and the last rate alone."""
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
    fall = param("cycle_second_step_size")
    if f"{_PARAMS}cycle_second_step_size" not in (*file.values, *file.automatic):
        fall = rise
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
