"""The command line of megatron-moe merge, with the flags of Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.program import DONE, run_program, say
from megatron_moe_tools.prepare.merge import merge

NAME = "megatron-moe merge"


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = Parser(
        prog=NAME,
        description="Join indexed datasets of one tokenizer into one: what preprocessing all of their inputs writes.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="a folder, whose datasets are taken in the order of their names, or prefixes, in the order given",
    )
    p.add_argument("--output-prefix", required=True, help="path of the files to write, without .bin and .idx")
    p.add_argument("--overwrite", action="store_true", help="replace files that exist")
    return p


def main(argv: list[str]) -> int:
    """Merge as the flags say.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status: 0, 1 for data that changed after it was written, 2 for a wrong flag or input (one line on
        stderr), or 130 after Ctrl-C.
    """
    return run_program(
        NAME,
        _main,
        argv,
        interrupted="interrupted; nothing was written",
        errors=(ConfigError, OSError),
        rank=0,
    )


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    index = merge(flags.input, flags.output_prefix, overwrite=flags.overwrite)
    say(f"{index.prefix}: {index.num_documents:,} documents, {index.num_tokens:,} tokens ({index.dtype})")
    return DONE
