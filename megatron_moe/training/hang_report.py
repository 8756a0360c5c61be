"""The report on a hang: from the status of all ranks to one sentence that names the cause and where the others wait.

`diagnose` puts the `RankStatus` of all ranks together, which the watchdog collects. Under NCCL all ranks look alike
while they wait for their devices, and differ in what they have begun: torch's flight recorder has every collective of
every process group, its number in the group, name, shapes, and whether it has ended. `progress` reads one rank's
record, `_behind` compares those of all ranks. The format is that of torch's JSON dump, whose fields are described in
torch's tutorial on the recorder. Sends and receives between two ranks are not read.

The standard library is enough for all of it: it has to work while everything else hangs.
"""

from __future__ import annotations

import faulthandler
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_moe.training.stack_reading import FOR_DEVICE

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
    for config in dump["pg_config"].values():
        about[str(config["name"])] = str(config["desc"])
    recorded = []
    for entry in dump.get("entries", ()):  # from the oldest on: a group may have the name of an earlier one
        name, description = entry["process_group"]
        about[str(name)] = str(description)
        name_of_number[str(entry["pg_id"])] = str(name)
        if not entry["is_p2p"]:
            recorded.append((str(name), str(description), entry))
    entries: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, description, entry in recorded:
        if about[name] == description:
            entries.setdefault(name, {})[int(entry["collective_seq_id"])] = entry
    status = {name_of_number.get(str(number), str(number)): value for number, value in dump["pg_status"].items()}
    found = []
    for name in sorted(entries.keys() | status.keys()):
        own, state = entries.get(name, {}), status.get(name, {})
        ranks = dump["pg_config"].get(name, {}).get("ranks", "[]")
        if isinstance(ranks, str):
            ranks = json.loads(ranks)
        begun = max([int(state.get("last_enqueued_collective", 0)), *own])
        if begun <= 0 or len(ranks) == 1:
            continue
        ended = _last_ended(own, state.get("last_completed_collective"))
        is_open = ended is not None and ended < begun and ended + 1 in own
        opened = _collective_text(own[ended + 1]) if is_open and ended is not None else None
        found.append(GroupProgress(name, about.get(name, ""), tuple(map(int, ranks)), begun, ended, opened))
    return tuple(found)


def _last_ended(entries: Mapping[int, Mapping[str, Any]], last: str | int | None) -> int | None:
    """Return the last collective that has ended: by the group's own number, and by what the entries say.

    torch's threads may write the number out of order. None where neither is known.
    """
    completed = [number for number, entry in entries.items() if entry["state"] == "completed"]
    if last is not None:
        return max([int(last), 0, *completed])
    if not entries:
        return None
    return max(completed, default=min(entries) - 1)


def _collective_text(entry: Mapping[str, Any]) -> str:
    """Return all_reduce of Float[8], for example."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    brought = []
    for dtype, sizes in zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ())):
        brought.append(f"{dtype}{list(sizes)}")
    return f"{name} of {', '.join(brought)}" if brought else name


@dataclass(frozen=True)
class _Wait:
    """A collective in which a rank waits, and the ranks that have not joined it."""

    rank: int
    group: GroupProgress
    number: int
    absent: tuple[int, ...]

    @property
    def place(self) -> str:
        about = f" ({self.group.about})" if self.group.about not in ("", "undefined") else ""
        return f"number {self.number} of process group {self.group.name}{about}"

    @property
    def collective(self) -> str:
        return f"{self.group.open or 'a collective'}, {self.place}"

    @property
    def kind(self) -> str | None:
        """What all ranks have to bring alike."""
        name = (self.group.open or "").partition(" of ")[0]
        return self.group.open if name in _EQUAL_SHAPES or self.group.open is None else name

    def is_same(self, other: _Wait) -> bool:
        return (self.group.name, self.number) == (other.group.name, other.number)


def behind(of_ranks: Mapping[int, Sequence[GroupProgress]]) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that keep the others waiting, and what to say of them; None where nothing is open.

    A rank that did not join a collective because it waits in another one is not to blame: the one that keeps it is.
    Where all have joined, no rank is named.
    """
    waits = _waits(of_ranks)
    absent: set[int] = set()
    kept_waiting: set[int] = set()
    for wait in waits:
        absent.update(wait.absent)
        if wait.absent:
            kept_waiting.add(wait.rank)
    if absent:
        blamed = sorted(absent - kept_waiting) or sorted(absent)
        wait = next(wait for wait in waits if blamed[0] in wait.absent)
        others = [str(other.rank) for other in waits if other.is_same(wait) and other.absent == wait.absent]
        named = tuple(rank for rank in blamed if rank in wait.absent)
        ranks = "rank" if len(others) == 1 else "ranks"
        return named, f"did not join {wait.collective}, in which {ranks} {', '.join(others)} wait"
    for wait in waits:
        joined = [other for other in waits if other.is_same(wait)]
        if len({other.kind for other in joined}) > 1:
            brought = "; ".join(f"rank {other.rank}: {other.group.open}" for other in joined)
            return (), f"the ranks brought different collectives as {wait.place}: {brought}"
    if waits:
        stands_still = "which does not end: a link, or a device, stands still"
        return (), f"all ranks have joined {waits[0].collective}, {stands_still}"
    return None


