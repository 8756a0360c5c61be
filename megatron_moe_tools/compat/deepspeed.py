"""A DeepSpeed configuration file as settings: what `--deepspeed-config` adds to a command line.

The file has a place between `--config` and `--preset`: flags and `--config` win over it, and it wins over a preset. A
value of the file that is overridden is named in a note, since the file may be shared with a program that uses it.
`deepspeed_keys.yaml` says of each key whether it is taken, refused, or without a meaning here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
        kind: the type of its value, as text; a pair is a list of two numbers.
        sets: the fields that take the value as it is; empty where `means` or code here says more.
        means: value -> settings, for values that are not taken as they are.
    """

    kind: str
    sets: str = ""
    means: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    def settings(self, value: Any) -> Mapping[str, Any]:
        """Return what a value of the key sets."""
        if value in self.means:
            return self.means[value]
        if self.kind == "pair":
            return dict(zip(self.sets.split(), value))
        return dict.fromkeys(self.sets.split(), value)


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

    def asks(self, value: object, name: str | None = None) -> bool:
        """Return whether a value, which is that of `name` in a mapping, asks for something."""
        if isinstance(value, dict):
            return any(self.asks(inner, key) for key, inner in value.items())
        if name is None:
            return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)
        if self.switched:
            return name == "enabled" and value is True
        return value is not None and value != AUTO


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
    other_optimizers: dict[str, str]
    schedulers: dict[str, dict[str, Any]]
    other_schedulers: dict[str, str]
    defaults: dict[str, dict[str, Any]]
    rivals: dict[str, dict[str, list[Any]]]
    implied: dict[str, dict[Any, dict[str, Any]]]
    dtypes: dict[str, str]

    @cached_property
    def known(self) -> set[str]:
        """Every key with a value."""
        return {*self.taken, *self.refused, *self.reasons}


@lru_cache(maxsize=1)
def tables() -> KeyTables:
    """Read `deepspeed_keys.yaml`."""
    content = yaml.safe_load(Path(__file__).with_name("deepspeed_keys.yaml").read_text(encoding="utf-8"))
    reasons = {}
    for row in content.pop("meaningless"):
        for mapping, names in row["keys"].items():
            for name in names.split():
                reasons[f"{mapping}.{name}" if mapping else name] = row["why"]
    taken, refused = content.pop("taken"), content.pop("refused")
    for key, row in taken.items():
        taken[key] = Taken(**row)
    for key, row in refused.items():
        refused[key] = Refused(**row)
    mappings = {key.rpartition(".")[0] for key in (*taken, *refused, *reasons)} - {""}
    return KeyTables(taken, refused, reasons, mappings, **content)


# ---- Reading

# Strings are kept as they are; of comments and of commas before a closing bracket nothing is left.
_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)
_TEXT_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')
_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_NOUNS["pair"] = "two numbers, e.g. [0.9, 0.95]"


