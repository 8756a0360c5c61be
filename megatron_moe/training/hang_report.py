"""The report on a hang: what each rank is doing, and one sentence that names the cause and where the others wait.

What a thread is doing is read from its stack. Under gloo a rank waits in a collective. Under NCCL it goes on while the
device waits, up to the next line that reads from the device: `x.item()` waits in C, and the thread's stack ends with
the frame of the line that calls it; of several calls in the line, the frame's instruction says which one is running.

`diagnose` puts the `RankStatus` of all ranks together, which the watchdog collects. Under NCCL all ranks look alike
while they wait for their devices, and differ in what they have begun: torch's flight recorder has every collective of
every process group, its number in the group, name, shapes, and whether it has ended. `progress` reads one rank's
record, `behind` compares those of all ranks. The format is that of torch's JSON dump (see its tutorial on the
recorder). Sends and receives between two ranks are not read.

The standard library is enough for all of it: it has to work while everything else hangs.
"""

from __future__ import annotations

import ast
import dis
import faulthandler
import json
import linecache
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from types import FrameType
from typing import Any

from megatron_moe.io.texts import inwards, listed, place_in

FAILED, DOING = "failed", "doing"
GONE, STOPPED, SILENT, LEFT = "gone", "stopped", "silent", "left"
GONE_WORDS = "its process ended without a word (a signal such as SIGKILL or SIGSEGV, or os._exit)"

_MISSING_WORDS = {
    GONE: f"is gone: {GONE_WORDS}",
    STOPPED: "is stopped (SIGSTOP): its process is there and does not run",
    SILENT: "does not answer",
    LEFT: "left as if all were done, and the others went on",
}
"""By how a rank is missing, in the order in which they explain the others."""

# Collectives to which all ranks bring the same shapes; to an all-to-all, for example, they need not.
_EQUAL_SHAPES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base")
_RANKS_SHOWN = 8

# What a thread is doing.

Frames = list[tuple[FrameType, int, int]]
"""Innermost first: frame, line, index of the instruction."""

FOR_DEVICE = ", for the device"
# Wrappers around a collective, which are no collectives themselves.
_WRAPPERS = ("wrapper", "_object_to_tensor", "_tensor_to_object")
_WAITS = ("wait", "synchronize", "_cuda_synchronize")
# Methods and functions that copy from the device to the host, or need a number that is there.
_READS = (
    *("item", "tolist", "cpu", "numpy", "to", "nonzero", "is_nonzero", "equal", "allclose", "masked_select"),
    *("unique", "unique_consecutive", "bincount", "copy_", "_local_scalar_dense"),
)
_CONVERSIONS = ("bool", "float", "int", "complex", "str", "repr", "format", "print", "list", "tuple")


@dataclass(frozen=True)
class ThreadActivity:
    """What a thread is doing."""

    waits_in: str | None
    """The collective that it waits in."""
    tensor: str | None
    """Dtype and shape of what it sends, where that is known."""
    number: int | None
    """How many collectives its group has begun on this rank, where that is known."""
    at: str
    """file:line in function, of this package where there is any on the stack."""


def current_activity(ignored: tuple[int, ...] = (), on_device: bool = False) -> ThreadActivity:
    """Return what this process is doing: the main thread, unless another thread waits in a collective.

    Backward passes run in threads of their own. ignored: identifiers of threads that do not count. on_device: whether
    tensors are on a CUDA device, so that reading one waits for everything that is queued there.
    """
    found = []
    for _, innermost in threads(ignored):
        frames = [(frame, line, frame.f_lasti) for frame, line in traceback.walk_stack(innermost)]
        doing = activity_of(frames, on_device)
        if doing.waits_in is not None:
            return doing
        found.append(doing)
    return found[0]


def of_error(error: BaseException) -> ThreadActivity:
    """Return what was being done when `error` was raised.

    A line that reads from the device is no wait here: an error of a kernel before it is raised there.
    """
    return activity_of(list(reversed(list(inwards(error.__traceback__)))), on_device=False)


def threads(ignored: tuple[int, ...]) -> list[tuple[int, FrameType]]:
    """Return (identifier, innermost frame) of this process's threads, the main thread first."""
    main = threading.main_thread().ident
    frames = [entry for entry in sys._current_frames().items() if entry[0] not in ignored]
    return sorted(frames, key=lambda entry: (entry[0] != main, entry[0]))


