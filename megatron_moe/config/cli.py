"""The command line and the YAML file, made from the schema: one field is one flag and one key.

Precedence: flags, then `--config FILE`, then `--preset NAME`, then the folder of `--load-hf` or
`--use-checkpoint-args`, then the schema's defaults. Overriding a folder's architecture is an error.
`megatron_moe_tools.compat` puts the settings of other programs' commands and files between these.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import yaml

from megatron_moe.config import command_line, schema
from megatron_moe.config.command_line import SCRIPT, WHOLE_MESSAGE, Formatter, Parser, program_name
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import Field, all_fields, choice_suggestion, from_file, from_text, suggestion
from megatron_moe.config.paths import read_settings
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run

FillIn = Callable[[dict[str, Any]], dict[str, Any]]
"""Adds the architecture of a folder that the settings name, and refuses settings that contradict it."""

# Megatron-LM's own spellings of flags that are named for their opposite here: flag -> (field, value).
SPELLINGS: dict[str, tuple[str, Any]] = {"--disable-bias-linear": ("add_bias_linear", False)}

START = "start from"
"""The group of flags that name what a run starts from, and are no settings."""


@dataclass(frozen=True)
class Source:
    """Settings from one place: a preset, a file, the flags.

    Args:
        values: field -> value.
        places: field -> how messages name the place of a value that no flag of ours has given.
        explicit: whether the user has typed these settings.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    explicit: bool = False