@dataclass
class DeepSpeedFile:
    """The keys of one file."""

    path: str
    given: dict[str, Any] = field(default_factory=dict)
    """Key with dots -> value as the file has it, in its order."""
    values: dict[str, Any] = field(default_factory=dict)
    """Those that are taken, of the key's type; without those that are "auto"."""
    automatic: set[str] = field(default_factory=set)
    """Keys whose value is "auto", so that flags and defaults of this framework decide."""
    meaningless: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> keys that are read past."""

    @property
    def name(self) -> str:
        """The file's name, for notes."""
        return Path(self.path).name

    def refusal(self, key: str, rule: str) -> ConfigError:
        """Return the error to raise for a key with the value that it has."""
        shown = json.dumps(self.given.get(key))
        if len(shown) > 80:
            shown = f"{shown[:76]} ..."
        return ConfigError(f"--deepspeed-config {self.path}: {key} {shown}: {rule}")

    def take(self, mapping: dict[str, Any], above: str = "") -> None:
        """Take the keys of a mapping, whose own key with a dot is `above`, and of the known mappings in it."""
        table = tables()
        # An optimizer or schedule of another kind is refused before its parameters are called unknown.
        for name, value in sorted(mapping.items(), key=lambda item: item[0] != "type"):
            if name.startswith(("_", "//")) or name in ("comment", "comments"):
                continue
            key = table.aliases.get(above + name, above + name)
            if key == "zero_optimization" and isinstance(value, bool):  # the first form of the setting
                key, value = "zero_optimization.stage", int(value)
            if value is None or (value == AUTO and key in table.mappings):
                continue
            if key in self.given:
                raise ConfigError(f"--deepspeed-config {self.path}: key {key} is given twice; keep one")
            if key in table.mappings - table.known:
                if not isinstance(value, dict):
                    self.given[key] = value
                    raise self.refusal(key, f'holds keys; write {{"{name}": {{...}}}}')
                self.take(value, f"{key}.")
                continue
            if key not in table.known:
                every = sorted(table.known | table.mappings)
                elsewhere = [one for one in every if one.rpartition(".")[2] == key.rpartition(".")[2]]
                near = f"; did you mean {elsewhere[0]}?" if elsewhere else suggestion(key, every) or "; remove it"
                raise ConfigError(f"--deepspeed-config {self.path}: {key}: unknown key{near}")
            self.given[key] = value
            if value == AUTO:
                self.automatic.add(key)
            elif key in table.taken:
                self.values[key] = self._converted(key)
            elif key in table.reasons:
                self.meaningless.setdefault(table.reasons[key], []).append(key)
            elif table.refused[key].asks(value):
                raise self.refusal(key, f"{table.refused[key].rule}; use {table.refused[key].works}")

    def _converted(self, key: str) -> Any:
        """Return a value in the type of its key, if it is one of the key's values."""
        taken, table = tables().taken[key], tables()
        converted = _of_kind(taken.kind, self.given[key])
        if converted is None:
            raise self.refusal(key, f'is not {_NOUNS[taken.kind]}; or use "{AUTO}", for the flags to decide')
        if taken.means and not taken.sets and converted not in taken.means:
            rule = f"not one of {', '.join(map(json.dumps, taken.means))}"
            if converted == "nvme":
                rule += '; nothing is kept on NVMe, and --optimizer-cpu-offload is what "cpu" is taken for'
            raise self.refusal(key, rule)
        if key == "optimizer.type" and converted.lower() not in ("adam", "adamw"):
            rule = table.other_optimizers.get(converted.lower(), "is another optimizer")
            raise self.refusal(key, f"{rule}; a file names AdamW alone: use AdamW")
        if key == "scheduler.type" and converted not in table.schedulers:
            near = f"not one of {', '.join(table.schedulers)}{suggestion(converted, table.schedulers)}"
            rule = table.other_schedulers.get(converted, near)
            raise self.refusal(key, f"{rule}; without a scheduler in the file the flags decide")
        return converted


def read(path: str) -> DeepSpeedFile:
    """Read a DeepSpeed configuration file.

    Comments (`//`, `#`, `/* */`) and trailing commas are accepted, as DeepSpeed accepts them, and keys that start with
    `_` or `//` count as comments. `null` is a key that is not given.

    Raises:
        ConfigError: the file cannot be read or is not JSON, a key is given twice, is unknown or asks for something that
            this framework does not do, or a value has another type than its key.
    """
    text = read_settings("--deepspeed-config", path, "JSON")
    twice: list[str] = []

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else " "

    def mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                twice.append(name)
            found[name] = value
        return found

    text = _TEXT_OR_COMMA.sub(kept, _TEXT_OR_COMMENT.sub(kept, text))
    try:
        document = json.loads(text, object_pairs_hook=mapping_of)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(
            f"--deepspeed-config {path}: is not JSON: {error}; write keys and text in double quotes"
        ) from None
    if twice:
        raise ConfigError(f"--deepspeed-config {path}: key {twice[0]} is given twice; keep one")
    if not isinstance(document, dict):
        raise ConfigError(f'--deepspeed-config {path}: holds no mapping; write {{"zero_optimization": {{"stage": 3}}}}')
    file = DeepSpeedFile(path)
    file.take(document)
    return file


