"""One job writes one folder of checkpoints: a lock with a heartbeat, taken over where its holder is dead. No torch.

The lock is `.writer.lock`: JSON that says who holds it; its modification time is the heartbeat. A holder on this host
is asked for by process number and start time, which needs no clock. A holder on another host, or in another container,
is taken for dead where the same job was requeued since, or after `STALE_MINUTES` without a heartbeat. The times are
the file system's own: clocks of hosts may differ or go back.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import sync, write_bytes

NAME = ".writer.lock"
HEARTBEAT_SECONDS = 15.0
STALE_MINUTES = 5.0
RIVALS_SECONDS = 2.0
"""On a file system without locks: how far apart two jobs may take one lock over at once."""


@dataclass(frozen=True)
class Holder:
    """Who writes: the process, where its number means something, and the batch job it belongs to.

    started: the process's start, in clock ticks since the boot `boot`. namespace: of process numbers. job, restarts:
    Slurm's number of the job and how often it was requeued.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    job: str | None
    restarts: int
    token: str

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class LostLockError(OSError):
    """The folder is not ours to write any more."""


class WriterLock:
    """The lock of one folder, held from `acquire` to `release`; a thread keeps its heart beating."""

    def __init__(self, root: Path, me: Holder) -> None:
        self._path = root / NAME
        self._me = me
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="writer lock", daemon=True)
        self._heart.start()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release()

    def check(self) -> None:
        """Before anything in the folder is changed.

        Raises:
            LostLockError: somebody else writes there now, or the folder is gone.
        """
        holder = _read(self._path)
        if holder is None and not self._path.parent.is_dir():
            raise LostLockError(f"{self._path.parent} is gone: it was moved or deleted while this job ran")
        if holder is None:
            raise LostLockError(f"{self._path} is gone: somebody removed it, and another job may write there")
        if holder.token != self._me.token:
            raise LostLockError(f"{self._path.parent} was taken over by {holder}")

    def is_held(self) -> bool:
        """Whether the folder is still ours to write."""
        holder = _read(self._path)
        return holder is not None and holder.token == self._me.token

    def release(self) -> None:
        """Stop the heart and remove the lock, if it is ours still."""
        self._stop.set()
        self._heart.join()
        if self.is_held():
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if self.is_held():
                    os.utime(self._path)
            except OSError:  # gone, or the file system is away for a while: `check` tells before the next save
                continue


def acquire(root: Path) -> tuple[WriterLock, list[str]]:
    """Hold the lock of a folder that is there. Returns it and what to tell, such as a lock taken over.

    Raises:
        ConfigError: another job writes there. OSError: the folder cannot be written.
    """
    path, me, notes = root / NAME, _me(), []
    while not _link(path, me):
        holder = _read(path)
        why = _why_dead(path, holder, me)
        if why is None and path.exists():
            raise ConfigError(_occupied(root, holder))
        if why is None or not _take_over(path, holder, me):
            continue  # released, or another job was faster: look who holds it now
        notes.append(f"took over {path} of {holder or 'an unknown job'}: {why}")
        break
    return WriterLock(root, me), notes


def _occupied(root: Path, holder: Holder | None) -> str:
    return (
        f"--save {root}: another job writes there: {holder or 'an unknown one'}; save to another folder, or end that "
        f"job first. If it is dead, its lock lapses {STALE_MINUTES:g} minutes after its last sign of life; "
        f"`rm {root / NAME}` does without waiting"
    )


def _why_dead(path: Path, holder: Holder | None, me: Holder) -> str | None:
    """How we know that the holder of a lock is dead; None if it may be alive."""
    if holder is not None:
        if holder.host == me.host and holder.boot != me.boot:
            return "the host was started again since"
        if (holder.host, holder.namespace) == (me.host, me.namespace):
            alive = _started(holder.pid) == holder.started
            return None if alive else "that process is dead"
        if holder.job is not None and holder.job == me.job and holder.restarts < me.restarts:
            return "the same job was requeued since"
    silent = _silent_minutes(path)
    if silent is not None and silent >= STALE_MINUTES:
        return f"no sign of life for {silent:.0f} minutes"
    return None


def _silent_minutes(path: Path) -> float | None:
    """Minutes since the last heartbeat, by the clock of the file system; None where it cannot be told."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
            return (os.stat(now.name).st_mtime - os.stat(path).st_mtime) / 60
    except OSError:
        return None


@contextmanager
def _written(path: Path, me: Holder) -> Iterator[Path]:
    """Our lock beside the real one, on the disk; gone at the end if it has not become the real one."""
    aside = path.with_name(f"{NAME}.{me.token}")
    try:
        write_bytes(aside, f"{json.dumps(asdict(me))}\n".encode())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def _link(path: Path, me: Holder) -> bool:
    """Put our lock there unless one is; a link is atomic on network file systems too."""
    with _written(path, me) as aside:
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        sync(path.parent)
        return True


def _take_over(path: Path, holder: Holder | None, me: Holder) -> bool:
    """Put our lock in the place of a dead job's, which is there all the time; False where another was faster.

    Rivals wait for each other at the dead lock itself, which the system releases when one of them dies. Where a file
    system cannot do that, the last one has it, and after a moment the others see so.
    """
    with _written(path, me) as aside:
        try:
            with open(path, "r+") as dead:
                alone = _lock(dead.fileno())
                if _read(path) != holder:
                    return False
                os.rename(aside, path)
        except FileNotFoundError:
            return False
        sync(path.parent)
        if not alone:
            time.sleep(RIVALS_SECONDS)
        return _read(path) == me


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _read(path: Path) -> Holder | None:
    """What a lock says; None where there is none or it cannot be understood."""
    try:
        values = json.loads(path.read_text())
        return Holder(**{field.name: values[field.name] for field in fields(Holder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _me() -> Holder:
    pid = os.getpid()
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    requeued = int(restarts) if restarts.isdigit() else 0
    return Holder(socket.gethostname(), _boot(), _namespace(), pid, _started(pid) or 0, job, requeued, uuid.uuid4().hex)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: a host is then known by its name alone
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; 0 where only its life can be told, None if it is dead."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _lives(pid)
    state, *rest = content.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _lives(pid: int) -> int | None:
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
