"""Other programs' settings as ours: a command line of Megatron-LM's, or a DeepSpeed file, is a run of this trainer.

`parse` stands where `megatron_moe.config.cli.parse` stands for our own flags. Megatron-LM's flags are replaced by ours
first. Of the settings that result, flags win over `--config`, that over `--deepspeed-config`, that over `--preset`, and
that over Megatron-LM's defaults, which `--defaults megatron` asks for. What Megatron-LM accepts and does not read is
left out at the end. `Run.warnings` says all of this, and `Run.sources` where a value comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_moe.config import cli, command_line
from megatron_moe.config.cli import FillIn, Source
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.schema import Run
from megatron_moe_tools.compat import deepspeed, megatron_flags, megatron_settings


def parse(argv: Sequence[str], filled_in: FillIn | None = None, world_size: int | None = None) -> Run:
    """Return the run of a command line in our flags, Megatron-LM's, or both.

    Args:
        world_size: ranks of the run, by which the batch sizes of a DeepSpeed file are checked and completed.

    Raises:
        ConfigError: as `cli.parse`, and for what another program's flag or file asks for and is not here.
        SystemExit: with status 0, after printing the help.
    """
    command_line.answer_help(argv, parser(), megatron_flags.help_texts)
    parser().require_sound(argv)
    fields = parser().fields_by_flag()
    translated = megatron_flags.translate(argv, fields)
    if translated.problems:
        raise ConfigError(*translated.problems)
    try:
        command = cli.read(translated.argv, parser())
    except cli.UnknownKey as error:
        row = megatron_flags.row_for("--" + error.name.replace("_", "-"), ())
        if row is None:
            raise
        hint = f"; Megatron-LM's {row.flag} is {row.answer}: {row.says}"
        if row.answer == "unknown":
            hint = megatron_flags.instead(row)
        raise ConfigError(f"{error.where}: unknown key{hint}") from None
    # The file of `--deepspeed-config`, or of `--deepspeed` as in transformers' programs.
    path, switch = command.starts.get("deepspeed_config"), command.starts.get("deepspeed", "")
    if switch is None and path is None:
        raise ConfigError("--deepspeed: names no file; use --deepspeed-config FILE")
    if switch and path not in (None, switch):
        raise ConfigError(f"--deepspeed {switch}, --deepspeed-config {path}: name two files; keep one")
    path = path or switch or None
    defaults, known = command.starts.get("defaults"), megatron_settings.NAMES
    if defaults is not None and defaults not in known:
        raise ConfigError(f"--defaults {defaults}: not one of {', '.join(known)}{suggestion(defaults, known)}")
    if defaults == "megatron" and path is not None:
        raise ConfigError(
            f"--defaults {defaults}, --deepspeed-config {path}: what the file leaves out has DeepSpeed's meaning;"
            " keep one"
        )
    of_file, notes_of_file = deepspeed.settings_of(path, command.preset, command.above_preset, world_size)
    places = {fields[flag]: typed for flag, typed in translated.sources.items()}
    sources = [
        Source(command.preset),
        of_file,
        Source(command.file),
        Source(command.flags, places, explicit=True),
    ]
    settings = cli.merged(sources, command, filled_in)
    closed = megatron_settings.closed_by(command.preset, folder=settings.from_folder)
    of_defaults: tuple[str, ...] = ()
    if defaults == "megatron":
        settings.values, of_defaults = megatron_settings.taken(settings.values, closed)
    elif defaults is None and translated.notes:  # flags that Megatron-LM alone has: it is one of its commands
        of_defaults = megatron_settings.note_of_open(settings.values, closed)
    values, ignored = megatron_settings.as_megatron_reads(settings.values)
    settings.change(values)
    return settings.run([*translated.notes, *of_defaults, *ignored, *notes_of_file])


@lru_cache(maxsize=1)
def parser() -> Parser:
    """Return the parser of our flags, with those that name another program's file or defaults."""
    own = cli.build_parser()
    own.usage = "%(prog)s [--preset NAME] [--deepspeed-config FILE] [--config FILE] [flags]"
    own.epilog = (
        "Flags win over --config, --config over --deepspeed-config, that over --preset, and that over"
        " --defaults. The word `none` unsets a flag that has no default."
    )
    start = next(group for group in own._action_groups if group.title == cli.START)
    start.add_argument(
        "--defaults",
        metavar="{" + ",".join(megatron_settings.NAMES) + "}",
        help="whose defaults fill what nothing else sets (default: ours; others: docs/reference/megatron_defaults.md)",
    )
    start.add_argument(
        "--deepspeed-config",
        "--deepspeed_config",
        metavar="FILE",
        help="a DeepSpeed configuration (JSON); the run says at its start what is taken and what is not",
    )
    start.add_argument(
        "--deepspeed", metavar="FILE", nargs="?", help="the same; ignored without FILE if --deepspeed-config is given"
    )
    return own