def _of_kind(kind: str, value: Any) -> Any:
    """Return a value as one of a kind, or None. As for DeepSpeed, 5e8 is a whole number, and "true" and 1 are true."""
    if kind == "bool":
        return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "pair" and isinstance(value, list) and len(value) == 2 and set(map(type, value)) <= {int, float}:
        return tuple(map(float, value))
    if kind not in ("int", "float") or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if kind == "int" and number.is_integer():
        return int(number)
    if kind == "float" and not math.isnan(number):
        return number
    return None


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
    merge, values = _Merge(file, below, above), file.values
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        raise file.refusal(
            "fp16.enabled", 'and bf16.enabled true: weights have one dtype; use "enabled": false in one of the two'
        )
    of_schedule = (*values, *sorted(file.automatic))
    for block, example, keys in (("optimizer", "AdamW", values), ("scheduler", "WarmupLR", of_schedule)):
        for key in keys:
            if key.startswith(f"{block}.params.") and f"{block}.type" not in file.given:
                raise file.refusal(key, f'DeepSpeed reads it with a type alone; add "type": "{example}" to {block}')
    for key, value in values.items():
        if not _is_of_loss_scale(key):  # these depend on the dtype of the run
            merge.take(key, tables().taken[key].settings(value))
    decay = values.get("optimizer.params.weight_decay", 0.0)
    if values.get("optimizer.type", "").lower() == "adam" and not values.get("optimizer.params.adam_w_mode", True):
        if decay != 0.0:
            raise file.refusal(
                "optimizer.params.adam_w_mode",
                f"makes the weight_decay of {decay:g} an L2 penalty, which Adam divides by the second moment, and here"
                " weights decay by themselves; use true, or a weight_decay of 0",
            )
        merge.take("optimizer.params.adam_w_mode", {"weight_decay": 0.0})
    _take_schedule(merge)
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
    left = sorted(file.automatic & {"bf16.enabled", "fp16.enabled"})
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
        self._notes: list[str] = []
        self._taken: dict[str, Any] = {}
        self._places: dict[str, str] = {}

    @property
    def flat(self) -> dict[str, Any]:
        """All settings so far."""
        return {**self._without, **self._taken}

    def get(self, name: str) -> Any:
        """Return a setting so far, or its default."""
        return self.flat.get(name, _field(name).default)

    def take(self, key: str, settings: Mapping[str, Any]) -> None:
        """Add the settings of a key, without those that flags or `--config` override."""
        for name, value in settings.items():
            # The field of a flag or of `--config` that contradicts the setting, if there is one.
            winner = name if name in self.above and self.above[name] != value else None
            if name not in self.above and value:
                for rival, agreeing in tables().rivals.get(name, {}).items():
                    if winner is None and self.above.get(rival) and value not in agreeing:
                        winner = rival
            if winner is not None:
                shown = json.dumps(self.file.values.get(key, value))
                self.note(f"{key} {shown} is overridden by {_field(winner).typed(self.above[winner])}")
            elif name not in self.above:
                self._taken[name] = value
                self._places[name] = f"{key} in {self.file.name}"
                for other, implied in tables().implied.get(name, {}).get(value, {}).items():
                    if other not in self.above and other not in self._places:
                        self._taken[other] = implied

    def note(self, text: str) -> None:
        """Add a note about the file."""
        self._notes.append(f"{self.file.name}: {text}")

    def result(self) -> tuple[Source, list[str]]:
        """Return the settings, with notes: what the file sets, what it leaves to defaults, what has no meaning."""
        name, sets = self.file.name, []
        for each, value in self.flat.items():
            if value != self._without.get(each, _field(each).default):
                sets.append(_field(each).typed(value))
        lines = [f"{name} sets {' '.join(sets) or 'nothing that is not so already'}", *self._notes]
        for key, defaults in tables().defaults.items():  # where DeepSpeed has another default
            of_optimizer = key != "gradient_clipping"
            if key in self.file.given or (of_optimizer and "optimizer.type" not in self.file.values):
                continue
            for each, theirs in defaults.items():
                ours, typed = self.get(each), _field(each).typed
                if ours != theirs and each not in self.above and each not in self._places:
                    lines.append(
                        f"{name} leaves out {key}: DeepSpeed's default is {typed(theirs)}, here {typed(ours)} holds"
                    )
        for reason, keys in self.file.meaningless.items():
            lines.append(f"{name}: {', '.join(keys)}: no meaning here: {reason}")
        return Source(self._taken, self._places), lines


def _field(name: str) -> Any:
    return all_fields()[name]


def _is_of_loss_scale(key: str) -> bool:
    """Return whether a run without fp16 does not read a key; DeepSpeed does not either."""
    return key.startswith("fp16.") and key != "fp16.enabled"


