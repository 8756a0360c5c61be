"""What a run is, its id, attempts, command, flags, machine and versions, in a file next to its metrics; its summary.

metrics.run.json is written when a run starts, so that a run that was killed is known as well as one that ended. A start
from iteration 0 is a new run with an id of its own; a start from a later one is the next attempt of the same run.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.launch import launched_world, local_world_size
from megatron_moe.config.schema import Run, flatten
from megatron_moe.io import launched
from megatron_moe.io.files import replace_json
from megatron_moe.io.source_version import source_version
from megatron_moe.report.records import StepRecord
from megatron_moe.report.sink import Sink

_PACKAGES = ("megatron-core", "torch", "transformer-engine", "numpy", "sentencepiece", "tokenizers")
_GIT_SECONDS = 5.0

FINISHED = "finished"
"""The ending of an attempt that has done its work; docs/reference/metrics.md has others."""


def versions(*more: str) -> dict[str, str]:
    """Return name -> version of Python, this package and the others that a run's numbers depend on, and of `more`."""
    found = {"python": platform.python_version(), **source_version()}
    for name in (*_PACKAGES, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def info_path(metrics_file: Path) -> Path:
    """Return the file about the run: metrics.run.json for metrics.jsonl."""
    return metrics_file.with_name(f"{metrics_file.stem}.run.json")


def read_info(metrics_file: Path) -> dict[str, Any]:
    """Return what is kept about the run of a metrics file, if any; a ConfigError if it is something else."""
    path = info_path(metrics_file)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("run_id"), str):
        raise ConfigError(
            f"--metrics-file {metrics_file}: {path} says what its run is, and is not readable as that; "
            "move it away, and the run goes on as a new one"
        )
    return found


class RunInfo:
    """What a run is, by the keys of docs/reference/metrics.md, from start to end; `pretrain` makes one on rank 0.

    Args:
        start_iteration: the iteration that this attempt continues from; 0 for a new run.

    Raises:
        ConfigError: see `read_info`.
    """

    def __init__(self, run: Run, start_iteration: int) -> None:
        name = run.logging.metrics_file
        # A run that trains nothing is no attempt of the run that it evaluates.
        self._path = None if name is None or run.training.skip_train else info_path(Path(name))
        earlier = read_info(Path(name)) if name is not None and start_iteration else {}
        _, world_size = launched_world()
        this = {
            "attempt": int(earlier.get("attempt", 0)) + 1,
            "start_time": _now(),
            "start_iteration": start_iteration,
            "host": socket.gethostname(),
            "command": launched.command(),
        }
        flags, given = flatten(run), {}
        for field_name, field in all_fields().items():
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            if flags[field_name] != default:
                given[field_name] = flags[field_name]
        sizes = run.parallel
        self.values: dict[str, Any] = {
            "run_id": earlier.get("run_id") or secrets.token_hex(8),
            "attempt": this["attempt"],
            "start_time": earlier.get("start_time") or this["start_time"],
            "attempts": [*earlier.get("attempts", ()), this],
            "command": this["command"],
            "flags": given,
            "all_flags": flags,
            "host": this["host"],
            "ranks": world_size,
            "ranks_per_node": local_world_size(world_size),
            "layout": {
                "TP": sizes.tensor_model_parallel_size,
                "CP": sizes.context_parallel_size,
                "PP": sizes.pipeline_model_parallel_size,
                "DP": run.derived.data_parallel_size(world_size),
                "EP": sizes.expert_model_parallel_size,
                "ETP": run.derived.expert_tensor_parallel_size,
            },
            "data": {name: given[name] for name in vars(run.data) if name in given},
            "versions": versions(),
            "git": _git(),
            "facts": {},  # which come when it starts
        }

    def stamp(self) -> dict[str, Any]:
        """Return the keys of every line: `time` (now, UTC, ISO 8601 with milliseconds), `run_id` and `attempt`."""
        return {"time": _now(), "run_id": self.values["run_id"], "attempt": self.values["attempt"]}

    def start(self, facts: dict[str, Any]) -> None:
        """Add what is known when the first step begins."""
        self.values["facts"] = facts
        self.write()

    def end(self, ending: str, iteration: int) -> None:
        """Add how this attempt ended after so many iterations."""
        self.values["attempts"][-1].update(end_time=_now(), end_iteration=iteration, ending=ending)
        self.write()

    def write(self) -> None:
        """Write the file next to the metrics, atomically; nothing where the flags name no metrics."""
        if self._path is not None:
            replace_json(self._path, self.values)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@cache
def _git() -> dict[str, Any] | None:
    """Return the commit that the package is of; None where it is in no git checkout, or git is missing or slow."""
    here = Path(__file__)
    # An installed package may be in an environment inside of somebody else's checkout.
    if _git_says(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    status = _git_says(here.parent, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    heads = [line for line in status.splitlines() if line.startswith("# ")]
    commit = next((line.split()[-1] for line in heads if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": len(status.splitlines()) > len(heads)}


def _git_says(folder: Path, *words: str) -> str | None:
    """Return what git prints; it takes no lock of the checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Totals:
    """Steps, seconds and tokens of a run, over all its incarnations."""

    def __init__(self) -> None:
        self.iterations = 0
        self.seconds = 0.0
        self.tokens = 0

    def add(self, iteration: int, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.iterations = iteration
        self.seconds += seconds
        self.tokens += tokens

    def as_dict(self) -> dict[str, Any]:
        """Return `iterations`, `train_seconds` (without evaluation and saving) and the mean `tokens_per_second`."""
        rate = self.tokens / self.seconds if self.seconds > 0 else None
        return {"iterations": self.iterations, "train_seconds": self.seconds, "tokens_per_second": rate}


class SummarySink(Sink):
    """A sink that writes the summary to `path`: the run's results, over what the records say, and what the run is.

    The records say `iterations`, `train_seconds` and `tokens_per_second`. `totals` holds the steps of earlier
    incarnations, so that the summary of a resumed run covers all of them.
    """

    def __init__(self, path: Path, totals: Totals, info: RunInfo) -> None:
        self.artifact = path
        self._totals = totals
        self._info = info

    def step(self, record: StepRecord) -> None:
        self._totals.add(record.iteration, record.tokens, record.seconds)

    def close(self, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            assert self.artifact is not None
            self.artifact.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self.artifact, {**self._totals.as_dict(), **summary, **self._info.values})
