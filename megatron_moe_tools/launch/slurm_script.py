"""The text of a Slurm job script: its options, what the launch logic of slurm.sh reads, and that logic itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_moe.config.errors import ConfigError

LOGIC = Path(__file__).with_name("slurm.sh")


@dataclass(frozen=True)
class Job:
    """What a script is written for.

    Attributes:
        command: the words that it is written by, for its head.
        options: sbatch's options, name -> value, empty for a switch.
        run, save: the run's folder and that of its checkpoints.
        processes: ranks per node.
        settings: environment variables of the ranks.
        save_seconds: how long a checkpoint may take.
        cpu_bind, numa_binding: as srun and torchrun take them, empty for their defaults.
        flags: of the training.
        preflight: the preflight's own flags, which the training's follow; None for no preflight.
        container: "", "pyxis" or "apptainer"; with its image and mounts.
    """

    command: Sequence[str]
    options: Mapping[str, str]
    run: str
    save: str
    processes: int
    max_restarts: int
    save_seconds: int
    cpu_bind: str
    numa_binding: str
    flags: Sequence[str]
    preflight: Sequence[str] | None
    container: str = ""
    image: str = ""
    mounts: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


def text(job: Job) -> str:
    """Return the script.

    Raises:
        ConfigError: an option of sbatch's has a backslash, which sbatch does not read in a script as a shell does.
    """
    # No word has a line break: the command line's parser refuses it.
    lines = ["#!/usr/bin/env bash", f"# Written by: megatron-moe slurm {shlex.join(job.command)}"]
    lines += [_option(name, value) for name, value in job.options.items()]
    lines.append("set -uo pipefail")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.settings.items()]
    values = {
        "RUN": job.run,
        "SAVE": job.save,
        "PROCESSES": str(job.processes),
        "MAX_RESTARTS": str(job.max_restarts),
        "SAVE_SECONDS": str(job.save_seconds),
        "CPU_BIND": job.cpu_bind,
        "NUMA_BINDING": job.numa_binding,
        "PREFLIGHT": "yes" if job.preflight is not None else "",
        "CONTAINER": job.container,
        "IMAGE": job.image,
        "MOUNTS": ",".join(job.mounts),
        "EXCLUDE": job.options.get("exclude", ""),
    }
    lines += [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines += [f"PREFLIGHT_FLAGS=({shlex.join(job.preflight or ())})", f"FLAGS=({shlex.join(job.flags)})", ""]
    return "\n".join(lines) + "\n" + LOGIC.read_text(encoding="utf-8")


def _option(name: str, value: str) -> str:
    if "\\" in value:
        raise ConfigError(
            f"--{name} {value}: has a backslash, which sbatch reads in its own way; use a name without one"
        )
    return f"#SBATCH --{name}{'=' + shlex.quote(value) if value else ''}"