def _take_schedule(merge: _Merge) -> None:
    """Take the schedule, which equals one here as a function of the iteration.

    With t iterations done, W iterations of warm-up, and rates `low` and `high`, these are in DeepSpeed:

        WarmupLR, linear        low + (high - low) min(t / W, 1)
        WarmupDecayLR, linear   the same up to W, then low + (high - low) max((T - t) / (T - W), 0)
        OneCycle                low + (high - low) t / W up to W, down again in the same way until T, then low

    and the schedules `constant` and `linear` here, with `low` as `--lr-warmup-init` and `--min-lr`. DeepSpeed counts
    the steps of the first two from the second step on: its first two steps use `low`, where here the first does.
    """
    file, above = merge.file, "scheduler.params."
    kind = file.values.get("scheduler.type")
    if kind is None:
        return
    rows = tables().schedulers[kind]["params"]
    for key in (*file.values, *sorted(file.automatic)):
        if key.startswith(above) and key.removeprefix(above) not in rows:
            raise file.refusal(key, f"{kind} has no such parameter; it has {', '.join(rows)}")
    merge.take("scheduler.type", {"lr_decay_style": tables().schedulers[kind]["style"]})
    params: dict[str, Any] = {}
    for name, row in rows.items():
        key = above + name
        if "left_out" in row and key not in file.values:
            merge.note(f"{kind}: {row['left_out']}")
        if key in file.automatic and name != "cycle_momentum":  # which no flag decides
            continue
        params[name] = value = file.values.get(key, params.get(row.get("like"), row.get("default")))
        if value is None and "needed" in row:
            raise file.refusal("scheduler.type", f'needs {name}; add it to params, or "auto" for {row["needed"]}')
        if value is None or row.get("like", name) not in params:
            continue
        if value != row.get("only", value) or value < row.get("least", value):
            raise file.refusal(key, row["rule"])
        if name == "decay_lr_rate" and value and params.get("decay_step_size"):
            raise file.refusal(key, "after the cycle the rate is constant here; use 0")
        if name == "warmup_num_steps":
            # DeepSpeed's logarithm is not defined for one step, and so its shortest warm-up has two.
            value = max(2, value)
            merge.note(f"{kind}: here the warm-up's first rate is that of the first step; DeepSpeed uses it for two")
        if name == "cycle_second_step_size":
            value += params["cycle_first_step_size"]
        rate = file.values.get("optimizer.params.lr", value)
        if row.get("sets") == "lr" and rate != value:
            merge.note(f"optimizer.params.lr {rate:g} is not used: {name} {value:g} decides, as in DeepSpeed")
        merge.take(key, dict.fromkeys(row.get("sets", "").split(), value))


def _take_loss_scale(merge: _Merge) -> None:
    """Take the settings of the loss scale in so far as they are read: in fp16, and of a constant scale that alone."""
    file, values = merge.file, merge.file.values
    given = list(filter(_is_of_loss_scale, values))
    if not merge.flat.get("fp16"):
        if given:
            merge.note(f"{', '.join(given)}: a run without fp16 has no loss scale")
        return
    given.sort(key=lambda key: key != "fp16.loss_scale")
    if "fp16.loss_scale" in values:
        key = given.pop(0)
        merge.take(key, tables().taken[key].settings(values[key]))
    if merge.flat.get("loss_scale") is not None:
        if given:
            merge.note(f"{', '.join(given)}: a constant loss scale does not change")
        return
    power = values.get("fp16.initial_scale_power")
    if power is not None:
        if not 0 <= power <= _MAX_SCALE_POWER:
            raise file.refusal(
                "fp16.initial_scale_power", f"must be at least 0 and at most {_MAX_SCALE_POWER}; e.g. 16"
            )
        merge.take("fp16.initial_scale_power", {"initial_loss_scale": 2.0**power})
    for key in given:
        merge.take(key, tables().taken[key].settings(values[key]))
    # Refilled after every step without an overflow, a count of one is what it is without.
    if values.get("fp16.consecutive_hysteresis") and merge.get("hysteresis") != 1:
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
    typed = sorted(merge.above.keys() & {"global_batch_size", "micro_batch_size"})
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
        micro = micro or merge.get("micro_batch_size")
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
        flags = " and ".join(_field(name).typed(merge.above[name]) for name in typed)
        merge.note(f"{_STEPS} {steps} is overridden by {flags}: {why}")
        return
    given = ", ".join(f"{key} {values[key]}" for key in (_MICRO, _STEPS) if key in values)
    raise file.refusal(
        _TRAIN,
        f"{given}: must be micro-batch x accumulation x DP, but {why}; use {_TRAIN} {unit}, or leave one of the keys"
        " out",
    )
