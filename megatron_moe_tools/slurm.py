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
from megatron_moe.config.paths import require_on_disk
from megatron_moe.io.program import DONE, note, run_program, say
from megatron_moe_tools.launch import jobs
from megatron_moe_tools.preflight import cli as preflight
from megatron_moe_tools.pretrain import parse

NAME = "megatron-moe slurm"
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_HOURS = re.compile(r"(?:(\d+):)?(\d+):(\d+)|(\d+)")
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


def parser() -> Parser:
    """Return the parser of the words before `--`."""
    p = jobs.parser(NAME, "Write a Slurm job")
    p.add_argument("--cpu-bind", default="", help="as srun takes it; the cluster's default otherwise")
    p.add_argument("--time", required=True, help="limit, as sbatch takes it, such as 24:00:00")
    for name in _PASSED:
        p.add_argument(f"--{name}", help="as sbatch takes it")
    p.add_argument("--exclusive", action="store_true", help="as sbatch takes it")
    p.add_argument("--output", help="the log, as sbatch takes it (default: %%x-%%j.log in the run's folder)")
    p.add_argument("--container", choices=("pyxis", "apptainer"), default="", help="what starts the ranks in --image")
    p.add_argument("--image", default="", help="of the container")
    p.add_argument("--mounts", nargs="+", default=(), help="its folders besides the current one and the run's")
    p.add_argument("--script", help="the file to write; stdout by default, job.sbatch in the run's folder to submit")
    p.add_argument("--submit", action="store_true", help="submit the script")
    return p


def main(argv: list[str]) -> int:
    """Write the script, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    own, flags = jobs.split(parser(), argv, _ANSWERED, "--time 1:00:00")
    _check(own)
    world_size = own.nodes * own.nproc_per_node
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
    jobs.check(own)
    if bool(own.container) != bool(own.image):
        raise ConfigError("--container and --image: one is given without the other; give both, or none")
    if own.mounts and not own.container:
        raise ConfigError(f"--mounts {' '.join(own.mounts)}: are a container's; add --container and --image")
    preflight.parser().parse_args(jobs.words(own.preflight_flags))
    seconds = _seconds(own.time)
    if seconds <= _warning(own):
        raise ConfigError(
            f"--time {own.time}, --save-seconds {own.save_seconds}: leave no time to train, for the ranks are asked to "
            f"save {_warning(own)} s before the end; raise --time above that, or lower --save-seconds"
        )
    if own.submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not on PATH; use --script FILE, and submit that on the cluster")


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
    return "\n".join([*lines, *jobs.beginning(own, values, flags)]) + jobs.logic("slurm.sh")
