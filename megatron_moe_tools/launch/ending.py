"""How the ranks of a node ended, in one paragraph, and the launcher's exit status."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe.io import launched
from megatron_moe.io.program import DONE, FAILED, INTERRUPTED
from megatron_moe.training.signals import signal_name

_OFTEN = {
    "SIGKILL": "Linux does that where memory runs out (dmesg says so), and so do people",
    "SIGSEGV": "a crash in compiled code",
    "SIGABRT": "compiled code gave up, and its last lines above say why",
    "SIGBUS": "often a full /dev/shm, which data workers and NCCL share memory in",
    "SIGILL": "an instruction that this processor does not have",
    "SIGFPE": "a crash in compiled code",
}


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its process and its exit status, which is minus the number of a signal that killed it."""

    rank: int
    pid: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"ended with status {self.status}"
        name = signal_name(-self.status)
        return f"was killed by {name}{f' ({_OFTEN[name]})' if name in _OFTEN else ''}"


@dataclass(frozen=True)
class Ending:
    """How the ranks of this node ended.

    Attributes:
        ranks: those that failed, the first to fail first.
        problem: why no rank was started; empty where the ranks were.
        by_signal: the first signal that the launcher got, 0 without any.
    """

    ranks: tuple[RankEnd, ...] = ()
    problem: str = ""
    by_signal: int = 0

    @property
    def status(self) -> int:
        """The launcher's exit status: INTERRUPTED after Ctrl-C, else the first failed rank's; DONE if none failed.

        It is as a shell has it: 128 and the number of a signal that killed the rank.
        """
        if self.problem:
            return 128 + self.by_signal if self.by_signal else FAILED
        if self.ranks and self.by_signal == signal.SIGINT:  # torch may have ended slower ranks by SIGTERM
            return INTERRUPTED
        status = self.ranks[0].status if self.ranks else DONE
        return status if status >= 0 else 128 - status

    def text(self, folder: Path) -> str:
        """Return the paragraph; empty where all went well, or a rank has said already why it did not.

        Args:
            folder: the launcher's, with what ranks have left there.
        """
        if self.problem:
            return self.problem
        if not self.ranks or (folder / launched.REPORTED).exists() or self.by_signal == signal.SIGINT:
            return ""
        if self.by_signal and -self.ranks[0].status == self.by_signal:
            return f"the ranks were ended by {signal_name(self.by_signal)}, without a checkpoint"
        return self._of_dead_rank(folder)

    def _of_dead_rank(self, folder: Path) -> str:
        first, *others = self.ranks
        parts = [f"rank {first.rank} on {socket.gethostname()} (process {first.pid}) {first}"]
        conclusion = folder / launched.CONCLUSION
        if conclusion.exists():
            parts.append(conclusion.read_text(encoding="utf-8").strip().rstrip("."))
        elif first.status >= 0:
            parts.append("its last lines above say why, or those of a rank on another node")
        if others:
            parts.append("then " + _listed(others))
        if any(folder.glob("stacks_*")):
            parts.append(f"where the others were is in {folder}")
        return ". ".join(part[0].upper() + part[1:] if number else part for number, part in enumerate(parts)) + "."


def of_failures(failures: Mapping[int, Any]) -> Ending:
    """Return the ending of torch's ProcessFailures, rank -> failure.

    torch looks at all ranks a few times a second. Where it finds several that have ended, those that a signal killed
    come first: a rank that ends by itself may do so because another one is gone.
    """
    ordered = sorted(failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
    return Ending(tuple(RankEnd(rank, failure.pid, failure.exitcode) for rank, failure in ordered))


def _listed(ends: list[RankEnd]) -> str:
    """Return how ranks ended, those that ended alike together."""
    alike: dict[str, list[int]] = {}
    for end in ends:
        alike.setdefault(str(end), []).append(end.rank)
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, sorted(r)))} {how}" for how, r in alike.items())
