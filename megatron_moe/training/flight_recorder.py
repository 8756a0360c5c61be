"""What NCCL's flight recorder says of a hang: which rank did not join which collective.

torch records every collective of every process group: its number in the group, name, shapes, and whether it has ended.
`progress` reads one rank's record, `behind` compares those of all ranks. The format is that of torch's JSON dump, whose
fields are described in torch's tutorial on the recorder. Sends and receives between two ranks are not read.

The standard library is enough: it has to work while everything else hangs.
"""

from __future__ import annotations

import faulthandler
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Collectives to which all ranks bring the same shapes; to an all-to-all, for example, they need not.
_EQUAL_SHAPES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base")


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank has come in one process group.

    name: of the group, the same on all of its ranks. about: its description. ranks: its members, empty where they are
    not known. begun, ended: the number of the last collective that the rank has begun, and of the last one that has
    ended there, None where that is not recorded. open: the one after that, with its shapes, None where there is none.
    """

    name: str
    about: str
    ranks: tuple[int, ...]
    begun: int
    ended: int | None
    open: str | None = None

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> GroupProgress:
        """Return what `dataclasses.asdict` and JSON have made plain values of."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


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
    entries: dict[str, dict[int, Mapping[str, Any]]] = {}
    names: dict[str, tuple[str, str]] = {
        str(config["name"]): (str(config["name"]), str(config["desc"])) for config in dump["pg_config"].values()
    }
    of_number = {name: name for name in names}
    for entry in dump.get("entries", ()):  # from the oldest on: a group may have the name of an earlier one
        name, about = (str(value) for value in entry["process_group"])
        of_number[str(entry["pg_id"])] = name
        names[name] = (name, about)
    for entry in dump.get("entries", ()):
        name, about = (str(value) for value in entry["process_group"])
        if not entry["is_p2p"] and names[name][1] == about:
            entries.setdefault(name, {})[int(entry["collective_seq_id"])] = entry
    status = {of_number.get(str(number), str(number)): value for number, value in dump["pg_status"].items()}
    found = []
    for name in sorted(entries.keys() | status.keys()):
        own, state = entries.get(name, {}), status.get(name, {})
        begun = max([int(state.get("last_enqueued_collective", 0)), *own])
        ended = _ended(own, state.get("last_completed_collective"))
        ranks = _ranks_of(dump["pg_config"].get(name, {}).get("ranks", "[]"))
        if begun <= 0 or len(ranks) == 1:
            continue
        waits = own.get(ended + 1) if ended is not None and ended < begun else None
        about = names.get(name, (name, ""))[1]
        found.append(GroupProgress(name, about, ranks, begun, ended, None if waits is None else _text(waits)))
    return tuple(found)


def _ended(entries: Mapping[int, Mapping[str, Any]], last: str | int | None) -> int | None:
    """Return the last collective that has ended: by the group's own number, and by what the entries say.

    torch's threads may write the number out of order. None where neither is known.
    """
    completed = [number for number, entry in entries.items() if entry["state"] == "completed"]
    if last is not None:
        return max([int(last), 0, *completed])
    return max(completed, default=min(entries) - 1) if entries else None


def _ranks_of(value: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in (json.loads(value) if isinstance(value, str) else value))


def _text(entry: Mapping[str, Any]) -> str:
    """Return all_reduce of Float[8], for example."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    shapes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()))
    brought = ", ".join(f"{dtype}{list(sizes)}" for dtype, sizes in shapes)
    return f"{name} of {brought}" if brought else name


@dataclass(frozen=True)
class _Wait:
    """A collective in which a rank waits, and the ranks that have not joined it."""

    rank: int
    group: GroupProgress
    number: int
    absent: tuple[int, ...]


def behind(of_ranks: Mapping[int, Sequence[GroupProgress]]) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that keep the others waiting, and what to say of them; None where nothing is open.

    A rank that did not join a collective because it waits in another one is not to blame: the one that keeps it is.
    Where all have joined, no rank is named.
    """
    waits = _waits(of_ranks)
    absent = {rank for wait in waits for rank in wait.absent}
    if absent:
        blamed = sorted(absent - {wait.rank for wait in waits if wait.absent}) or sorted(absent)
        wait = next(wait for wait in waits if blamed[0] in wait.absent)
        same = [w for w in waits if (w.group.name, w.number, w.absent) == (wait.group.name, wait.number, wait.absent)]
        named = tuple(rank for rank in blamed if rank in wait.absent)
        others = ", ".join(str(w.rank) for w in same)
        return named, f"did not join {_collective(wait)}, in which rank{'s'[: len(same) > 1]} {others} wait"
    for wait in waits:
        joined = {w.rank: w for w in waits if (w.group.name, w.number) == (wait.group.name, wait.number)}
        kinds = {_kind(w.group.open) for w in joined.values()}
        if len(kinds) > 1:
            brought = "; ".join(f"rank {rank}: {w.group.open}" for rank, w in sorted(joined.items()))
            return (), f"the ranks brought different collectives as {_place(wait)}: {brought}"
    if waits:
        return (
            (),
            f"all ranks have joined {_collective(waits[0])}, which does not end: a link, or a device, stands still",
        )
    return None


def _waits(of_ranks: Mapping[int, Sequence[GroupProgress]]) -> list[_Wait]:
    waits = []
    for rank, groups in sorted(of_ranks.items()):
        for group in groups:
            begun = {
                other: next((g.begun for g in theirs if g.name == group.name), 0 if other in group.ranks else None)
                for other, theirs in of_ranks.items()
                if theirs
            }
            least = min(number for number in begun.values() if number is not None)
            number = least + 1 if group.ended is None else group.ended + 1
            if number <= group.begun:
                absent = [other for other, last in begun.items() if last is not None and last < number]
                waits.append(_Wait(rank, group, number, tuple(sorted(absent))))
    return waits


def _place(wait: _Wait) -> str:
    about = f" ({wait.group.about})" if wait.group.about not in ("", "undefined") else ""
    return f"number {wait.number} of process group {wait.group.name}{about}"


def _collective(wait: _Wait) -> str:
    return f"{wait.group.open or 'a collective'}, {_place(wait)}"


def _kind(text: str | None) -> str | None:
    name = (text or "").partition(" of ")[0]
    return text if name in _EQUAL_SHAPES or text is None else name
