"""The writer lock of a checkpoint folder: one run writes there, by a lock file with a heartbeat. No torch.

The lock is `.writer.lock`: JSON that says who owns it; its modification time is the heartbeat. An owner on this host
is asked for by process number and start time, which needs no clock. An owner on another host, or in another container,
is taken for dead where the same job was requeued since, or after `STALE_MINUTES` without a heartbeat. The times are
the file system's own: clocks of hosts may differ or go back.

In an object store the lock is put on the condition that there is none, and each heartbeat puts it again. To take over
a dead one has no condition there: the last put counts, as on a file system without locks. And a job that lost its lock
while it writes a step may still put files into that of its successor, which has the same name: hashes show it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import sync, write_bytes
from megatron_moe.io.object_storage import ObjectPath, StoreError

NAME = ".writer.lock"
HEARTBEAT_SECONDS = 15.0
STALE_MINUTES = 5.0
RIVALS_SECONDS = 2.0
"""How long to wait, on a file system without locks, for another run that takes over the same lock."""


@dataclass(frozen=True)
class LockOwner:
    """The writer of a folder: its process, where the process number is valid, and its batch job.

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
    """The lock of the folder was lost: another run may write there."""


class WriterLock:
    """The lock of one folder, held from `acquire` to `release`; a thread renews its heartbeat."""

    def __init__(self, root: Path, me: LockOwner) -> None:
        self._path = root / NAME
        self._me = me
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="writer lock", daemon=True)
        self._heart.start()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise an error where the lock was lost; call it before anything in the folder is changed.

        Raises:
            LostLockError: somebody else writes there now, or the folder is gone.
        """
        owner = _read(self._path)
        if owner is None and not self._path.parent.is_dir():
            raise LostLockError(f"{self._path.parent} is gone: it was moved or deleted while this job ran")
        if owner is None:
            raise LostLockError(f"{self._path} is gone: somebody removed it, and another job may write there")
        if owner.token != self._me.token:
            raise LostLockError(f"{self._path.parent} was taken over by {owner}")

    def is_held(self) -> bool:
        """Return whether this process still holds the lock."""
        try:
            owner = _read(self._path)
        except StoreError:
            return False
        return owner is not None and owner.token == self._me.token

    def release(self) -> None:
        """Stop the heartbeat and remove the lock, if this process still holds it."""
        self._stop.set()
        self._heart.join()
        if self.is_held():
            self._path.unlink(missing_ok=True)

    def _renew(self) -> None:
        if isinstance(self._path, ObjectPath):
            self._path.write_bytes(_content(self._me))
        else:
            os.utime(self._path)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if self.is_held():
                    self._renew()
            except OSError:  # gone, or the file system is away for a while: `check` finds out before the next save
                continue


def acquire(root: Path) -> tuple[WriterLock, list[str]]:
    """Take the lock of a folder that exists; return it, and notes such as on a lock that was taken over.

    Raises:
        ConfigError: another job writes there. OSError: the folder cannot be written.
    """
    path, me, notes = root / NAME, _me(), []
    aside = path.with_name(f"{NAME}.{me.token}")  # our lock, next to the real one
    while True:
        try:
            write_bytes(aside, _content(me))
            with suppress(FileExistsError, FileNotFoundError):  # not found: who got the lock has removed our file
                if isinstance(path, ObjectPath):
                    path.create(_content(me))
                else:
                    os.link(aside, path)  # which is atomic on network file systems too
                sync(path.parent)
                break
            owner = _read(path)
            if owner == me:  # the store had put it and was asked again
                break
            why: str | None = None  # it is known that the owner is dead
            if owner is not None and owner.host == me.host and owner.boot != me.boot:
                why = "the host was started again since"
            elif owner is not None and (owner.host, owner.namespace) == (me.host, me.namespace):
                why = None if _started(owner.pid) == owner.started else "that process is dead"
            elif owner is not None and owner.job is not None and owner.job == me.job and owner.restarts < me.restarts:
                why = "the same job was requeued since"
            else:
                with suppress(OSError):  # one of the files is gone; both times are by the clock of the file system
                    silent_minutes = (aside.stat().st_mtime - path.stat().st_mtime) / 60
                    if silent_minutes >= STALE_MINUTES:
                        why = f"no sign of life for {silent_minutes:.0f} minutes"
            if why is None and path.exists():
                raise ConfigError(
                    f"--save {root}: another job writes there: {owner or 'an unknown one'}. Save to another folder, or "
                    f"end that job. If it is dead, remove {path}, or wait: its lock lapses {STALE_MINUTES:g} minutes "
                    "after its last sign of life"
                )
            if why is not None and _take_over(aside, path, owner, me):
                notes.append(f"took over {path} of {owner or 'an unknown job'}: {why}")
                break
        finally:
            aside.unlink(missing_ok=True)
        # The lock was released, or another job was faster: look who owns it now.
    for left in root.iterdir():  # by jobs that were killed there; a living one whose file this is tries again
        if left.name.startswith(f"{NAME}."):
            left.unlink(missing_ok=True)
    return WriterLock(root, me), notes


def _take_over(aside: Path, path: Path, owner: LockOwner | None, me: LockOwner) -> bool:
    """Replace a dead owner's lock by ours; return False where another run was faster.

    Runs that try this at once wait for each other on the dead lock's file, with a lock of the system's. Where the file
    system has none, the last one gets it, and the others see that after a moment.
    """
    if isinstance(path, ObjectPath):
        if _read(path) != owner:
            return False
        path.write_bytes(_content(me))
        time.sleep(RIVALS_SECONDS)
        return _read(path) == me
    alone = True
    try:
        with open(path, "r+") as dead:
            try:
                fcntl.flock(dead, fcntl.LOCK_EX)
            except OSError:
                alone = False
            if _read(path) != owner:
                return False
            os.rename(aside, path)
    except FileNotFoundError:
        return False
    sync(path.parent)
    if not alone:
        time.sleep(RIVALS_SECONDS)
    return _read(path) == me


def _content(owner: LockOwner) -> bytes:
    return f"{json.dumps(asdict(owner))}\n".encode()


def _read(path: Path) -> LockOwner | None:
    """Return the owner that a lock names; None where there is no lock or it cannot be understood.

    Raises:
        StoreError: the store failed.
    """
    try:
        values = json.loads(path.read_text())
        return LockOwner(**{field.name: values[field.name] for field in fields(LockOwner)})
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _me() -> LockOwner:
    pid = os.getpid()
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    requeued = int(restarts) if restarts.isdigit() else 0
    boot = namespace = ""
    with suppress(OSError):  # not Linux: a host is then known by its name alone
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return LockOwner(socket.gethostname(), boot, namespace, pid, _started(pid) or 0, job, requeued, uuid.uuid4().hex)


def _started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; 0 where that is unknown, None if it is dead."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return None
        with suppress(PermissionError):  # alive, and of another user
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return 0
    state, *rest = content.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
