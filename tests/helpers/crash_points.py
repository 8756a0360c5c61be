"""Kill or refuse a save at every system call that matters, one after the other, and see what is left.

A server process imports torch and the engine once and then forks a run for every trial, so that a trial costs a second.
The run stops right before the save in question, strace attaches, and from then on system calls are counted: the N-th
`rename` is the same one in every trial. Linux, and strace where it may attach.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("mkdir", "openat", "write", "fsync", "rename", "link", "unlink", "unlinkat", "rmdir")
KILLED = 128 + 9
_ENDED = "-- the run has ended\n"
REFUSED = 3
"""Exit status of a run that ended with SaveError."""

RUN = {
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "make_vocab_size_divisible_by": 64,
    "num_layers": 2,
    "moe_layer_freq": "[0]+[1]*1",
    "train_iters": 6,
    "eval_iters": 0,
    "save_interval": 2,
}


class Fault(NamedTuple):
    """What strace does at the N-th call of a kind: `signal=KILL`, `error=EIO`."""

    call: str
    number: int
    what: str = "signal=KILL"

    def __str__(self) -> str:
        return f"{self.what} at {self.call} {self.number}"


class Trials:
    """Runs, each a fork of one prepared process. Use as a context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="crash-points-"))
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # Byte code is written with a rename of its own, once.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        # Not a file: its size would be limited with that of the others.
        self._said: deque[str] = deque(maxlen=60)
        self._all_said = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()
        self._listener.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, flags: dict[str, Any], *, stop_at: int | None = None, fault: Fault | None = None,
            file_limit: int | None = None) -> int:  # fmt: skip
        """A run's exit status, as a shell has it.

        Args:
            stop_at: end behind the save of this step. fault: inject it in that save. file_limit: bytes that a file may
                have in that save, as with `ulimit -f`.
        """
        return self._run(flags, stop_at, [] if fault is None else ["-e", _injection(fault)], file_limit)[0]

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
        """The end of what the runs have printed."""
        return "".join(self._said.copy())[-3000:]

    def _listen(self) -> None:
        assert self._server.stderr is not None
        for line in self._server.stderr:
            if line == _ENDED:
                self._all_said.set()
            else:
                self._said.append(line)

    def _run(
        self, flags: dict[str, Any], stop_at: int | None, tracing: list[str], file_limit: int | None
    ) -> tuple[int, str]:
        trace = self._folder / "trace"
        pid = int(self._ask({"flags": {**RUN, **flags}, "stop_at": stop_at, "file_limit": file_limit}))
        tracer = None
        if stop_at is not None and self._ask("wait until ready") == "ready":
            if tracing:
                trace.unlink(missing_ok=True)
                tracer = subprocess.Popen(
                    ["strace", "-f", "-o", str(trace), *tracing, "-p", str(pid)], stderr=subprocess.PIPE, text=True
                )
                assert tracer.stderr is not None
                attached = tracer.stderr.readline()
                assert "attached" in attached, attached
            self._ask("go")
        self._all_said.clear()
        status = int(self._ask("wait until ended"))
        assert self._all_said.wait(20)
        if tracer is not None:
            tracer.wait(20)
            tracer.stderr.close()
        return status, trace.read_text() if trace.exists() else ""

    def _ask(self, what: Any) -> str:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(what) + "\n")
        answer = self._server.stdout.readline().strip()
        assert answer, self.output()
        return answer


def strace_is_missing() -> str | None:
    """Why system calls cannot be traced here; None if they can. strace is installed first where that is possible."""
    if shutil.which("strace") is None and (reason := _cannot_be_installed()):
        return reason
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        tracer = subprocess.Popen(["strace", "-p", str(sleeper.pid)], stderr=subprocess.PIPE, text=True)
        line = tracer.stderr.readline()
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
    from megatron_moe.checkpoint import folder, manifest

    def defect(number: int) -> str | None:
        step = folder.step_folder(root, number)
        return manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)

    wrong = [f"step {number}: {reason}" for number in folder.steps(root) if (reason := defect(number))]
    newest = max(folder.steps(root), default=None)
    if at_least is not None and (newest is None or newest < at_least):
        wrong.append(f"the newest step is {newest}, not {at_least} or later")
    pointer = root / folder.LATEST
    if pointer.exists():
        named = pointer.read_text().strip()
        if not named.isdigit() or int(named) not in folder.steps(root):
            wrong.append(f"the pointer names {named!r}, and there is no such step")
    return wrong


def trial(trials: Trials, root: Path, flags: dict[str, Any], stop_at: int, fault: Fault) -> list[str]:
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
    from megatron_moe.checkpoint import folder, manifest

    files = manifest.read(folder.step_folder(root, number)).files
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".distcp", ".pt", ".safetensors"))}


def _injection(fault: Fault) -> str:
    return f"inject={fault.call}:{fault.what}:when={fault.number}"


# ---- the server


def _serve() -> None:
    import megatron_moe.training.run  # noqa: F401  what takes long, once

    def answer(value: object) -> None:
        os.write(1, f"{value}\n".encode())

    for line in sys.stdin:
        spec = json.loads(line)
        ready_in, ready_out = os.pipe()
        go_in, go_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready_in)
            os.close(go_out)
            os.dup2(2, 1)
            _child(spec, ready_out, go_in)
        os.close(ready_out)
        os.close(go_in)
        answer(pid)
        for line in sys.stdin:
            question = json.loads(line)
            if question == "wait until ready":
                answer("ready" if os.read(ready_in, 1) else "ended")
            elif question == "go":
                os.write(go_out, b"g")
                answer("gone")
            else:
                break
        status = os.waitpid(pid, 0)[1]
        os.write(2, _ENDED.encode())
        os.close(ready_in)
        os.close(go_out)
        answer(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _child(spec: dict[str, Any], ready: int, go: int) -> None:
    import ctypes
    import resource
    import traceback

    from megatron_moe.checkpoint.async_save import Saver
    from megatron_moe.checkpoint.errors import SaveError
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.training.run import pretrain

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
        os._exit(0 if self.error is None else REFUSED)

    Saver.save = at_the_save
    try:
        pretrain(build({**PRESETS["tiny"], **spec["flags"]}))
        os._exit(0)
    except SaveError:
        traceback.print_exc()
        os._exit(REFUSED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _serve()