def _waits(of_ranks: Mapping[int, Sequence[GroupProgress]]) -> list[_Wait]:
    """Return every rank's open collective of every group, in the order of the ranks."""
    waits = []
    for rank, groups in sorted(of_ranks.items()):
        for group in groups:
            begun = _begun_by_rank(group, of_ranks)
            last_of_all = min(begun.values()) if group.ended is None else group.ended
            number = last_of_all + 1
            if number <= group.begun:
                absent = tuple(sorted(other for other, last in begun.items() if last < number))
                waits.append(_Wait(rank, group, number, absent))
    return waits


def _begun_by_rank(group: GroupProgress, of_ranks: Mapping[int, Sequence[GroupProgress]]) -> dict[int, int]:
    """Return the last collective of the group that each of its ranks with a record has begun."""
    begun: dict[int, int] = {}
    for other, theirs in of_ranks.items():
        if theirs and other in group.ranks:
            begun[other] = 0
        for one in theirs:
            if one.name == group.name:
                begun[other] = one.begun
    return begun


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
    def waits_for_device(self) -> bool:
        """Whether it waits for the device, which works off what was queued, or waits for other ranks itself."""
        return self.waits_in is not None and self.waits_in.endswith(FOR_DEVICE)

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
        tensor = f" of {self.tensor}" if self.tensor else ""
        number = f", the {self.number}. of its group" if self.number else ""
        return f"waiting in {self.waits_in}{tensor}{number}, at {self.at} ({self.mark})"


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
        text = f"failed at {status.at}, {status.text}" if status.failed_by_itself else str(status)
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
        return f"{_ranks(blamed)} {text}: {answers[blamed[0]]}" if blamed else text
    waiting = [status for status in answers.values() if status.waits_in]
    working = [status for status in answers.values() if not status.waits_in]
    if waiting and working:
        for_device = all(status.waits_for_device for status in waiting)
        what = "what the others wait for" if for_device else "the collective"
        return f"{_ranks([status.rank for status in working])} did not come to {what}: {working[0]}"
    if any(status.waits_for_device for status in waiting):
        return f"all ranks wait for their devices: {_known_of_devices(waiting)}"
    for what, key in _DIFFERENCES.items():
        counts = Counter(key(status) for status in answers.values()).most_common()
        if len(counts) == 1:
            continue
        if counts[0][1] == counts[1][1]:
            return f"the ranks {what}, half of them each"
        odd = [status for status in answers.values() if key(status) != counts[0][0]]
        return f"the ranks {what}: {_ranks([status.rank for status in odd])} {odd[0]}, unlike the others"
    return "all ranks wait in the same place: what connects them does not, or one of them left a collective out before"


def _known_of_devices(waiting: Sequence[RankStatus]) -> str:
    """Return why no rank can be named, where the ranks wait for their devices."""
    unknown = [status.without_groups for status in waiting if not status.groups]
    if not unknown:
        return "every collective that was begun has ended, and a kernel has not"
    reasons = "; ".join(sorted(set(unknown) - {""}))
    return f"which one is behind is not known ({reasons or 'there is no flight recorder'})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_RANKS_SHOWN]))
    if len(ranks) > _RANKS_SHOWN:
        shown += f" and {len(ranks) - _RANKS_SHOWN} more"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