def activity_of(frames: Frames, on_device: bool) -> ThreadActivity:
    """Return what a thread with this stack is doing."""
    at = place_in((frame, line) for frame, line, _ in frames)
    collective = None  # the outermost function of torch.distributed on top of the stack
    for frame, _, _ in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/distributed/" in file and name not in _WRAPPERS:
            collective = frame
        elif collective is not None and "/torch/" not in file:
            break
    if collective is not None:
        values = collective.f_locals
        tensor = number = None
        for name in ("tensor", "input_tensor", "input", "output", "object_list", "obj"):
            value: Any = values.get(name)
            if tensor is None and _is_tensor(value):
                tensor = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if "group" in values and "torch.distributed" in sys.modules:
            group = values["group"] or sys.modules["torch.distributed"].group.WORLD
            try:
                number = group._get_sequence_number_for_group()
            except (AttributeError, RuntimeError):  # a group of another kind, or one that is being taken down
                pass
        return ThreadActivity(collective.f_code.co_name, tensor, number, at)
    waits_in = waiting_call(*frames[0], on_device) if frames else None
    if waits_in == "wait":  # for a collective that was started before
        waits_in = f"a wait in {frames[0][0].f_code.co_name}"
    elif waits_in is not None:
        waits_in += FOR_DEVICE
    return ThreadActivity(waits_in, None, None, at)


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def waiting_call(frame: FrameType, line: int, instruction: int, on_device: bool) -> str | None:
    """Return the call in which the innermost frame waits: wait, synchronize, item and so on; None for others.

    With `on_device`, calls that read from a CUDA device count, and so does a condition on a tensor.
    """
    file, code = frame.f_code.co_filename, frame.f_code
    if "threading" in file:
        return None
    text, reads_tensor = linecache.getline(file, line), False
    waits: tuple[str, ...] = _WAITS
    if on_device:
        waits += _READS
        for name in re.findall(r"[^\W\d]\w*", text):
            reads_tensor = reads_tensor or _is_tensor(frame.f_locals.get(name, frame.f_globals.get(name)))
    if instruction >= 0:
        name = dis.opname[code.co_code[instruction]]
        if ("JUMP" in name and "_IF_" in name) or name in ("UNARY_NOT", "TO_BOOL"):
            return "a condition" if reads_tensor else None
    # The call by its place in the source, from Python 3.11 on.
    places = list(getattr(code, "co_positions", list)())
    first_line, last_line, begin, end = (places[instruction // 2 :] or [(None, None, 0, 0)])[0]
    call = None
    if instruction >= 0 and first_line is not None and first_line == last_line:
        source = linecache.getline(file, first_line).encode()[begin:end].decode(errors="replace").strip()
        try:
            call = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError):
            pass
    if call is None:  # the source is not there, or the call is spread over lines
        return next((name.removeprefix("_cuda_") for name in waits if f".{name}(" in text), None)
    called = call.func if isinstance(call, ast.Call) else None
    if isinstance(called, ast.Name) and reads_tensor and called.id in _CONVERSIONS:
        return called.id
    if isinstance(called, ast.Attribute) and called.attr in waits:
        return called.attr.removeprefix("_cuda_")
    return None


# NCCL's flight recorder.


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank has come in one process group."""

    name: str
    """The same on all ranks of the group."""
    about: str
    """The group's description."""
    ranks: tuple[int, ...]
    """The group's members, empty where they are not known."""
    begun: int
    """Number of the last collective that the rank has begun."""
    ended: int | None
    """Number of the last one that has ended there, None where that is not recorded."""
    open: str | None = None
    """The one after that, with its shapes."""


def within(seconds: float, recorded: Callable[[], Mapping[str, Any]]) -> tuple[tuple[GroupProgress, ...], str]:
    """Return the progress in each group, and why there is none; do not wait for longer than that.

    The recorder is asked in a thread of its own, as it may wait for a lock that the hang holds. Should it keep the
    interpreter from running as well, a thread of C's ends this process.
    """
    found: list[tuple[GroupProgress, ...] | Exception] = []

    def ask() -> None:
        try:
            found.append(progress(recorded()))
        except Exception as error:  # nothing in here may keep the report from being written
            found.append(error)

    thread = threading.Thread(target=ask, name="flight recorder", daemon=True)
    faulthandler.dump_traceback_later(4 * seconds, exit=True)
    try:
        thread.start()
        thread.join(seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if not found:
        return (), f"NCCL's flight recorder did not answer within {seconds:g} s"
    if isinstance(found[0], Exception):
        return (), f"NCCL's flight recorder cannot be read: {type(found[0]).__name__}: {found[0]}"
    return found[0], "" if found[0] else "NCCL's flight recorder is empty"


def progress(dump: Mapping[str, Any]) -> tuple[GroupProgress, ...]:
    """Return how far one rank has come in each group of a dump, but in those of a single rank.

    Raises:
        KeyError, TypeError, ValueError: the dump is of another format.
    """
    about: dict[str, str] = {}
    name_of_number: dict[str, str] = {}
    entries: dict[str, dict[int, Mapping[str, Any]]] = {}
    for config in dump["pg_config"].values():
        about[str(config["name"])] = str(config["desc"])
    for entry in dump.get("entries", ()):  # from the oldest on: a group may have the name of an earlier one
        name, description = map(str, entry["process_group"])
        if about.get(name) != description:
            entries.pop(name, None)
        about[name] = description
        name_of_number[str(entry["pg_id"])] = name
        if not entry["is_p2p"]:
            entries.setdefault(name, {})[int(entry["collective_seq_id"])] = entry
    status = {}
    for number, value in dump["pg_status"].items():
        status[name_of_number.get(str(number), str(number))] = value
    found = []
    for name in sorted(entries.keys() | status.keys()):
        own, state = entries.get(name, {}), status.get(name, {})
        ranks = dump["pg_config"].get(name, {}).get("ranks", "[]")
        if isinstance(ranks, str):
            ranks = json.loads(ranks)
        begun = max([int(state.get("last_enqueued_collective", 0)), *own])
        if begun <= 0 or len(ranks) == 1:
            continue
        # By the group's own number, and by what the entries say: torch's threads may write the number out of order.
        completed = [number for number, entry in own.items() if entry["state"] == "completed"]
        last, ended, opened = state.get("last_completed_collective"), None, None
        if last is not None:
            ended = max([int(last), 0, *completed])
        elif own:
            ended = max(completed, default=min(own) - 1)
        if ended is not None and ended < begun and ended + 1 in own:
            entry = own[ended + 1]
            opened = str(entry["profiling_name"]).rpartition(":")[2]  # all_reduce of Float[8], for example
            brought = map("{}{}".format, entry.get("input_dtypes", ()), map(list, entry.get("input_sizes", ())))
            opened = " of ".join(filter(None, (opened, ", ".join(brought))))
        found.append(GroupProgress(name, about.get(name, ""), tuple(map(int, ranks)), begun, ended, opened))
    return tuple(found)


@dataclass(frozen=True)
class _Wait:
    """A collective in which a rank waits, and the ranks that have not joined it."""

    rank: int
    group: GroupProgress
    number: int
    absent: tuple[int, ...]

    @property
    def place(self) -> str:
        place = f"number {self.number} of process group {self.group.name}"
        if self.group.about in ("", "undefined"):
            return place
        return f"{place} ({self.group.about})"

    @property
    def collective(self) -> str:
        return f"{self.group.open or 'a collective'}, {self.place}"

    @property
    def kind(self) -> str | None:
        """What all ranks have to bring alike."""
        name = (self.group.open or "").partition(" of ")[0]
        return self.group.open if name in _EQUAL_SHAPES or self.group.open is None else name


def behind(of_ranks: Mapping[int, Sequence[GroupProgress]]) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that keep the others waiting, and what to say of them; None where nothing is open.

    A rank that did not join a collective because it waits in another one is not to blame: the one that keeps it is.
    Where all have joined, no rank is named.
    """
    # Every rank's open collective of every group, in the order of the ranks.
    waits = []
    for rank, groups in sorted(of_ranks.items()):
        for group in groups:
            begun = {other: 0 for other, theirs in of_ranks.items() if theirs and other in group.ranks}
            for other, theirs in of_ranks.items():  # the last collective that each rank with a record has begun
                for one in theirs:
                    if one.name == group.name:
                        begun[other] = one.begun
            number = group.ended
            if number is None:
                number = min(begun.values())
            number += 1
            if number <= group.begun:
                missing = tuple(sorted(other for other, last in begun.items() if last < number))
                waits.append(_Wait(rank, group, number, missing))
    absent: set[int] = set()
    kept_waiting: set[int] = set()
    for wait in waits:
        absent.update(wait.absent)
        if wait.absent:
            kept_waiting.add(wait.rank)
    if absent:
        blamed = sorted(absent - kept_waiting) or sorted(absent)
        wait = next(wait for wait in waits if blamed[0] in wait.absent)
        others = filter(lambda other: (other.place, other.absent) == (wait.place, wait.absent), waits)
        named = tuple(rank for rank in blamed if rank in wait.absent)
        return named, f"did not join {wait.collective}, in which {_ranks(map(_RANK, others), len(waits))} wait"
    for wait in waits:
        kinds: set[str | None] = set()
        brought: list[str] = []
        for same in waits:
            if same.place == wait.place:
                kinds.add(same.kind)
                brought.append(f"rank {same.rank}: {same.group.open}")
        if len(kinds) > 1:
            return (), f"the ranks brought different collectives as {wait.place}: {'; '.join(brought)}"
    if waits:
        stands_still = "which does not end: a link, or a device, stands still"
        return (), f"all ranks have joined {waits[0].collective}, {stands_still}"
    return None


# The conclusion.


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports when the watchdog ends the run."""

    rank: int
    state: str
    """FAILED with an error, or DOING something."""
    mark: str
    """How far it had come."""
    at: str
    """See `ThreadActivity`, as waits_in, tensor and number."""
    waits_in: str | None = None
    tensor: str | None = None
    number: int | None = None
    text: str = ""
    """The error."""
    cause: str = ""
    """Which ranks raised the error first, and where, if this one raised it because the ranks agreed to."""
    failed_at: float = 0.0
    """In seconds since the epoch."""
    groups: tuple[GroupProgress, ...] = ()
    """How far it has come in its process groups, by NCCL's flight recorder."""
    without_groups: str = ""
    """Why that is not known."""

    @property
    def failed_by_itself(self) -> bool:
        """Whether its error is its own: a collective that fails is the fault of another rank."""
        return self.state == FAILED and not self.waits_in

    def to_json(self) -> str:
        """Return it as text, for `of_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> RankStatus:
        """Return the status that `to_json` made a text of."""
        values = json.loads(text)
        groups = []
        for group in values.pop("groups"):
            groups.append(GroupProgress(**{**group, "ranks": tuple(group["ranks"])}))
        return cls(**values, groups=tuple(groups))

    def __str__(self) -> str:
        if not self.waits_in:
            return f"at {self.at} ({self.mark})"
        text = f"waiting in {self.waits_in}"
        if self.tensor:
            text += f" of {self.tensor}"
        if self.number:
            text += f", the {self.number}. of its group"
        return f"{text}, at {self.at} ({self.mark})"


# The part of a status that is the same on all ranks of a sound run, by what is said where it differs.
_DIFFERENCES: dict[str, Callable[[RankStatus], Any]] = {
    "wait in different places": lambda status: (status.waits_in, status.at),
    "bring different tensors": lambda status: status.tensor,
    "have come through different numbers of collectives": lambda status: status.number,
}


def diagnose(answers: Mapping[int, RankStatus], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    """Return which rank is the cause, in a sentence, and then where each rank is.

    Args:
        answers: the status of the ranks that answered.
        missing: rank -> GONE, STOPPED, SILENT or LEFT, for those that did not.
        marks: rank -> the last mark that it reported, for the missing ones.
    """
    places: dict[str, list[int]] = {}
    for rank, status in sorted(answers.items()):
        text = str(status)
        if status.failed_by_itself:
            text = f"failed at {status.at}, {status.text}"
        places.setdefault(text, []).append(rank)
    where = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in places.items())
    return f"{_cause(answers, missing, marks)}. {where}".strip()


def _cause(answers: Mapping[int, RankStatus], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    failed = [status for status in answers.values() if status.failed_by_itself]
    if failed:
        first = min(failed, key=lambda status: status.failed_at)
        if first.cause:
            return f"{first.cause} ({first.mark})"
        return f"rank {first.rank} failed at {first.at} ({first.mark}): {first.text}"
    for kind, words in _MISSING_WORDS.items():
        ranks = [rank for rank, state in missing.items() if state == kind]
        if ranks:
            return f"{_ranks(ranks)} {words}; last at: {marks.get(ranks[0], 'unknown')}"
    late = behind({rank: status.groups for rank, status in answers.items()})
    if late is not None:
        blamed, text = late
        if not blamed:
            return text
        return f"{_ranks(blamed)} {text}: {answers[blamed[0]]}"
    waiting: list[RankStatus] = []
    working: list[RankStatus] = []
    for status in answers.values():
        (waiting if status.waits_in else working).append(status)
    # The device works off what was queued, or waits for other ranks itself.
    device_is_waited_for = [str(status.waits_in).endswith(FOR_DEVICE) for status in waiting]
    if waiting and working:
        what = "the collective"
        if all(device_is_waited_for):
            what = "what the others wait for"
        return f"{_ranks(map(_RANK, working))} did not come to {what}: {working[0]}"
    if any(device_is_waited_for):
        unknown = [status.without_groups for status in waiting if not status.groups]
        known = "every collective that was begun has ended, and a kernel has not"
        if unknown:
            reasons = "; ".join(sorted(set(unknown) - {""}))
            known = f"which one is behind is not known ({reasons or 'there is no flight recorder'})"
        return f"all ranks wait for their devices: {known}"
    for what, key in _DIFFERENCES.items():
        counts = Counter(map(key, answers.values())).most_common()
        if len(counts) == 1:
            continue
        if counts[0][1] == counts[1][1]:
            return f"the ranks {what}, half of them each"
        odd = [status for status in answers.values() if key(status) != counts[0][0]]
        return f"the ranks {what}: {_ranks(map(_RANK, odd))} {odd[0]}, unlike the others"
    return "all ranks wait in the same place: what connects them does not, or one of them left a collective out before"


_RANK = attrgetter("rank")


def _ranks(of: Iterable[int], most: int = _RANKS_SHOWN) -> str:
    ranks = sorted(of)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, most)}"
