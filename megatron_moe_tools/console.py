"""`megatron-moe COMMAND ...`, which is also `python -m megatron_moe COMMAND ...`: every program of the package by name.

Several ranks: `train` and `evaluate` start them themselves, the others by `torchrun ... -m megatron_moe COMMAND ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import megatron_moe
from megatron_moe.config.command_line import started_as
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.io.program import DONE, USER_ERROR, note, run_program, say

NAME = "megatron-moe"

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("megatron_moe_tools.train:main", "train a model; with torchrun's options on several ranks"),
    "slurm": ("megatron_moe_tools.slurm:main", "write, and submit, a Slurm job that saves, ends and goes on by itself"),
    "kubernetes": ("megatron_moe_tools.kubernetes:main", "write a JobSet of Kubernetes that goes on by itself"),
    "skypilot": ("megatron_moe_tools.skypilot:main", "write a managed job of SkyPilot that goes on by itself"),
    "prepare": ("megatron_moe_tools.prepare.preprocess:main", "tokenize text into indexed datasets"),
    "merge": ("megatron_moe_tools.prepare.merge:main", "join indexed datasets into one"),
    "convert": ("megatron_moe_tools.convert.cli:main", "convert checkpoints from and to Hugging Face and Megatron-LM"),
    "evaluate": ("megatron_moe_tools.evaluate:main", "evaluate a step on validation sets and lm-eval's tasks"),
    "generate": ("megatron_moe_tools.generate:main", "continue a prompt with a checkpoint"),
    "inspect": ("megatron_moe_tools.inspect:main", "list, verify, compare and prune checkpoints"),
    "plan": ("megatron_moe_tools.plan.cli:main", "compute memory, traffic and speed of a layout"),
    "doctor": ("megatron_moe_tools.doctor.cli:main", "check that a model trains the same under every layout"),
    "preflight": ("megatron_moe_tools.preflight.cli:main", "check a node or a job before a long run"),
    "verify-resume": ("megatron_moe_tools.verify_resume:main", "replay recorded steps from a checkpoint"),
    "audit": ("megatron_moe_tools.audit.cli:main", "report every cast and promotion of one step"),
    "trace": ("megatron_moe_tools.trace:main", "write what a checkpoint computes on given tokens"),
    "routes": ("megatron_moe_tools.routes:main", "convert routes of vLLM, SGLang and Megatron-LM, and back"),
    "report": ("megatron_moe_tools.report.cli:main", "write one HTML page of runs: charts, findings, flags, events"),
    "profile": ("megatron_moe_tools.profile_step:main", "show where the time of a step goes"),
    "flags": ("megatron_moe_tools.compat.flags:main", "say what becomes of a Megatron-LM flag or script"),
}
"""Command -> the function that takes its arguments and returns the exit status, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument, by default of this process, names, and return its exit status."""
    return run_program(NAME, _main, list(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    if not argv:
        note(_help())
        return USER_ERROR
    command, *rest = argv
    if command in ("--help", "-h"):
        say(_help())
        return DONE
    if command == "--version":
        say(f"{NAME} {megatron_moe.__version__}")
        return DONE
    if command not in COMMANDS:
        hint = suggestion(command, [*COMMANDS, "--help", "--version"])
        raise ConfigError(f"{command}: is no command{hint or f'; {NAME} --help lists them'}")
    module, _, function = COMMANDS[command][0].partition(":")
    with started_as(f"{NAME} {command}"):
        status: int = getattr(import_module(module), function)(rest)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"usage: {NAME} COMMAND [options], --help or --version; {NAME} COMMAND --help shows the options", ""]
    for name, (_, what) in COMMANDS.items():
        lines.append(f"  {name:{width}}  {what}")
    lines += ["", f"start: {NAME} train --preset tiny --mock-data --vocab-size 1000 --train-iters 20"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
