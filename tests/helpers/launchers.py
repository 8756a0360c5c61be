"""Two ways to start the ranks of a job, for tests that kill them.

`Torchrun` is what users have; a start costs seconds, for every rank imports torch and the engine. `Forked` forks ranks
from one process that has imported both: real processes of their own that run `pretrain_moe.main`, meet by gloo's TCP
store and are killed by SIGKILL, at a tenth of the cost.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.ranks import ROOT, Child, RankParent, alive, rank_environment


class Torchrun:
    """torch.distributed.run in a session of its own, with further variables in its environment."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes]  # once started

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        """Start `pretrain_moe.py` with `argv` in `folder` on that many ranks."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "pretrain_moe.py"), *argv,
        ]  # fmt: skip
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env={**rank_environment(), **self._variables}, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def ranks(self) -> list[int]:
        """Process ids of the ranks that were started last."""
        listing = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []

    def wait(self, seconds: float) -> int | None:
        """The job's exit status, or None where it goes on after that many seconds."""
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, rank: int | None) -> None:
        """SIGKILL to one rank, or to all and what launched them. Returns when no process is left."""
        ranks = self.ranks()
        is_one = rank is not None and rank < len(ranks)
        for pid in [ranks[rank]] if is_one else [self._process.pid, *ranks]:  # ranks may be in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._until_gone(ranks)

    def stop(self, how: signal.Signals) -> None:
        """Send a signal to what launched the ranks. Returns when no process is left."""
        ranks = self.ranks()
        self._process.send_signal(how)
        self._until_gone(ranks)

    def _until_gone(self, ranks: list[int]) -> None:
        status = self.wait(600)
        assert status is not None, "torchrun did not end within ten minutes of a signal or a rank's death"
        deadline = time.monotonic() + 600
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() < deadline, f"ranks outlived torchrun: {ranks}"
            time.sleep(0.02)


class Forked:
    """Ranks forked from one process that has imported torch, the engine and the trainer already.

    Args:
        parent: the process that forks them.
        target: what a rank runs with the job's flags, "module:function".
    """

    def __init__(self, parent: RankParent, target: str = "pretrain_moe:main") -> None:
        self._parent, self._target = parent, target
        self._ranks: list[int] = []
        self._store: Any = None

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        from torch.distributed import TCPStore

        # As torchrun's ranks meet in its agent's store: a port that was free a moment ago may be another process's.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._fork(argv, world_size, folder, log, self._store.port, TORCHELASTIC_USE_AGENT_STORE="True")

    def ranks(self) -> list[int]:
        return self._ranks

    def wait(self, seconds: float) -> int | None:
        """Return as torchrun does: when one rank fails the others are ended."""
        statuses = self._parent.statuses(self._ranks, seconds)
        if all(status == 0 for status in statuses):
            return 0
        if all(status in (None, 0) for status in statuses):
            return None
        self._end()
        return 1

    def kill(self, rank: int | None) -> None:
        doomed = self._ranks if rank is None else [self._ranks[rank]]
        # One that has ended was waited for, and its id may be another process's; nobody waits for the others meanwhile.
        for pid in set(doomed) & set(self._left(0.0)):
            os.kill(pid, signal.SIGKILL)
        self._end()

    def _fork(self, argv: list[str], world_size: int, folder: Path, log: Path, port: int, **more: str) -> None:
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **more,
        }
        self._ranks = self._parent.fork([
            Child(self._target, argv, str(log), str(folder), {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared})
            for rank in range(world_size)
        ])  # fmt: skip

    def _end(self) -> None:
        """What torchrun does to the ranks that are left: SIGTERM, and SIGKILL if that does not help."""
        if rank_left := self._left(0.0):
            for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
                for pid in rank_left:
                    os.kill(pid, number)
                if not (rank_left := self._left(seconds)):
                    return
        assert not self._left(0.0), "ranks that SIGKILL does not end"

    def _left(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while True:
            statuses = self._parent.statuses(self._ranks, 0.05)
            left = [pid for pid, status in zip(self._ranks, statuses) if status is None]
            if not left or time.monotonic() >= deadline:
                return left


Launcher = Torchrun | Forked
