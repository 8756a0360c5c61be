"""What the commands that write jobs share: their options, the checks of these, and the beginning of their scripts."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.schema import Run
from megatron_moe.io.program import DONE, note, say

FOLDER = Path(__file__).parent
EXHAUSTED, AGAIN = 3, 75
"""Exit statuses of a pod: the budget is spent; the job is to be started again (sysexits' EX_TEMPFAIL)."""
RESTARTS_OF_CLUSTER = 1000
"""So often a cluster may start a job again: our budget ends it before, unless its script cannot run at all."""
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_LEAST = {
    "nodes": 1, "nproc_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "save_seconds": 1, "max_restarts": 0,
}  # fmt: skip


def parser(name: str, what: str) -> Parser:
    """Return a parser of the words before `--` that has the options of every job."""
    p = Parser(prog=name, description=f"{what}: options, then --, then the training's flags.", allow_abbrev=False)
    p.add_argument("--nodes", type=int, default=1, help="(default: 1)")
    p.add_argument("--nproc-per-node", type=int, help="ranks per node; the GPUs of a node by default, or 1")
    p.add_argument("--gpus-per-node", type=int, default=0, help="(default: 0)")
    p.add_argument("--cpus-per-task", type=int, help="cores of a node, which its ranks share")
    p.add_argument(
        "--numa-binding", choices=("node", "socket", "exclusive", "core-complex"), default="",
        help="as torchrun takes it: each rank on cores near its GPU",
    )  # fmt: skip
    p.add_argument("--job-name", default="moe", help="(default: moe)")
    p.add_argument(
        "--save-seconds", type=int, default=300,
        help="longest time that a step and a checkpoint take, for which a job that has to end waits (default: 300)",
    )  # fmt: skip
    p.add_argument(
        "--max-restarts", type=int, default=5,
        help="attempts in a row without a newer checkpoint, after which the job fails (default: 5)",
    )  # fmt: skip
    p.add_argument("--no-preflight", action="store_true", help="leave out the checks of nodes and network")
    p.add_argument("--preflight-flags", default="", help="the preflight's own, in one word, such as '--across 40'")
    p.add_argument(
        "--env", nargs="+", default=(), metavar="NAME=VALUE",
        help="variables of the ranks, such as NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 GLOO_SOCKET_IFNAME=eth0",
    )  # fmt: skip
    return p


def add_pod_options(p: Parser, mounts: str) -> None:
    """Add the options of a job that runs in containers; `mounts` explains its shared folders."""
    p.add_argument("--image", default="", help="of the container, with this package")
    p.add_argument("--mounts", nargs="+", default=(), metavar="WHAT:FOLDER", help=mounts)
    p.add_argument("--script", help="the file to write; stdout by default")


def split(p: Parser, argv: Sequence[str], answered: Mapping[str, str], example: str) -> tuple[argparse.Namespace, list]:
    """Return the options and the training's flags of a command line, and count the ranks of a node.

    Args:
        answered: options of other programs -> what to do instead.
        example: options that work.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    own, others = p.parse_known_args(argv[:at])
    works = f"the training's flags follow --, as in: {example} -- --preset tiny --mock-data"
    if others:
        flag = others[0].partition("=")[0]
        if flag in answered:
            raise ConfigError(f"{others[0]}: {answered[flag]}")
        meant = suggestion(flag, p._option_string_actions)
        raise ConfigError(f"{others[0]}: is no option of the job{meant or f'; {works}'}")
    flags = list(argv[at + 1 :])
    if not flags:
        raise ConfigError(f"no training is given; {works}")
    own.nproc_per_node = own.nproc_per_node or own.gpus_per_node or 1
    # The flags are completed by what a job that goes on needs.
    if "--exit-signal-handler" not in flags:
        flags.append("--exit-signal-handler")
    return own, flags


def check(own: argparse.Namespace) -> None:
    """Refuse options of every job that are wrong, or contradict one another."""
    for name, least in _LEAST.items():
        value = getattr(own, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: is below {least}; e.g. {max(least, 1)}")
    if own.gpus_per_node and own.nproc_per_node > own.gpus_per_node:
        raise ConfigError(
            f"--nproc-per-node {own.nproc_per_node}, --gpus-per-node {own.gpus_per_node}: each rank needs a GPU; "
            f"use --nproc-per-node {own.gpus_per_node}"
        )
    if own.numa_binding and not own.gpus_per_node:
        raise ConfigError(f"--numa-binding {own.numa_binding}: goes by GPUs; add --gpus-per-node, or leave it out")
    if own.no_preflight and own.preflight_flags:
        raise ConfigError(f"--preflight-flags {own.preflight_flags!r}, --no-preflight: give one of them")
    for setting in own.env:
        if not _SETTING.fullmatch(setting):
            raise ConfigError(f"--env {setting}: is not NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")


def check_pod(own: argparse.Namespace) -> dict[str, str]:
    """Refuse options of a job in containers that are wrong, and return its shared folders: folder -> what is there."""
    check(own)
    if not _NAME.fullmatch(own.job_name):
        raise ConfigError(
            f"--job-name {own.job_name}: is no name of a host (at most 40 of a-z, 0-9 and -, from a letter on, no - at "
            "the end); e.g. moe-1"
        )
    folders = {}
    for mount in own.mounts:
        what, _, folder = mount.rpartition(":")
        if not what or not folder.startswith("/") or len(folder) == 1:
            raise ConfigError(f"--mounts {mount}: is not WHAT:FOLDER with a folder from / on, such as runs:/runs")
        if folder in folders:
            raise ConfigError(f"--mounts {mount}: {folder} is given twice; keep one")
        folders[folder] = what
    return folders


def _shared(save: str | None, folders: Mapping[str, str]) -> str:
    """Return the folder of the checkpoints; its parent, the run's folder, has to be one that all pods see."""
    example = "--mounts runs:/runs ... -- --save /runs/a/checkpoints"
    if not save:
        raise ConfigError(f"--save: is missing; the job goes on from its checkpoints, e.g. {example}")
    run = Path(save).parent
    for folder in folders:
        if run.is_relative_to(folder) and ".." not in run.parts:
            return save
    raise ConfigError(
        f"--save {save}: its parent lies in no folder of --mounts, and the next pod would not find it; e.g. {example}"
    )


def checked(
    own: argparse.Namespace, flags: Sequence[str], folders: Mapping[str, str], parse: Callable[[list[str], int], Run]
) -> tuple[str, list[str]]:
    """Check the training's flags for the ranks of a job in containers.

    Returns:
        The folder of the checkpoints, and the flags with `--load`, by which the next attempt goes on.
    """
    world_size = own.nodes * own.nproc_per_node
    checkpoint = parse([*flags], world_size).checkpoint
    save = _shared(checkpoint.save, folders)
    completed = [*flags] if checkpoint.load else [*flags, "--load", save]
    # What is in an image is not looked for here.
    rules.check(parse([*completed, "--dry-run"], world_size), world_size)
    return save, completed


def words(typed: str) -> list[str]:
    """Return the words of `--preflight-flags`."""
    try:
        return shlex.split(typed)
    except ValueError as error:
        raise ConfigError(f"--preflight-flags {typed!r}: {error}; e.g. '--across 40'") from None


def beginning(own: argparse.Namespace, values: Mapping[str, str], flags: Sequence[str]) -> list[str]:
    """Return the lines of a script that set the variables of its ranks and its own."""
    lines = ["set -uo pipefail"]
    threads = max(1, (own.cpus_per_task or own.nproc_per_node) // own.nproc_per_node)
    settings = {"OMP_NUM_THREADS": str(threads), **dict(setting.split("=", 1) for setting in own.env)}
    for name, value in settings.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    for name, value in values.items():
        lines.append(f"{name}={shlex.quote(value)}")
    return [*lines, f"PREFLIGHT_FLAGS=({shlex.join(words(own.preflight_flags))})", f"FLAGS=({shlex.join(flags)})", ""]


def logic(name: str) -> str:
    """Return what follows the variables: the functions of the budget, and a script of this folder."""
    return "\n" + "".join((FOLDER / part).read_text(encoding="utf-8") for part in ("budget.sh", name))


def pod_script(own: argparse.Namespace, save: str, flags: Sequence[str], found: Mapping[str, str]) -> str:
    """Return the script of a pod; `found` has the variables that the cluster gives, as the shell reads them."""
    values = {
        "NODES": str(own.nodes),
        "PORT": "29400",
        "RUN": str(Path(save).parent),
        "SAVE": save,
        "PROCESSES": str(own.nproc_per_node),
        "MAX_RESTARTS": str(own.max_restarts),
        "NUMA_BINDING": own.numa_binding,
        "PREFLIGHT": "" if own.no_preflight else "yes",
        "EXHAUSTED": str(EXHAUSTED),
        "AGAIN": str(AGAIN),
    }
    lines = ["#!/usr/bin/env bash", *beginning(own, values, flags)[:-1]]
    for name, value in found.items():
        lines.append(f"{name}={value}")
    return "\n".join([*lines, ""]) + logic("pod.sh")


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def write_yaml(name: str, argv: Sequence[str], script: str | None, starts: str, *documents: dict[str, Any]) -> int:
    """Write a file of these documents, or print it, and return the exit status; `starts` is the command for it."""
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=2**20, allow_unicode=True)
    text = f"# Written by: {name} {shlex.join(argv)}\n{text}"
    if script is None:
        say(text.rstrip("\n"))
    else:
        Path(script).write_text(text, encoding="utf-8")
        note(f"{name}: wrote {script}; {starts} {script} starts it")
    return DONE
