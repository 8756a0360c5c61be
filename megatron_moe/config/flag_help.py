"""The help of the flags: about thirty lines, or all flags, a group, or one flag; and the page docs/flags.md of all."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_moe.config import megatron_flags
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.launch import SCRIPT, rank_that_prints

EXAMPLES = (
    ("try it", "train --preset tiny --mock-data --vocab-size 1000 --train-iters 20"),
    (
        "own text, in two steps",
        "prepare --input text.jsonl --output-prefix data/mine --tokenizer-type ByteTokenizer --append-eod",
        "train --preset demo --data-path data/mine_text_document --tokenizer-type ByteTokenizer "
        "--train-iters 200 --save runs/a --load runs/a --save-interval 50",
    ),
    (
        "a downloaded model, on 8 GPUs",
        "train --nproc-per-node 8 --load-hf models/DeepSeek-V2-Lite --bf16 --expert-model-parallel-size 8 ...",
    ),
)
MOST_USED = (
    "preset config data_path mock_data tokenizer_type tokenizer_model seq_length micro_batch_size global_batch_size "
    "train_iters lr bf16 tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size save load "
    "save_interval metrics_file"
).split()
_COLUMN = 40


@dataclass(frozen=True)
class Entry:
    """The help of one flag. flags: its spellings, `--x` before `--no-x`. values: as they are typed. text: its meaning.

    group: the section of the schema, or `start from`. dest: the field, or the name of a flag that is none.
    """

    dest: str
    group: str
    flags: tuple[str, ...]
    values: str
    text: str

    @property
    def typed(self) -> str:
        """The flags with their value, `--x, --no-x` or `--lr X`."""
        return f"{', '.join(self.flags)} {self.values}".rstrip()


def entries(parser: argparse.ArgumentParser) -> list[Entry]:
    """Return an entry for each setting of the parser of the flags, in the order of its groups."""
    found: dict[str, Entry] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            known = found.get(action.dest)
            if known is not None:  # the opposite of a switch
                flags = (*known.flags, *action.option_strings)
                found[action.dest] = Entry(known.dest, known.group, flags, known.values, known.text)
            elif not isinstance(action, argparse._HelpAction):
                values = "" if action.nargs == 0 else str(action.metavar)
                values += " ..." if action.nargs == "+" else ""
                text = (action.help or "").replace("%%", "%")
                found[action.dest] = Entry(action.dest, str(group.title), tuple(action.option_strings), values, text)
    return list(found.values())


def answer(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print the help and leave with status 0 where the command line asks for it, on the rank that prints.

    Raises:
        ConfigError: the word after `--help` is neither `all`, a group nor a flag.
        SystemExit: the help was asked for.
    """
    place = next((i for i, word in enumerate(argv) if word in ("-h", "--help")), None)
    if place is None:
        return
    shown = short(parser) if place + 1 == len(argv) else about(argv[place + 1], parser)
    if rank_that_prints() == 0:
        try:
            print(shown, flush=True)
        except BrokenPipeError:  # `--help all | head`; Python would flush once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def short(parser: argparse.ArgumentParser) -> str:
    """Return the help that fits a terminal: examples, the flags that are used most, and where the others are."""
    every = {entry.dest: entry for entry in entries(parser)}
    starters = f"Several ranks: megatron-moe train with torchrun's options, or torchrun {SCRIPT}."
    lines = [parser.format_usage().strip(), "", f"{parser.description} {starters}"]
    for title, *commands in EXAMPLES:
        lines.append(f"  {title}:")
        lines += [f"    megatron-moe {command}" for command in commands]
    width = _width()
    lines.append("")
    for name in MOST_USED:
        entry = every[name]
        left = f"  {entry.flags[0]} {'' if len(entry.values) > 20 else entry.values}".rstrip()
        lines.append(textwrap.shorten(entry.text, width - _COLUMN, placeholder=" ..."))
        lines[-1] = f"{left:<{_COLUMN}}{lines[-1]}"
    groups = ", ".join(dict.fromkeys(entry.group for entry in every.values() if entry.group != "start from"))
    lines += [
        "",
        f"--help GROUP for all flags of {groups};",
        "--help FLAG for one, also for Megatron-LM's; --help all;",
    ]
    return "\n".join([*lines, "docs/flags.md has the same as a page."])


def about(topic: str, parser: argparse.ArgumentParser) -> str:
    """Return the help on `all`, on a group of flags, or on a flag, with or without its dashes.

    Raises:
        ConfigError: it is none of these.
    """
    every = entries(parser)
    groups = list(dict.fromkeys(entry.group for entry in every))
    if topic == "all":
        usage = parser.format_usage().strip()
        return "\n\n".join([usage, *(_group(every, group) for group in groups), str(parser.epilog)])
    flag = "--" + topic.lstrip("-").partition("=")[0].replace("_", "-")
    if not topic.startswith("-") and topic in groups:
        return _group(every, topic)
    for entry in every:
        if flag in entry.flags:
            return "\n".join([f"{entry.typed}    [{entry.group}]", *_wrapped(entry.text, "  ")])
    rows = megatron_flags.table().get(flag)
    if rows is None:
        known = [*groups, *(flag for entry in every for flag in entry.flags), *megatron_flags.table()]
        near = suggestion(topic, known) or suggestion(flag, known)
        raise ConfigError(f"--help {topic}: is no flag and none of all, {', '.join(groups)}{near}")
    return "\n".join(line for row in rows for line in _of_megatron(row))


def _of_megatron(row: megatron_flags.Answer) -> Iterator[str]:
    values = f" {' '.join(row.values)}" if row.values else ""
    whose = "no flag here" if row.answer == "unknown" else f"Megatron-LM's, here {row.answer}"
    use = f"; use {row.target}" if row.target else ""
    yield f"{row.flag}{values}    [{whose}{use}]"
    if row.reason:
        yield from _wrapped(row.reason, "  ")


def _group(every: Sequence[Entry], group: str) -> str:
    lines = [f"{group}:"]
    for entry in every:
        if entry.group == group:
            left = f"  {entry.typed}"
            text = _wrapped(entry.text, " " * _COLUMN)
            if len(left) + 2 <= _COLUMN:
                text[0] = left.ljust(_COLUMN) + text[0].lstrip()
            else:
                lines.append(left)
            lines += text
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=indent) or [indent]


def _width() -> int:
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 130))


def page(parser: argparse.ArgumentParser) -> str:
    """Return docs/flags.md: every flag with its values, default and meaning."""
    every = entries(parser)
    lines = [
        "# Flags",
        "",
        "Every flag of `pretrain_moe.py`, and so each key of a `--config` file (without the dashes). Written by",
        "`python -m tests.docs.flags_page` from the schema in `megatron_moe/config/`; `make check` compares.",
        "Megatron-LM's other flags: `megatron-moe flags FLAG`, or `megatron-moe train --help FLAG`.",
    ]
    for group in dict.fromkeys(entry.group for entry in every):
        lines += ["", f"## {group}", "", "| flag | meaning |", "|---|---|"]
        for entry in every:
            if entry.group == group:
                cells = [f"`{entry.typed}`", entry.text]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
