"""`megatron-moe slurm`: write, and with `--submit` submit, the script of a Slurm job that goes on by itself.

    megatron-moe slurm --nodes 2 --time 4:00:00 --script a.sbatch -- --preset tiny --mock-data --save runs/a/checkpoints

The words after `--` are the flags of the training. They are checked for the world size that the job has, as `--dry-run`
does, before anything is written; what is in a container, such as the data, is not looked at. Exit status: 0, 2 for a
mistake, sbatch's if it refuses the job.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from megatron_moe import pretrain
from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.paths import require_on_disk
from megatron_moe.io.program import DONE, note, run_program, say
from megatron_moe_tools.preflight import cli as preflight
from megatron_moe_tools.pretrain import parse

NAME = "megatron-moe slurm"
LOGIC = Path(__file__).parent / "launch" / "slurm.sh"
"""What follows the variables in every script."""
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_HOURS = re.compile(r"(?:(\d+):)?(\d+):(\d+)|(\d+)")
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_PASSED = ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "dependency")
"""sbatch's options that are passed on as they are."""
_ANSWERED = {
    "--array": "its jobs would all write to one --save; write a script for each, with a --save of its own",
    "--ntasks": "Slurm starts one task a node; ranks are --nproc-per-node",
    "--ntasks-per-node": "Slurm starts one task a node; ranks are --nproc-per-node",
    "--gres": "GPUs of a node are --gpus-per-node",
    "--signal": "the script sets it, by --save-seconds",
    "--requeue": "the script sets it",
    "--wrap": "the training's flags follow --",
}
"""Options of sbatch that are not here -> what to do."""
_LEAST = {
    "nodes": 1, "nproc_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "save_seconds": 1, "max_restarts": 0,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the words before `--`."""
    p = Parser(
        prog=NAME, description="Write a Slurm job: options, then --, then the training's flags.", allow_abbrev=False
    )
    p.add_argument("--nodes", type=int, default=1, help="(default: 1)")
    p.add_argument("--nproc-per-node", type=int, help="ranks per node; the GPUs of a node by default, or 1")
    p.add_argument("--gpus-per-node", type=int, default=0, help="(default: 0)")
    p.add_argument("--cpus-per-task", type=int, help="cores of a node, which its ranks share")
    p.add_argument("--cpu-bind", default="", help="as srun takes it; the cluster's default otherwise")
    p.add_argument(
        "--numa-binding", choices=("node", "socket", "exclusive", "core-complex"), default="",
        help="as torchrun takes it: each rank on cores near its GPU",
    )  # fmt: skip
    p.add_argument("--time", required=True, help="limit, as sbatch takes it, such as 24:00:00")
    p.add_argument("--job-name", default="moe", help="(default: moe)")
    for name in _PASSED:
        p.add_argument(f"--{name}", help="as sbatch takes it")
    p.add_argument("--exclusive", action="store_true", help="as sbatch takes it")
    p.add_argument("--output", help="the log, as sbatch takes it (default: %%x-%%j.log in the run's folder)")
    p.add_argument(
        "--save-seconds", type=int, default=300,
        help="longest time that a step and a checkpoint take; asked for that and 60 s before the limit (default: 300)",
    )  # fmt: skip
    p.add_argument(
        "--max-restarts", type=int, default=5,
        help="attempts in a row without a newer checkpoint, after which the job fails (default: 5)",
    )  # fmt: skip
    p.add_argument("--no-preflight", action="store_true", help="leave out the checks of nodes and network")
    p.add_argument("--preflight-flags", default="", help="the preflight's own, in one word, such as '--across 40'")
    p.add_argument("--container", choices=("pyxis", "apptainer"), default="", help="what starts the ranks in --image")
    p.add_argument("--image", default="", help="of the container")
    p.add_argument("--mounts", nargs="+", default=(), help="its folders besides the current one and the run's")
    p.add_argument(
        "--env", nargs="+", default=(), metavar="NAME=VALUE",
        help="variables of the ranks, such as NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 GLOO_SOCKET_IFNAME=eth0",
    )  # fmt: skip
    p.add_argument("--script", help="the file to write; stdout by default, job.sbatch in the run's folder to submit")
    p.add_argument("--submit", action="store_true", help="submit the script")
    return p


def main(argv: list[str]) -> int:
    """Write the script, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    own, others = parser().parse_known_args(argv[:at])
    if others:
        flag = others[0].partition("=")[0]
        if flag in _ANSWERED:
            raise ConfigError(f"{others[0]}: {_ANSWERED[flag]}")
        works = suggestion(flag, parser()._option_string_actions)
        works = works or "; the training's flags follow --, as in: --time 1:00:00 -- --preset tiny --mock-data"
        raise ConfigError(f"{others[0]}: is no option of the job{works}")
    flags = argv[at + 1 :]
    if not flags:
        raise ConfigError(
            "the training's flags are missing; write them after --, as in: --time 1:00:00 -- --preset tiny --mock-data"
        )
    own.nproc_per_node = own.nproc_per_node or own.gpus_per_node or 1
    _check(own)
    world_size = own.nodes * own.nproc_per_node
    # The flags are completed by what a job that goes on needs.
    if "--exit-signal-handler" not in flags:
        flags.append("--exit-signal-handler")
    checkpoint = parse(flags, world_size).checkpoint
    if not checkpoint.save:
        raise ConfigError("--save: is missing; the job goes on from its checkpoints, e.g. --save runs/a/checkpoints")
    require_on_disk("--save", checkpoint.save)
    if not checkpoint.load:
        flags += ["--load", checkpoint.save]
    elsewhere = [*flags, "--dry-run"]  # the job runs on other machines, which may have packages that this one lacks
    if own.container:  # which has the files that the flags name: only what needs no file is checked
        rules.check(parse(elsewhere, world_size), world_size)
    elif (run := pretrain.checked(elsewhere, world_size, None, parse)) is None:
        raise ConfigError("the flags ask for a table or a list, which needs no job; use megatron-moe train")
    else:
        for missing in rules.missing_packages(run, world_size):
            note(f"not on this machine, and the job needs it: {missing}")
    folder = Path(checkpoint.save).parent
    script = script_text(own, argv, flags, folder, checkpoint.save)
    path = own.script or (str(folder / "job.sbatch") if own.submit else None)
    if path is None:
        say(script.rstrip("\n"))
        return DONE
    folder.mkdir(parents=True, exist_ok=True)  # Slurm writes the log there, and does not make it
    Path(path).write_text(script, encoding="utf-8")
    note(f"{NAME}: wrote {path}; sbatch {path} starts it, its log is {own.output or folder / '%x-%j.log'}")
    return subprocess.run(["sbatch", path]).returncode if own.submit else DONE


def _check(own: argparse.Namespace) -> None:
    """Refuse options of the job that are wrong, or contradict one another."""
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
        raise ConfigError(f"--numa-binding {own.numa_binding}: goes by GPUs; add --gpus-per-node, or use --cpu-bind")
    if bool(own.container) != bool(own.image):
        raise ConfigError("--container and --image: one is given without the other; give both, or none")
    if own.mounts and not own.container:
        raise ConfigError(f"--mounts {' '.join(own.mounts)}: are a container's; add --container and --image")
    if own.no_preflight and own.preflight_flags:
        raise ConfigError(f"--preflight-flags {own.preflight_flags!r}, --no-preflight: give one of them")
    preflight.parser().parse_args(_words(own.preflight_flags))
    for setting in own.env:
        if not _SETTING.fullmatch(setting):
            raise ConfigError(f"--env {setting}: is not NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
    seconds = _seconds(own.time)
    if seconds <= _warning(own):
        raise ConfigError(
            f"--time {own.time}, --save-seconds {own.save_seconds}: leave no time to train, for the ranks are asked to "
            f"save {_warning(own)} s before the end; raise --time above that, or lower --save-seconds"
        )
    if own.submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not on PATH; use --script FILE, and submit that on the cluster")


def _words(typed: str) -> list[str]:
    try:
        return shlex.split(typed)
    except ValueError as error:
        raise ConfigError(f"--preflight-flags {typed!r}: {error}; e.g. '--across 40'") from None


def _seconds(limit: str) -> float:
    """Return the seconds of a time limit in one of sbatch's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or none."""
    if limit.upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return math.inf
    if found := _DAYS.fullmatch(limit):
        days, hours, minutes, seconds = map(int, found.groups("0"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if found := _HOURS.fullmatch(limit):
        hours, minutes, seconds, alone = map(int, found.groups("0"))
        return (hours * 60 + minutes + alone) * 60 + seconds
    raise ConfigError(
        f"--time {limit}: is no limit as sbatch takes it; e.g. 24:00:00, 90 (minutes), 2-12 (days-hours), UNLIMITED"
    )


def _warning(own: argparse.Namespace) -> int:
    """Seconds before the limit at which Slurm warns: a step, a checkpoint, and the time to requeue."""
    return int(own.save_seconds) + 60


def script_text(own: argparse.Namespace, argv: list[str], flags: list[str], folder: Path, save: str) -> str:
    """Return the script of the job that the options describe, for a run in `folder` with checkpoints in `save`.

    Raises:
        ConfigError: an option of sbatch's has a backslash, which sbatch does not read in a script as a shell does.
    """
    options = {"job-name": own.job_name, "nodes": str(own.nodes), "ntasks-per-node": "1", "time": own.time}
    if own.gpus_per_node:
        options["gpus-per-node"] = str(own.gpus_per_node)
    if own.cpus_per_task:
        options["cpus-per-task"] = str(own.cpus_per_task)
    for name in _PASSED:
        if (value := getattr(own, name)) is not None:
            options[name] = value
    if own.exclusive:
        options["exclusive"] = ""
    log = own.output or f"{folder}/%x-%j.log".replace("%", "%%").replace("%%x-%%j", "%x-%j")
    options |= {"signal": f"B:USR1@{_warning(own)}", "requeue": "", "open-mode": "append", "output": log}
    # No word has a line break: the command line's parser refuses it.
    lines = ["#!/usr/bin/env bash", f"# Written by: megatron-moe slurm {shlex.join(argv)}"]
    for name, value in options.items():
        if "\\" in value:
            raise ConfigError(
                f"--{name} {value}: has a backslash, which sbatch reads in its own way; use a name without one"
            )
        lines.append(f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}")
    lines.append("set -uo pipefail")
    threads = max(1, (own.cpus_per_task or own.nproc_per_node) // own.nproc_per_node)
    settings = {"OMP_NUM_THREADS": str(threads), **dict(setting.split("=", 1) for setting in own.env)}
    for name, value in settings.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    values = {
        "RUN": str(folder),
        "SAVE": save,
        "PROCESSES": str(own.nproc_per_node),
        "MAX_RESTARTS": str(own.max_restarts),
        "SAVE_SECONDS": str(own.save_seconds),
        "CPU_BIND": own.cpu_bind,
        "NUMA_BINDING": own.numa_binding,
        "PREFLIGHT": "" if own.no_preflight else "yes",
        "CONTAINER": own.container,
        "IMAGE": own.image,
        "MOUNTS": ",".join(own.mounts),
        "EXCLUDE": own.exclude or "",
    }
    for name, value in values.items():
        lines.append(f"{name}={shlex.quote(value)}")
    lines += [f"PREFLIGHT_FLAGS=({shlex.join(_words(own.preflight_flags))})", f"FLAGS=({shlex.join(flags)})", ""]
    return "\n".join(lines) + "\n" + LOGIC.read_text(encoding="utf-8")