@dataclass
class MergedSettings:
    """Settings of several sources, where a later source wins.

    Attributes:
        values: field -> value.
        places: as a source's, of the values that have won.
        explicit: fields whose value the user has typed.
        from_folder: whether the architecture is a folder's.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    explicit: set[str] = dataclasses.field(default_factory=set)
    from_folder: bool = False

    def add(self, source: Source) -> None:
        """Add a source that wins over the ones before it."""
        for name, value in source.values.items():
            self.values[name] = value
            self.places.pop(name, None)
            self.explicit.discard(name)
            if name in source.places:
                self.places[name] = source.places[name]
            if source.explicit and value is not None:
                self.explicit.add(name)

    def change(self, values: Mapping[str, Any]) -> None:
        """Replace the settings; what the user has typed and is changed no longer counts as typed."""
        self.explicit = {name for name in self.explicit if values.get(name) == self.values.get(name)}
        self.values = dict(values)

    def run(self, warnings: Sequence[str] = ()) -> Run:
        """Return the run that has these settings."""
        explicit = frozenset(self.explicit)
        return dataclasses.replace(
            schema.build(self.values), warnings=tuple(warnings), sources=self.places, explicit=explicit
        )


@dataclass(frozen=True)
class CommandLine:
    """What a command line says.

    Attributes:
        starts: what the run starts from besides a preset, by the flag's name.
        preset, file, flags: the settings of each; the later win.
    """

    starts: dict[str, str | None]
    preset: dict[str, Any]
    file: dict[str, Any]
    flags: dict[str, Any]

    @property
    def above_preset(self) -> dict[str, Any]:
        """Settings of flags and of `--config`."""
        return {**self.file, **self.flags}


def parse(argv: Sequence[str], filled_in: FillIn | None = None) -> Run:
    """Return the run of a command line. Values are typed here; `rules.check` checks their combination.

    Raises:
        ConfigError: for an unknown flag or key, a value of the wrong type, a missing file or an unknown preset.
        SystemExit: with status 0, after printing the help.
    """
    command_line.answer_help(argv, parser())
    parser().require_sound(argv)
    own, wrong = parser().fields_by_flag(), []
    for group in command_line.groups(argv):
        flag, _ = command_line.parts(group)
        if command_line.is_flag(group[0]) and flag not in own:
            wrong.append(command_line.unknown_flag(flag, own))
    if wrong:
        raise ConfigError(*(f"{text}; {SCRIPT} reads Megatron-LM's flags, too" for text in wrong))
    command = read(argv, parser())
    sources = [Source(command.preset), Source(command.file), Source(command.flags, explicit=True)]
    return merged(sources, command, filled_in).run()


def read(argv: Sequence[str], parser: Parser) -> CommandLine:
    """Read the flags, and the preset and the file that they name.

    Args:
        parser: of `build_parser`, perhaps with more flags in the group START: these are keys of a file, too.

    Raises:
        ConfigError: as `parse`; `UnknownKey` for an unknown key of the file.
    """
    words, extra = parser.parse_known_args(argv)
    if extra:
        raise ConfigError(command_line.unexpected(extra[0], list(parser.fields_by_flag())))
    given = vars(words)
    path = given.pop("config", None)
    starts_known = set(parser.fields_by_flag().values()) - all_fields().keys() - {"help", "config"}
    file = read_yaml(path, starts_known) if path is not None else {}
    starts = {name: values.pop(name) for values in (file, given) for name in starts_known & values.keys()}
    preset = starts.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        near = choice_suggestion(preset, PRESETS)
        raise ConfigError(f"--preset {preset}: not one of {', '.join(PRESETS)}{near}")
    for name, value in given.items():
        if isinstance(value, list):
            if None in value and len(value) > 1:
                flag = all_fields()[name].flag
                raise ConfigError(f"{flag}: `none` is among other values; write it alone, to unset the flag")
            given[name] = None if value == [None] else tuple(value)
    return CommandLine(starts, PRESETS[preset] if preset is not None else {}, file, given)


def merged(sources: Iterable[Source], command: CommandLine, filled_in: FillIn | None) -> MergedSettings:
    """Return the settings of sources, the later of which win, with the architecture of the folder that they name."""
    found = MergedSettings()
    for source in sources:
        found.add(source)
    samples, batch = found.values.get("train_samples"), found.values.get("global_batch_size")
    if samples is not None and batch is not None:
        iters = command.above_preset.get("train_iters")
        if iters is not None:
            raise ConfigError(
                f"--train-samples {samples}, --train-iters {iters}: both say how long the training is; keep one"
            )
        if 0 < samples < batch:
            raise ConfigError(
                f"--train-samples {samples}, --global-batch-size {batch}: is less than one step; use at least "
                f"--train-samples {batch}"
            )
        # Whole steps of the global batch, as Megatron-LM counts them. Smaller batches of a ramp-up, or before a resume,
        # are not among them: `training.plan` counts the steps once more.
        found.add(Source({"train_iters": samples // batch}))
    if filled_in is None:
        return found
    values = filled_in(found.values)
    # A folder of --pretrained-checkpoint alone gives weights, and no architecture.
    added = values.keys() - found.values.keys()
    found.from_folder = values is not found.values and not added <= {"load", "finetune"}
    found.values = values
    return found


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with an error for a key that is given twice in place of a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"key {key} is given twice, in line {key_node.start_mark.line + 1} again; keep one")
            seen.append(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read decimal digits alone: in YAML 1.1 `010` is 8 and `1:30` is 90, which nobody means here."""
        text = str(node.value)
        if not _DECIMAL.fullmatch(text):
            meaning = f", for {text} is {super().construct_yaml_int(node)} in YAML" if len(text) < 40 else ""
            raise ConfigError(
                f"{text[:40]}, near line {node.start_mark.line + 1}: write at most 1000 decimal digits{meaning}"
            )
        return int(text)


_UNNAMED = 'in "<unicode string>",'
"""How YAML calls a text that has no file."""
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]{0,999})")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class UnknownKey(ConfigError):
    """A key of a `--config` file that is no setting: its place, its name, and a hint at what was meant."""

    def __init__(self, where: str, name: str, hint: str) -> None:
        super().__init__(f"{where}: unknown key{hint}")
        self.where, self.name = where, name


