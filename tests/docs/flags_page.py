"""Write or check docs/flags.md: python -m tests.docs.flags_page [--check]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_moe.config.command_line import entries
from megatron_moe_tools import compat

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"


def help_page(parser: argparse.ArgumentParser) -> str:
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


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with the schema; return 0, 1 where it is not current, 2 for a wrong argument."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m tests.docs.flags_page [--check]", file=sys.stderr)
        return 2
    new = help_page(compat.parser())
    if not arguments:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    print("docs/flags.md is not that of the schema; run: python -m tests.docs.flags_page", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
