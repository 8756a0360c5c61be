"""The report on a hang: from the status of all ranks to one sentence that names the cause and where the others wait.

`Process` finds out whether a rank's process still exists, `ThreadActivity` is what a thread is doing, read from its
stack, and `conclusion` puts the `RankStatus` of all ranks together, which the watchdog collects. The standard library
is enough for all of it: it has to work while everything else hangs.

Under gloo a rank waits in a collective. Under NCCL it goes on while the device waits, up to the next line that reads
from the device: there all ranks look alike, and differ in what they have begun (`flight_recorder.py`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_moe.io.places import inwards, place_in
from megatron_moe.training.flight_recorder import GroupProgress, behind
from megatron_moe.training.stack_reading import Frames, waiting_call

FAILED, DOING = "failed", "doing"
GONE, STOPPED, SILENT, LEFT = "gone", "stopped", "silent", "left"
GONE_WORDS = "its process ended without a word (a signal such as SIGKILL or SIGSEGV, or os._exit)"


@dataclass(frozen=True)
class Process:
    """A process; its start time distinguishes it from a later one with the same number.

    host: name and boot of its machine. start: in clock ticks since boot, 0 where it is not known.
    """

    host: str
    pid: int
    start: int

    def is_gone(self) -> bool:
        """Return whether it has ended, a zombie included; False where that is unknown. Call it on its own machine."""
        if not Path("/proc/self/stat").exists():
            return False
        state, start = _stat(self.pid)
        return state in ("", "Z", "X") or (self.start > 0 and start != self.start)

    def state(self) -> str:
        """Return STOPPED or SILENT for a process that exists and does not answer."""
        return STOPPED if _stat(self.pid)[0] in ("T", "t") else SILENT

    def send(self, number: int) -> None:
        """Send the process a signal, unless it is gone."""
        if not self.is_gone():
            try:
                os.kill(self.pid, number)
            except OSError:
                pass


@cache
def this_process() -> Process:
    """Return the process that calls this."""
    return Process(_machine(), os.getpid(), _stat(os.getpid())[1])


def _machine() -> str:
    """Return a name that differs between machines of one name, and between containers, which number processes anew."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux: the name has to do
        pass
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, int]:
    """Return (state letter, start time) from /proc; ("", 0) for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return "", 0
    return fields[0], int(fields[19])


_FOR_DEVICE = ", for the device"
# Wrappers around a collective, which are no collectives themselves.
_WRAPPERS = ("wrapper", "_object_to_tensor", "_tensor_to_object")


@dataclass(frozen=True)
class ThreadActivity:
    """What a thread is doing, read from its stack.

    waits_in: the collective it waits in, or None. tensor: dtype and shape of what it sends; number: how many
    collectives its group has begun on this rank; None where that is not known. at: file:line in function, of this
    package where there is any on the stack.
    """

    waits_in: str | None
    tensor: str | None
    number: int | None
    at: str


def current_activity(ignored: tuple[int, ...] = (), on_device: bool = False) -> ThreadActivity:
    """Return what this process is doing: the main thread, unless another thread waits in a collective.

    Backward passes run in threads of their own.

    Args:
        ignored: identifiers of threads that do not count.
        on_device: whether tensors are on a CUDA device, so that reading one waits for everything that is queued there.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    ahead = sorted((ident for ident in frames if ident not in ignored), key=lambda ident: ident != main)
    found = [_read(list(_outwards(frames[ident])), on_device) for ident in ahead]
    return next((doing for doing in found if doing.waits_in is not None), found[0])


def of_error(error: BaseException) -> ThreadActivity:
    """Return what was being done when `error` was raised.

    A line that reads from the device is no wait here: an error of a kernel before it is raised there.
    """
    return _read(list(reversed(list(inwards(error.__traceback__)))), on_device=False)


def stacks(ignored: tuple[int, ...] = ()) -> str:
    """Return the stacks of all threads of this process, main thread first."""
    frames, named = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident in sorted((i for i in frames if i not in ignored), key=lambda i: (i != main, i)):
        lines = "".join(traceback.format_stack(frames[ident])).rstrip()
        texts.append(f"thread {named.get(ident, ident)}:\n{lines}")
    return "\n".join(texts)


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int, int]]:
    while frame is not None:
        yield frame, frame.f_lineno, frame.f_lasti
        frame = frame.f_back


def _read(frames: Frames, on_device: bool) -> ThreadActivity:
    collective, values = _collective(frames, on_device)
    at = place_in((frame, line) for frame, line, _ in frames)
    return ThreadActivity(collective, _tensor(values), _number(values), at)


def _collective(frames: Frames, on_device: bool) -> tuple[str | None, dict[str, Any]]:
    """Return the outermost function of torch.distributed on top of the stack with its variables.

    Where there is none, return the wait for a collective that was started before, or for the device; (None, {}) without
    those too.
    """
    found = None
    for frame, _, _ in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/distributed/" in file and name not in _WRAPPERS:
            found = frame
        elif found is not None and "/torch/" not in file:
            break
    if found is not None:
        return found.f_code.co_name, found.f_locals
    call = waiting_call(frames[0], on_device) if frames else None
    if call is None:
        return None, {}
    return (f"a wait in {frames[0][0].f_code.co_name}" if call == "wait" else f"{call}{_FOR_DEVICE}"), {}


def _tensor(values: dict[str, Any]) -> str | None:
    """Return dtype and shape of the tensor that a collective was given."""
    for name in ("tensor", "input_tensor", "input", "output", "object_list", "obj"):
        value = values.get(name)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return None