def read_mapping(flag: str, path: str, expected: str) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty one.

    Args:
        expected: what to write, for the message where there is no mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has a key twice, or holds no mapping.
    """
    text = read_settings(flag, path, "YAML")
    try:
        document = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace(_UNNAMED, "in")
        raise ConfigError(f"{flag} {path}: is not YAML: {reason}") from error
    except RecursionError:
        raise ConfigError(f"{flag} {path}: is not YAML of settings: its brackets are nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{flag} {path}: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{flag} {path}: holds no mapping; write {expected}")
    return document


def read_yaml(path: str, starts: Collection[str] = ("preset",)) -> dict[str, Any]:
    """Read the file's settings as a flat dict, field name (or one of `starts`) -> value of the field's type.

    Keys are flat, or grouped under the schema's section names, where that section's keys alone are allowed. A key may
    be written with `-` or `_`.

    Args:
        starts: flags that are no settings and may be keys.

    Raises:
        ConfigError: if the file cannot be read, is not a YAML mapping, or has an unknown key, a key twice or a value of
            the wrong type; the message names file and key.
    """
    document = read_mapping("--config", path, "lines like `num_layers: 4`")
    flat: dict[str, Any] = {}
    for key, value in document.items():
        # `optimizer` is a section and also a field; only a mapping can be a section.
        if isinstance(value, dict) and key in schema.sections():
            for inner, inner_value in value.items():
                _put(flat, inner, inner_value, path, (), section=str(key))
        else:
            _put(flat, key, value, path, starts, section=None)
    return flat


def _put(
    flat: dict[str, Any], key: object, value: object, path: str, starts: Collection[str], section: str | None
) -> None:
    name = str(key).replace("-", "_")
    where = f"--config {path}: {key if section is None else f'{section}.{key}'}"
    if name in starts:
        if name in flat or not isinstance(value, str):
            raise ConfigError(f"{where}: takes one name, once; e.g. `preset: tiny`")
        flat[name] = value
        return
    if name not in all_fields():
        raise UnknownKey(where, name, suggestion(name, [*all_fields(), *schema.sections()]))
    field = all_fields()[name]
    if section is not None and field.section != section:
        raise ConfigError(f"{where}: belongs to section {field.section}; move it there, or to the top level")
    if name in flat:
        raise ConfigError(f"{where}: is set twice, at the top level and under {field.section}; keep one")
    flat[name] = from_file(field, value, where)


@lru_cache(maxsize=1)
def parser() -> Parser:
    """Return the parser of the flags, which takes longer to build than a command line to read."""
    return build_parser()


def build_parser() -> Parser:
    """Build a parser with one argument group per section, and no defaults: what was not typed is not in the result."""
    parser = Parser(
        prog=program_name(SCRIPT),
        usage="%(prog)s [--preset NAME] [--config FILE] [flags]",
        description="Pre-train a mixture-of-experts transformer.",
        epilog="Flags win over --config, that over --preset. The word `none` unsets a flag that has no default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=Formatter,
    )
    parser.checks_words = False  # `parse` checks what was typed, which may be translated before it is read here
    start = parser.add_argument_group(START)
    start.add_argument("--preset", metavar="NAME", help=f"a named configuration: {', '.join(PRESETS)}")
    start.add_argument("--config", metavar="FILE", help="a YAML file; keys are the flags' names, preset too")
    for section, cls in schema.sections().items():
        group = parser.add_argument_group(section, " ".join((cls.__doc__ or "").split()))
        for field in all_fields().values():
            if field.section == section:
                _add(group, field)
    return parser


def add_flags(group: argparse._ArgumentGroup, names: Iterable[str]) -> None:
    """Add the flags of some of the schema's fields to the parser of another program."""
    for name in names:
        _add(group, all_fields()[name])


def _add(group: argparse._ArgumentGroup, field: Field) -> None:
    help_text, default = field.help + (f" [{field.unit}]" if field.unit else ""), field.default
    if default is not None and default != "":
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if isinstance(default, bool):
            shown = "on" if default else "off"
        help_text += f" (default: {shown})"
    help_text = help_text.replace("%", "%%")
    if field.is_bool:
        opposite = [flag for flag, (name, value) in SPELLINGS.items() if name == field.name and value is False]
        group.add_argument(field.flag, dest=field.name, action="store_true", help=help_text)
        negatives = [field.negative_flag, *opposite]
        group.add_argument(*negatives, dest=field.name, action="store_false", help=f"the opposite of {field.flag}")
        return
    metavar = {int: "N", float: "X", str: "TEXT"}[field.kinds[-1]]
    if field.choices is not None:
        metavar = "{" + ",".join(map(str, field.choices)) + "}"
    nargs, convert = "+" if field.repeated else None, partial(_converted, field)
    group.add_argument(field.flag, dest=field.name, type=convert, nargs=nargs, metavar=metavar, help=help_text)


def _converted(field: Field, text: str) -> Any:
    try:
        return from_text(field, text)
    except ConfigError as error:  # argparse replaces the message of a ValueError
        raise argparse.ArgumentTypeError(f"{WHOLE_MESSAGE}{error}") from None
