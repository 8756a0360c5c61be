"""`megatron-moe slurm`: write, and with `--submit` submit, the script of a Slurm job that goes on by itself.

    megatron-moe slurm --nodes 2 --time 04:00:00 --output job.sbatch -- --preset tiny --mock-data --save runs/a/checkpoints

What stands behind `--` are the flags of the training. They are checked for the world size that the job has, as
`--dry-run` does, before anything is written. Exit status: 0, 2 for a mistake, sbatch's if it refuses the job.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_moe import pretrain
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.io.program import DONE, note, run_program, say
from megatron_moe.launch.slurm_script import Job, text

NAME = "megatron-moe slurm"
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_PASSED = ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem", "dependency", "array")
"""sbatch's options that are passed on as they are."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before `--`."""
    p = Parser(prog=NAME, description="Write a Slurm job: options, then --, then the training's flags.", allow_abbrev=False)
    p.add_argument("--nodes", type=int, default=1)
    p.add_argument("--nproc-per-node", type=int, default=None, help="ranks per node; the GPUs of a node, or 1")
    p.add_argument("--gpus-per-node", type=int, default=0)
    p.add_argument("--cpus-per-task", type=int, default=None, help="cores of a node that its ranks share")
    p.add_argument("--cpu-bind", default="", help="as srun takes it; Slurm's default otherwise")
    p.add_argument("--time", required=True, help="limit, as sbatch takes it, such as 24:00:00")
    p.add_argument("--job-name", default="moe")
    for name in _PASSED:
        p.add_argument(f"--{name}", default=None, help="as sbatch takes it")
    p.add_argument("--exclusive", action="store_true")
    p.add_argument("--save-seconds", type=int, default=300, help="longest time that a checkpoint may take")
    p.add_argument("--max-restarts", type=int, default=5, help="attempts in a row without a newer checkpoint, after the first")
    p.add_argument("--no-preflight", action="store_true", help="leave out the checks of nodes and network")
    p.add_argument("--container", choices=("pyxis", "apptainer"), default="")
    p.add_argument("--image", default="", help="of the container")
    p.add_argument("--mounts", nargs="+", default=(), help="folders of the container besides the current one")
    p.add_argument("--nccl-socket-ifname", default=None, help="the network that NCCL meets over, such as eth0")
    p.add_argument("--nccl-ib-hca", default=None, help="the InfiniBand adapters that NCCL uses, such as mlx5")
    p.add_argument("--output", default=None, help="the script; stdout by default")
    p.add_argument("--submit", action="store_true", help="submit it; its script is job.sbatch in the run's folder by default")
    return p


def main(argv: list[str]) -> int:
    """Write the script, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    own = parser().parse_args(argv[:at])
    flags = list(argv[at + 1 :])
    if not flags:
        raise ConfigError("the training's flags are missing; write them behind --, as in: --nodes 2 --time 1:00:00 -- --preset tiny")
    processes = own.nproc_per_node or own.gpus_per_node or 1
    _check(own, processes)
    run = _checked(flags, own.nodes * processes)
    script = text(_job(own, argv, flags, run, processes))
    folder = _folder(run)
    path = own.output or (str(folder / "job.sbatch") if own.submit else None)
    if path is None:
        say(script.rstrip("\n"))
        return DONE
    folder.mkdir(parents=True, exist_ok=True)  # Slurm writes the log there, and does not make it
    Path(path).write_text(script, encoding="utf-8")
    note(f"{NAME}: wrote {path}; its log will be in {folder}")
    return subprocess.run(["sbatch", path]).returncode if own.submit else DONE


def _check(own: argparse.Namespace, processes: int) -> None:
    """Refuse options of the job that are wrong, or contradict one another."""
    for name, least in (("nodes", 1), ("save_seconds", 1), ("max_restarts", 0), ("gpus_per_node", 0)):
        if getattr(own, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(own, name)}: is below {least}")
    for name in ("nproc_per_node", "cpus_per_task"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(own, name)}: is below 1")
    if own.gpus_per_node and processes > own.gpus_per_node:
        raise ConfigError(f"--nproc-per-node {processes}: each rank needs one of --gpus-per-node {own.gpus_per_node}")
    if bool(own.container) != bool(own.image):
        raise ConfigError("--container and --image: one is given without the other; give both, or none")
    if own.mounts and not own.container:
        raise ConfigError("--mounts: needs --container")
    seconds = _seconds(own.time)
    if seconds <= _warning(own):
        raise ConfigError(
            f"--time {own.time}: leaves no time to train, for a save is asked for {_warning(own)} s before the end; "
            "raise it, or lower --save-seconds"
        )
    if own.submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not on PATH; write the script with --output, and submit it on the cluster")


def _seconds(limit: str) -> int:
    """Return the seconds of a time limit in one of sbatch's forms."""
    found = _TIME.fullmatch(limit)
    if found is None:
        raise ConfigError(f"--time {limit}: is no limit as sbatch takes it; e.g. 24:00:00, 90 (minutes), 2-12 (days, hours)")
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:  # days-hours:minutes:seconds, hours:minutes:seconds
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 60 + second  # minutes:seconds


def _warning(own: argparse.Namespace) -> int:
    """Seconds before the limit at which Slurm warns: a step, a checkpoint, and what Slurm is late by."""
    return int(own.save_seconds) + 60


def _checked(flags: list[str], world_size: int) -> Run:
    """Complete the flags in place by what a job that goes on needs, and return the run."""
    if "--exit-signal-handler" not in flags:
        flags.append("--exit-signal-handler")
    run = pretrain.checked(flags, world_size, None)
    if run is None:
        raise ConfigError("the flags ask for a table or a list, which needs no job; use megatron-moe train")
    if not run.checkpoint.save:
        raise ConfigError("--save: is missing; the job goes on from its checkpoints, e.g. --save runs/a/checkpoints")
    if not run.checkpoint.load:
        flags += ["--load", run.checkpoint.save]
        run = pretrain.checked(flags, world_size, None) or run
    return run


def _folder(run: Run) -> Path:
    """The run's folder, which has the one with its checkpoints in it."""
    return Path(str(run.checkpoint.save)).parent


def _job(own: argparse.Namespace, argv: list[str], flags: list[str], run: Run, processes: int) -> Job:
    folder = _folder(run)
    options = {"job-name": own.job_name, "nodes": str(own.nodes), "ntasks-per-node": "1", "time": own.time}
    if own.gpus_per_node:
        options["gpus-per-node"] = str(own.gpus_per_node)
    if own.cpus_per_task:
        options["cpus-per-task"] = str(own.cpus_per_task)
    options |= {name: getattr(own, name) for name in _PASSED if getattr(own, name) is not None}
    if own.exclusive:
        options["exclusive"] = ""
    options |= {
        "signal": f"B:USR1@{_warning(own)}", "requeue": "", "open-mode": "append",
        "output": str(folder / "%x-%j.log"),
    }  # fmt: skip
    settings = {"OMP_NUM_THREADS": str(max(1, (own.cpus_per_task or processes) // processes))}
    for name in ("nccl_socket_ifname", "nccl_ib_hca"):
        if getattr(own, name):
            settings[name.upper()] = getattr(own, name)
    return Job(
        command=argv, options=options, run=str(folder), save=str(run.checkpoint.save), processes=processes,
        max_restarts=own.max_restarts, save_seconds=own.save_seconds, cpu_bind=own.cpu_bind, flags=flags,
        preflight=None if own.no_preflight else [], container=own.container, image=own.image, mounts=own.mounts,
        settings=settings,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
