"""The command line and the YAML file, made from the schema: one field is one flag and one key.

Precedence: flags, then `--config FILE`, then `--deepspeed-config FILE`, then `--preset NAME`, then the folder of
`--load-hf` or `--use-checkpoint-args`, then Megatron-LM's defaults with `--defaults megatron`, then the schema's.
Overriding a folder's architecture is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml

from megatron_moe.config import deepspeed, flag_help, megatron_defaults, megatron_flags, schema
from megatron_moe.config.command_line import WHOLE_MESSAGE, Formatter, Parser, unexpected
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import Field, all_fields, choice_suggestion, from_file, from_text, suggestion
from megatron_moe.config.launch import SCRIPT, program_name
from megatron_moe.config.paths import read_settings
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.rules.ignored import as_megatron_reads
from megatron_moe.config.schema import Run

# Megatron-LM's own spellings of flags that are named for their opposite here: flag -> (field, value).
SPELLINGS: dict[str, tuple[str, Any]] = {"--disable-bias-linear": ("add_bias_linear", False)}

_START = ("preset", "defaults", "deepspeed_config")
"""Flags that start from something named, and no fields: keys of a YAML file too."""


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


def read_yaml(path: str) -> dict[str, Any]:
    """Read the file's settings as a flat dict, field name (or one of `_START`) -> value of the field's type.

    Keys are flat, or grouped under the schema's section names, where that section's keys alone are allowed. A key may
    be written with `-` or `_`.

    Raises:
        ConfigError: if the file cannot be read, is not a YAML mapping, or has an unknown key, a key twice or a value of
            the wrong type; the message names file and key.
    """
    text = read_settings("--config", path, "YAML")
    try:
        document = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace(_UNNAMED, "in")
        raise ConfigError(f"--config {path}: is not YAML: {reason}") from error
    except RecursionError:
        raise ConfigError(f"--config {path}: is not YAML of settings: its brackets are nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: holds no mapping; write lines like `num_layers: 4`")
    flat: dict[str, Any] = {}
    for key, value in document.items():
        # `optimizer` is a section and also a field; only a mapping can be a section.
        if isinstance(value, dict) and key in schema.sections():
            for inner, inner_value in value.items():
                _put(flat, inner, inner_value, path, section=str(key))
        else:
            _put(flat, key, value, path, section=None)
    return flat


def _put(flat: dict[str, Any], key: Any, value: Any, path: str, section: str | None) -> None:
    name = str(key).replace("-", "_")
    where = f"--config {path}: {key if section is None else f'{section}.{key}'}"
    if name in _START and section is None:
        if name in flat or not isinstance(value, str):
            raise ConfigError(f"{where}: takes one name, once; e.g. `preset: tiny`")
        flat[name] = value
        return
    fields = {f.spelling or f.name: f for f in all_fields().values()} | all_fields()
    if name not in fields:
        raise ConfigError(f"{where}: unknown key{_hint(name, [*fields, *schema.sections()])}")
    field = fields[name]
    if section is not None and field.section != section:
        raise ConfigError(f"{where}: belongs to section {field.section}; move it there, or to the top level")
    if field.name in flat:
        raise ConfigError(f"{where}: is set twice, at the top level and under {field.section}; keep one")
    flat[field.name] = from_file(field, value, where)


def _hint(name: str, known: list[str]) -> str:
    row = megatron_flags.row_for("--" + name.replace("_", "-"), ())
    if row is None:
        return suggestion(name, known)
    if row.answer == "unknown":
        return megatron_flags.instead(row)
    target = f"{row.target}: " if row.target else ""
    return f"; Megatron-LM's {row.flag} is {row.answer}: {target}{row.reason}"


def parse(
    argv: Sequence[str],
    filled_in: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    world_size: int | None = None,
) -> Run:
    """Return the run of a command line. Values are typed here; `rules.check` checks their combination.

    Args:
        filled_in: adds the architecture of a folder that the settings name, and refuses settings that contradict it.
        world_size: ranks of the run, by which the batch sizes of a DeepSpeed file are checked and completed.

    Raises:
        ConfigError: for an unknown flag or key, a value of the wrong type, a missing file or an unknown preset.
        SystemExit: with status 0, after printing the help.
    """
    parser = _build_parser()
    flag_help.answer(argv, parser)
    parser.require_sound(argv)
    options = {option: action.dest for action in parser._actions for option in action.option_strings}
    translated = megatron_flags.translate(argv, options)
    if translated.problems:
        raise ConfigError(*translated.problems)
    words, extra = parser.parse_known_args(translated.argv)
    if extra:
        raise ConfigError(unexpected(extra[0], list(options)))
    given = vars(words)
    path = given.pop("config", None)
    above = read_yaml(path) if path is not None else {}
    given = {name: above.pop(name) for name in _START if name in above} | given
    preset, deepspeed_path = given.pop("preset", None), _deepspeed_path(given)
    defaults = _defaults(given.pop("defaults", None), deepspeed_path)
    below = _preset(preset) if preset is not None else {}
    above |= {name: _as_tuple(all_fields()[name], value) for name, value in given.items()}
    typed = {name for name in given if above[name] is not None}
    below, above = _whole_steps(below, above)
    read = deepspeed.MergedSettings({**below, **above}, (), {})
    if deepspeed_path is not None:
        read = deepspeed.merged(deepspeed_path, below, above, world_size)
    flat = read.flat if filled_in is None else filled_in(read.flat)
    # A folder of --pretrained-checkpoint alone gives weights, and no architecture.
    has_folder = flat is not read.flat and not flat.keys() - read.flat.keys() <= {"load", "finetune"}
    closed = megatron_defaults.closed_by(below, folder=has_folder)
    of_defaults: tuple[str, ...] = ()
    if defaults == "megatron":
        flat, of_defaults = megatron_defaults.taken(flat, closed)
    elif defaults is None and translated.notes:  # flags that Megatron-LM alone has: it is one of its commands
        of_defaults = megatron_defaults.note_of_open(flat, closed)
    as_given = flat
    flat, ignored = as_megatron_reads(flat)
    unchanged = (name for name in typed if flat.get(name) == as_given.get(name))
    notes = (*translated.notes, *of_defaults, *ignored, *read.notes)
    origins = {options[flag]: source for flag, source in translated.sources.items()} | read.origins
    return dataclasses.replace(schema.build(flat), notes=notes, origins=origins, typed=frozenset(unchanged))


def _defaults(name: str | None, deepspeed_path: str | None) -> str | None:
    """Return whose defaults are asked for, None where the command does not say."""
    known = megatron_defaults.NAMES
    if name is not None and name not in known:
        raise ConfigError(f"--defaults {name}: not one of {', '.join(known)}{suggestion(name, known)}")
    if name == "megatron" and deepspeed_path is not None:
        raise ConfigError(
            f"--defaults {name}, --deepspeed-config {deepspeed_path}: what the file leaves out has DeepSpeed's meaning;"
            " keep one"
        )
    return name


def _whole_steps(below: dict[str, Any], above: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings with `--train-samples` in whole steps of the global batch, as Megatron-LM counts them.

    Smaller batches of a ramp-up, or before a resume, are not among them: `training.plan` counts the steps once more.
    """
    samples = above.get("train_samples", below.get("train_samples"))
    batch = above.get("global_batch_size", below.get("global_batch_size"))
    if samples is None or batch is None:
        return below, above
    if above.get("train_iters") is not None:
        raise ConfigError(
            f"--train-samples {samples}, --train-iters {above['train_iters']}: both say how long the training is;"
            " keep one"
        )
    if 0 < samples < batch:
        raise ConfigError(
            f"--train-samples {samples}, --global-batch-size {batch}: is less than one step; use at least "
            f"--train-samples {batch}"
        )
    return below, {**above, "train_iters": samples // batch}


def _deepspeed_path(given: dict[str, Any]) -> str | None:
    """Take the path of a DeepSpeed file out of the words: by `--deepspeed-config`, or as transformers' programs do."""
    path, switch = given.pop("deepspeed_config", None), given.pop("deepspeed", "")
    if switch is None and path is None:
        raise ConfigError("--deepspeed: names no file; use --deepspeed-config FILE")
    if switch and path not in (None, switch):
        raise ConfigError(f"--deepspeed {switch}, --deepspeed-config {path}: name two files; keep one")
    return path or switch or None


def _build_parser() -> Parser:
    """Build a parser with one argument group per section, and no defaults: what was not typed is not in the result."""
    parser = Parser(
        prog=program_name(SCRIPT),
        usage="%(prog)s [--preset NAME] [--deepspeed-config FILE] [--config FILE] [flags]",
        description="Pre-train a mixture-of-experts transformer.",
        epilog="Flags win over --config, --config over --deepspeed-config, that over --preset, and that over"
        " --defaults. The word `none` unsets a flag that has no default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=Formatter,
    )
    parser.checks_words = False  # `parse` checks what was typed, not its translation
    start = parser.add_argument_group("start from")
    start.add_argument("--preset", metavar="NAME", help=f"a named configuration: {', '.join(PRESETS)}")
    start.add_argument("--config", metavar="FILE", help="a YAML file; keys are the flags' names, preset too")
    start.add_argument(
        "--defaults",
        metavar="{" + ",".join(megatron_defaults.NAMES) + "}",
        help="whose defaults to use for what nothing else sets (default: ours; docs/from_megatron.md lists the others)",
    )
    start.add_argument(
        "--deepspeed-config",
        "--deepspeed_config",
        metavar="FILE",
        help="a DeepSpeed configuration (JSON); the run says at its start what is taken and what is not",
    )
    start.add_argument(
        "--deepspeed",
        metavar="FILE",
        nargs="?",
        help="as --deepspeed-config; without FILE, next to it, it says nothing",
    )
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
    help_text = _help(field)
    if field.is_bool:
        opposite = [flag for flag, (name, value) in SPELLINGS.items() if name == field.name and value is False]
        group.add_argument(field.flag, dest=field.name, action="store_true", help=help_text)
        negatives = [field.negative_flag, *opposite]
        group.add_argument(*negatives, dest=field.name, action="store_false", help=f"the opposite of {field.flag}")
        return
    group.add_argument(
        field.flag,
        dest=field.name,
        type=_Converter(field),
        nargs="+" if field.repeated else None,
        metavar=_metavar(field),
        help=help_text,
    )


class _Converter:
    """A conversion by `from_text` for one field, in the form that argparse needs.

    argparse replaces the message of a ValueError, and so of a ConfigError; ArgumentTypeError keeps ours.
    """

    def __init__(self, field: Field) -> None:
        self.field = field

    def __call__(self, text: str) -> Any:
        try:
            return from_text(self.field, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{WHOLE_MESSAGE}{error}") from None


def _help(field: Field) -> str:
    text = field.help + (f" [{field.unit}]" if field.unit else "")
    if field.default is not None and field.default != "":
        text += f" (default: {_shown(field.default)})"
    return text.replace("%", "%%")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(field: Field) -> str:
    if field.choices is not None:
        return "{" + ",".join(map(str, field.choices)) + "}"
    return {int: "N", float: "X", str: "TEXT"}[field.kinds[-1]]


def _as_tuple(field: Field, value: Any) -> Any:
    """Return a repeated flag's words as a tuple; the single word `none` unsets it."""
    if not field.repeated:
        return value
    if value == [None]:
        return None
    if None in value:
        raise ConfigError(f"{field.flag}: `none` is among other values; write it alone, to unset the flag")
    return tuple(value)


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: not one of {', '.join(PRESETS)}{choice_suggestion(name, PRESETS)}")
    return PRESETS[name]
