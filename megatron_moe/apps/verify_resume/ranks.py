"""A run on gloo ranks of this machine that this process starts, waits for and never leaves behind.

As a module it is one of those ranks: `python -m megatron_moe.apps.verify_resume.ranks TASK.json RANK`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_moe
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, flatten

_PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
_USER_ERROR = 2
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05


class ReplayFailure(Exception):
    """A rank failed or did not end. The message holds what the first one said last."""


def records_of(run: Run, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Train `run` on `ranks` processes of this machine, without a GPU; the exact record of every step.

    Raises:
        ConfigError: the run was refused, as pretrain_moe.py would have refused it.
        RankFailure: a rank failed otherwise, or the run took longer than `seconds`; all ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        place = Path(name)
        task = {"flags": flatten(run), "ranks": ranks, "seconds": seconds, "folder": name}
        (place / "task.json").write_text(json.dumps(task))
        processes = [_start(place, rank, ranks) for rank in range(ranks)]
        try:
            _wait(processes, place, seconds)
        finally:
            _end(processes)
        return json.loads((place / "records.json").read_text())


def _start(place: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with open(place / f"rank{rank}.log", "wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "megatron_moe.apps.verify_resume.ranks",
                str(place / "task.json"),
                str(rank),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that it ends with all that it started, and Ctrl-C is this process's alone
        )


def _wait(processes: list[subprocess.Popen[bytes]], place: Path, seconds: float) -> None:
    deadline, failed = time.monotonic() + seconds, dict[int, int]()
    while True:
        states = [process.poll() for process in processes]
        for rank, status in enumerate(states):
            if status and rank not in failed:
                if not failed:  # its peers see closed connections, and have nothing to add
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                failed[rank] = status
        if all(status is not None for status in states):
            break
        if time.monotonic() > deadline:
            waiting = [rank for rank, status in enumerate(states) if status is None]
            if not failed:
                raise ReplayFailure(
                    f"ranks {waiting} did not end within {seconds:g} s; the last of rank {waiting[0]}:\n"
                    + _last(place, waiting[0])
                )
            break
        time.sleep(_POLL_SECONDS)
    if not failed:
        return
    refusal = place / "refused.txt"
    if _USER_ERROR in failed.values() and refusal.is_file():
        raise ConfigError(refusal.read_text())
    rank = next(iter(failed))
    raise ReplayFailure(f"rank {rank} of {len(processes)} ended with status {failed[rank]}:\n{_last(place, rank)}")


def _last(place: Path, rank: int) -> str:
    return (place / f"rank{rank}.log").read_text(errors="replace")[-3000:].strip() or "(it printed nothing)"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()


# ---- in a rank


def _serve(task: dict[str, Any], rank: int) -> int:
    import torch.distributed as dist

    from megatron_moe.training.run import recorded

    place = Path(task["folder"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(place / "store"), task["ranks"]),
        rank=rank,
        world_size=task["ranks"],
        timeout=timedelta(seconds=task["seconds"]),
    )
    try:
        records = recorded(build(task["flags"]))
    except ConfigError as error:
        if rank == 0:
            (place / "refused.txt").write_text(str(error))
        return _USER_ERROR
    if rank == 0:
        (place / "records.json").write_text(json.dumps(records))
    return 0


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(_serve(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
