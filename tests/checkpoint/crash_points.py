"""Kill or refuse a save at every system call that matters, one after the other, and see what is left.

Each trial is a fork of the process that forks ranks (helpers/ranks.py), so that it costs a second. The run stops right
before the save in question, strace attaches, and from then on system calls are counted: the N-th `rename` is the same
one in every trial. Linux, and strace where it may attach.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_moe.checkpoint import folder, manifest
from tests.helpers import beside, object_store
from tests.helpers.kills import steps_in
from tests.helpers.ranks import Child, RankParent
from tests.helpers.trained_steps import SMALL, trained

CALLS = ("mkdir", "openat", "write", "fsync", "rename", "link", "unlink", "unlinkat", "rmdir")
KILLED = -signal.SIGKILL
REFUSED = 3
"""Exit status of a run that ended with SaveError."""

RUN = {**SMALL, "train_iters": 6, "save_interval": 2}


class Fault(NamedTuple):
    """What strace does at the N-th call of a kind: `signal=KILL`, `error=EIO`."""

    call: str
    number: int
    what: str = "signal=KILL"

    def __str__(self) -> str:
        return f"{self.what} at {self.call} {self.number}"


class Trials:
    """Runs of one rank, which may save to an object store. Use as a context manager."""

    def __init__(self, parent: RankParent, store: object_store.ObjectStore | None = None) -> None:
        self._parent, self._store = parent, store
        self._folder = Path(tempfile.mkdtemp(prefix="crash-points-"))
        self._runs = 0
        self._said = ""

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        flags: dict[str, Any],
        *,
        stop_at: int | None = None,
        fault: Fault | object_store.Fault | None = None,
        file_limit: int | None = None,
    ) -> int:
        """A run's exit status, negative for a signal.

        Args:
            stop_at: end behind the save of this step.
            fault: inject it in that save.
            file_limit: bytes that a file may have in that save, as with `ulimit -f`.
        """
        if isinstance(fault, Fault):
            inject = ["-e", f"inject={fault.call}:{fault.what}:when={fault.number}"]
            return self._run(flags, stop_at, inject, file_limit)[0]
        return self._run(flags, stop_at, [], file_limit, fault)[0]

    def calls(self, flags: dict[str, Any], stop_at: int) -> dict[str, int]:
        """How many calls of each kind the save of step `stop_at` makes, in the thread that makes most of them."""
        status, trace = self._run(flags, stop_at, ["-e", f"trace={','.join(CALLS)}"], None)
        assert status == 0, self.output()
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for line in trace.splitlines():
            thread, _, call = line.partition(" ")
            counts[call.strip().partition("(")[0]][thread] += 1
        return {call: max(counts[call].values()) for call in CALLS if counts[call]}

    def output(self) -> str:
        """The end of what the last run has printed."""
        return self._said[-3000:]

    def _run(
        self,
        flags: dict[str, Any],
        stop_at: int | None,
        tracing: list[str],
        file_limit: int | None,
        request: object_store.Fault | None = None,
    ) -> tuple[int, str]:
        self._runs += 1
        here = self._folder / str(self._runs)
        here.mkdir()
        for name in ("said", "ready", "go"):  # what is said is no file: its size would be limited with the others'
            os.mkfifo(here / name)
        heard: list[str] = []
        listener = threading.Thread(target=lambda: heard.append((here / "said").read_text(errors="replace")))
        listener.start()
        ready, go = os.open(here / "ready", os.O_RDONLY | os.O_NONBLOCK), os.open(here / "go", os.O_RDWR)
        spec = {"flags": {**RUN, **flags}, "stop_at": stop_at, "file_limit": file_limit, "folder": str(here)}
        environment = {} if self._store is None else self._store.environment
        child = Child("tests.checkpoint.crash_points:run", spec, str(here / "said"), environment=environment)
        (pid,) = self._parent.fork([child])
        while not select.select([ready], [], [], 0.2)[0] and self._parent.statuses([pid]) == [None]:
            continue
        tracer = None
        if os.read(ready, 1) and tracing:
            tracer, answer = _tracer(pid, "-f", "-o", str(here / "trace"), *tracing)
            assert "attached" in answer, answer
        if self._store is not None and stop_at is not None:
            self._store.arm(request, pid)
        os.write(go, b"g")
        (status,) = self._parent.statuses([pid], 240)
        assert status is not None, "the run does not end"
        if self._store is not None:
            self._store.disarm()
        listener.join(600)
        (self._said,) = heard
        if tracer is not None:
            tracer.communicate(timeout=600)
        os.close(ready)
        os.close(go)
        return status, (here / "trace").read_text() if tracer is not None else ""


def _tracer(pid: int, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """strace on a process, and the first line that it says."""
    tracer = subprocess.Popen(["strace", *flags, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    return tracer, tracer.stderr.readline()


def strace_is_missing() -> str | None:
    """Why system calls cannot be traced here; None if they can. strace is installed first where that is possible."""
    if shutil.which("strace") is None and (reason := _cannot_be_installed()):
        return reason
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        tracer, line = _tracer(sleeper.pid)
        tracer.terminate()
        tracer.communicate()
        return None if "attached" in line else f"strace may not attach here: {line.strip()}"
    finally:
        sleeper.kill()
        sleeper.wait()


def _cannot_be_installed() -> str | None:
    """Install strace from Debian's packages; why that is not possible, or None."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "strace is not installed; `apt-get install strace`, as root, installs it"
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "strace"]):
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=600, check=False)
    return None if done.returncode == 0 else f"strace cannot be installed: {done.stderr.strip()[-300:]}"


