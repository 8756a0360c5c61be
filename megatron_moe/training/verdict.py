"""From what the ranks of a broken job say last to one sentence: which of them is the cause, and where the others wait.

Plain values only; the watchdog collects them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FAILED, DOING = "failed", "doing"
GONE, STOPPED, SILENT, LEFT = "gone", "stopped", "silent", "left"
GONE_WORDS = "its process ended without a word (a signal such as SIGKILL or SIGSEGV, or os._exit)"


@dataclass(frozen=True)
class LastWords:
    """What a rank said when the job ended.

    state: FAILED with an error of its own, or DOING something. text: the error. mark: how far the rank had come.
    waits_in, tensor, number, at: see `whereabouts.Doing`. failed_at: seconds since the epoch.
    """

    rank: int
    state: str
    mark: str
    at: str
    waits_in: str | None = None
    tensor: str | None = None
    number: int | None = None
    text: str = ""
    failed_at: float = 0.0

    def __str__(self) -> str:
        tensor = f" of {self.tensor}" if self.tensor else ""
        number = f", the {self.number}. of its group" if self.number else ""
        doing = f"waiting in {self.waits_in}{tensor}{number}, at {self.at}" if self.waits_in else f"at {self.at}"
        return f"{doing} ({self.mark})"


# In words, and what of its last words a rank shares with the others where all is well.
_DIFFERENCES = {
    "wait in different places": lambda words: (words.waits_in, words.at),
    "bring different tensors": lambda words: words.tensor,
    "have come through different numbers of collectives": lambda words: words.number,
}


def conclude(words: Mapping[int, LastWords], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    """The verdict.

    Args:
        words: of the ranks that answered.
        missing: rank -> GONE, STOPPED, SILENT or LEFT, for those that did not.
        marks: rank -> the last place that a rank told, for the missing ones.
    """
    return f"{_cause(words, missing, marks)}. {_others(words)}".strip()


def _cause(words: Mapping[int, LastWords], missing: Mapping[int, str], marks: Mapping[int, str]) -> str:
    failed = sorted((w for w in words.values() if w.state == FAILED and not w.waits_in), key=lambda w: w.failed_at)
    if len(failed) > 1 and len(failed) == len(words) and len({w.text for w in failed}) == 1:
        return f"all ranks failed alike at {failed[0].at} ({failed[0].mark}): {failed[0].text}"  # and agreed to
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
    waiting = [w for w in words.values() if w.waits_in]
    working = [w for w in words.values() if not w.waits_in]
    if waiting and working:
        return f"{_ranks([w.rank for w in working])} did not come to the collective: {working[0]}"
    for what, key in _DIFFERENCES.items():
        counts = Counter(key(w) for w in words.values()).most_common()
        if len(counts) > 1:
            odd = [w for w in words.values() if key(w) != counts[0][0]]
            if counts[0][1] > counts[1][1]:
                return f"the ranks {what}: {_ranks([w.rank for w in odd])} {odd[0]}, unlike the others"
            return f"the ranks {what}, half of them each"
    return "all ranks wait in the same place: what connects them does not, or one of them left a collective out before"


def _others(words: Mapping[int, LastWords]) -> str:
    """Where everyone is, those at one place together."""
    places: dict[str, list[int]] = {}
    for rank, said in sorted(words.items()):
        text = f"failed at {said.at}, {said.text}" if said.state == FAILED and not said.waits_in else str(said)
        places.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in places.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