def _number(values: dict[str, Any]) -> int | None:
    """Return how many collectives the group has begun, counted by torch."""
    if "group" not in values or "torch.distributed" not in sys.modules:
        return None
    try:
        return (values["group"] or sys.modules["torch.distributed"].group.WORLD)._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):  # a group of another kind, or one that is being taken down
        return None


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports when the watchdog ends the run.

    state: FAILED with an error, or DOING something. text: the error. cause: which ranks raised it first, and where, if
    this rank raised it because the ranks agreed to (`SharedError.cause`). mark: how far the rank had come.
    waits_in, tensor, number, at: see `ThreadActivity`. failed_at: seconds since the epoch. groups: how far it has come
    in its process groups by NCCL's flight recorder, and without_groups: why that is not known.
    """

    rank: int
    state: str
    mark: str
    at: str
    waits_in: str | None = None
    tensor: str | None = None
    number: int | None = None
    text: str = ""
    cause: str = ""
    failed_at: float = 0.0
    groups: tuple[GroupProgress, ...] = ()
    without_groups: str = ""

    @property
    def waits_for_device(self) -> bool:
        """Whether it waits for the device, which works off what was queued, or waits for other ranks itself."""
        return self.waits_in is not None and self.waits_in.endswith(_FOR_DEVICE)

    def to_json(self) -> str:
        """Return it as text, for `of_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> RankStatus:
        """Return the status that `to_json` made a text of."""
        values = json.loads(text)
        return cls(**{**values, "groups": tuple(GroupProgress.of_json(group) for group in values["groups"])})

    def __str__(self) -> str:
        tensor = f" of {self.tensor}" if self.tensor else ""
        number = f", the {self.number}. of its group" if self.number else ""
        doing = f"waiting in {self.waits_in}{tensor}{number}, at {self.at}" if self.waits_in else f"at {self.at}"
        return f"{doing} ({self.mark})"


# The part of a status that is the same on all ranks of a sound run, by what is said where it differs.
_DIFFERENCES = {
    "wait in different places": lambda status: (status.waits_in, status.at),
    "bring different tensors": lambda status: status.tensor,
    "have come through different numbers of collectives": lambda status: status.number,
}


def conclusion(answers: Mapping[int, RankStatus], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    """Return which rank is the cause, in a sentence, and then where each rank is.

    Args:
        answers: the status of the ranks that answered.
        missing: rank -> GONE, STOPPED, SILENT or LEFT, for those that did not.
        marks: rank -> the last mark that it reported, for the missing ones.
    """
    return f"{_cause(answers, missing, marks)}. {_others(answers)}".strip()


def _cause(answers: Mapping[int, RankStatus], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    failed = sorted((s for s in answers.values() if s.state == FAILED and not s.waits_in), key=lambda s: s.failed_at)
    if failed and failed[0].cause:
        return f"{failed[0].cause} ({failed[0].mark})"
    if failed:
        return f"rank {failed[0].rank} failed at {failed[0].at} ({failed[0].mark}): {failed[0].text}"
    for kind, text in (
        (GONE, f"is gone: {GONE_WORDS}"),
        (STOPPED, "is stopped (SIGSTOP): its process is there and does not run"),
        (SILENT, "does not answer"),
        (LEFT, "left as if all were done, and the others went on"),
    ):
        ranks = [rank for rank, state in missing.items() if state == kind]
        if ranks:
            return f"{_ranks(ranks)} {text}; last at: {marks.get(ranks[0], 'unknown')}"
    late = behind({rank: status.groups for rank, status in answers.items()})
    if late is not None:
        blamed, text = late
        return f"{_ranks(blamed)} {text}: {answers[blamed[0]]}" if blamed else text
    waiting = [status for status in answers.values() if status.waits_in]
    working = [status for status in answers.values() if not status.waits_in]
    if waiting and working:
        what = "what the others wait for" if all(status.waits_for_device for status in waiting) else "the collective"
        return f"{_ranks([status.rank for status in working])} did not come to {what}: {working[0]}"
    if any(status.waits_for_device for status in waiting):
        return f"all ranks wait for their devices: {_known_of_devices(answers)}"
    for what, key in _DIFFERENCES.items():
        counts = Counter(key(status) for status in answers.values()).most_common()
        if len(counts) > 1:
            odd = [status for status in answers.values() if key(status) != counts[0][0]]
            if counts[0][1] > counts[1][1]:
                return f"the ranks {what}: {_ranks([status.rank for status in odd])} {odd[0]}, unlike the others"
            return f"the ranks {what}, half of them each"
    return "all ranks wait in the same place: what connects them does not, or one of them left a collective out before"


def _known_of_devices(answers: Mapping[int, RankStatus]) -> str:
    """Return why no rank can be named, where the ranks wait for their devices."""
    if all(status.groups for status in answers.values()):
        return "every collective that was begun has ended, and a kernel has not"
    reasons = {status.without_groups for status in answers.values() if not status.groups} - {""}
    return f"which one is behind is not known ({'; '.join(sorted(reasons)) or 'there is no flight recorder'})"


def _others(answers: Mapping[int, RankStatus]) -> str:
    """Return where each rank is; ranks with the same status are listed together."""
    by_text: dict[str, list[int]] = {}
    for rank, status in sorted(answers.items()):
        failed_by_itself = status.state == FAILED and not status.waits_in
        text = f"failed at {status.at}, {status.text}" if failed_by_itself else str(status)
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