def what_is_wrong(root: Path, at_least: int | None) -> list[str]:
    """What a crash may not leave: no sound step from `at_least` on, or a pointer to one that is not whole."""
    wrong = steps_in(root)[1]
    newest = max(folder.steps(root), default=None)
    if at_least is not None and (newest is None or newest < at_least):
        wrong.append(f"the newest step is {newest}, not {at_least} or later")
    return wrong


def trial(
    trials: Trials, root: Path, flags: dict[str, Any], stop_at: int, fault: Fault | object_store.Fault
) -> list[str]:
    """One crash or refusal while step `stop_at` is saved; what is wrong with what is left and with the run after it."""
    flags = {**flags, "save": str(root)}
    before = stop_at - RUN["save_interval"] or None
    status = trials.run(flags, stop_at=stop_at, fault=fault)
    if status not in (0, KILLED, REFUSED):
        return [f"{fault}: status {status}\n{trials.output()}"]
    wrong = what_is_wrong(root, stop_at if status == 0 else before)
    if status == REFUSED and list(root.glob(".iter_*")):
        wrong.append("a refused step was not cleared away")
    status = trials.run({**flags, "load": str(root)})
    if status != 0:
        wrong.append(f"the run after it ended with {status}\n{trials.output()}")
    return [f"{fault}: {words}" for words in wrong + what_is_wrong(root, RUN["train_iters"])]


def content(root: Path, number: int) -> dict[str, str]:
    """Hashes of what a step holds of the training: tensors, plain values, random states."""
    files = manifest.read(folder.step_folder(root, number)).files
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".distcp", ".pt", ".safetensors"))}


# ---- in the fork


def run(spec: dict[str, Any]) -> int:
    """A run that waits before the save of `stop_at` until it is told to go on."""
    import resource

    from megatron_moe.checkpoint.errors import SaveError
    from megatron_moe.checkpoint.save import Saver

    if spec["flags"].get("save", "").startswith("s3:"):
        beside.find_them()
    sys.dont_write_bytecode = True  # byte code is written with a rename of its own, once
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    ready, go = (os.open(f"{spec['folder']}/{name}", how) for name, how in (("ready", os.O_WRONLY), ("go", os.O_RDWR)))
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: anybody may attach
    save = Saver.save

    def at_the_save(self: Saver, trained: Any, progress: Any, facts: Any) -> bool:
        if progress.iteration != spec["stop_at"]:
            return save(self, trained, progress, facts)
        self.finish()  # an earlier save in the background is not the one in question
        os.write(ready, b"r")
        os.read(go, 1)
        if spec["file_limit"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (spec["file_limit"], spec["file_limit"]))
        save(self, trained, progress, facts)
        self.finish()
        sys.stdout.flush()
        os._exit(0 if self.error is None else REFUSED)

    Saver.save = at_the_save  # type: ignore[method-assign]
    try:
        trained(spec["flags"])
    except SaveError:
        traceback.print_exc()
        return REFUSED
    return 0
