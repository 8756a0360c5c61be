"""The command line of the report: one or several runs as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_writable_file
from megatron_moe.io.program import DONE, run_program, say
from megatron_moe.io.texts import listed, size_text
from megatron_moe_tools.report.page import run_name, write_page
from megatron_moe_tools.report.run_state import RunState

NAME = "megatron-moe report"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Write one page with the charts and facts of runs, side by side.",
        allow_abbrev=False,
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="a folder with metrics.jsonl, or the file of --metrics-file")
    p.add_argument(
        "--output", metavar="FILE", help="page to write; default: report.html next to the first run's metrics"
    )
    p.add_argument(
        "--expert-layer",
        type=int,
        metavar="L",
        help="also draw the load of each expert of this layer over time; layers count from 1, as in the log",
    )
    return p


def main(argv: list[str]) -> int:
    """Write the page as the flags say.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status: 0, 2 for a wrong flag or input (one line on stderr), or 130 after Ctrl-C.
    """
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    files = list(map(_metrics_file, flags.runs))
    if flags.output is None:
        flags.output = str(files[0].with_name("report.html"))
    require_writable_file("--output", flags.output)
    output = Path(flags.output)
    states, names, steps = [], [], []
    for given, file in zip(flags.runs, files):
        if output.resolve() == file.resolve():
            raise ConfigError(f"--output {output}: this is the run's metrics file; name a file of its own")
        state = RunState(file, flags.expert_layer)
        state.update()
        counted = state.loads.layers
        if flags.expert_layer is not None and flags.expert_layer not in counted:
            layers = listed(counted, 10) or "none"
            raise ConfigError(f"--expert-layer {flags.expert_layer}: {file} has loads of these layers: {layers}")
        if not state.count and state.bad_lines:
            raise ConfigError(f"RUN {given}: {file} has no line of metrics; name the file of --metrics-file")
        states.append(state)
        names.append(run_name(file))
        steps.append(f"{state.count:,} steps")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_page(output, states, names)
    say(f"wrote {output} ({size_text(output.stat().st_size)}): {', '.join(steps)}")
    return DONE


def _metrics_file(given: str) -> Path:
    path = Path(given)
    file, hint = path, "is not there"
    if path.is_dir():
        file, hint = path / "metrics.jsonl", "has no metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"RUN {given}: {hint}; give a folder with metrics.jsonl, or the file of --metrics-file")
    return file
