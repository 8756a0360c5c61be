"""Errors of saving and loading, raised on all ranks together: the others would wait for a rank that leaves alone.

What the ranks exchange here are objects in host memory, which do not pass through a GPU (`groups.host_group`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.io.files import free_bytes
from megatron_moe.io.texts import place_of, size_text
from megatron_moe.parallel.groups import host_group

T = TypeVar("T")

ROUND_SECONDS = 10.0
"""How often the ranks exchange their progress while they read: waiting longer could time out."""


class SaveError(RunFault):
    """A step could not be saved. What was there before is as it was; the same on every rank."""


class SharedError(RuntimeError):
    """An error that some ranks raised by themselves and then, as the ranks agreed to, every rank.

    Attributes:
        cause: which ranks raised it, where in the code, and with what message.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class _Failure:
    """What a rank sends the others of its error.

    kind: what all ranks raise; None: SharedError, and `place` is where the error was raised.
    """

    kind: type[ConfigError] | type[SaveError] | None
    message: str
    place: str = ""

    @classmethod
    def of(cls, error: Exception, describe: Callable[[OSError], str] = str) -> _Failure:
        if isinstance(error, OSError):
            return cls(SaveError, describe(error))
        if isinstance(error, ConfigError):
            return cls(ConfigError, str(error))
        return cls(None, f"{type(error).__name__}: {error}", place_of(error))


def refusal(error: OSError, root: Path, needed_bytes: int) -> str:
    """Return the message of an error while saving: what, where, and for a full disk how much is needed and free."""
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free, there = free_bytes(root), "the file system does not say how much is free"
        if free is not None:
            there = f"{size_text(free, exact=True)} are free"
        text += f"; the step takes {size_text(needed_bytes, exact=True)}, {there} at {root}"
    return text


def on_rank_zero(work: Callable[[], T], describe: Callable[[OSError], str] = str) -> T | None:
    """Do something on rank 0 and return its result there, None on the other ranks. Collective.

    Args:
        describe: returns the message of an OSError.

    Raises:
        ConfigError: on every rank, where rank 0 raised it. SaveError: where it raised an OSError. SharedError: where it
            raised something else.
    """
    result, failure = None, None
    if torch.distributed.get_rank() == 0:
        result, failure = attempted(work)
    outcome = [None if failure is None else _Failure.of(failure, describe)]
    torch.distributed.broadcast_object_list(outcome, src=0, group=host_group())
    if outcome[0] is not None:
        raise _shared({0: outcome[0]}, outcome[0].message) from failure
    return result


def gathered(result: T | None, failure: Exception | None, describe: Callable[[OSError], str]) -> list[T] | None:
    """Return every rank's result on rank 0, None on the others. Collective.

    Args:
        failure: what this rank raised instead of a result.
        describe: returns the message of an OSError.

    Raises:
        SaveError: on every rank, where some rank raised an OSError. SharedError: where one raised something else.
    """
    mine = (result, None) if failure is None else (None, _Failure.of(failure, describe))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parts: list | None = [None] * world_size if rank == 0 else None
    torch.distributed.gather_object(mine, parts, dst=0, group=host_group())
    failures = {number: failed for number, (_, failed) in enumerate(parts or []) if failed is not None}
    outcome = [failures]
    torch.distributed.broadcast_object_list(outcome, src=0, group=host_group())
    if outcome[0]:
        texts = [f"rank {number}: {f.message}" if world_size > 1 else f.message for number, f in outcome[0].items()]
        raise _shared(outcome[0], "; ".join(texts)) from failure
    return None if parts is None else [part for part, _ in parts]


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks. Collective."""
    found: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value, group=host_group())
    return found  # type: ignore[return-value]


def in_rounds(steps: Iterable[object], done: Callable[[], int], where: Path) -> Iterator[tuple[int, float]]:
    """Take a rank's steps; yield in rounds what all ranks have done, and in what seconds. Collective.

    Args:
        done: returns what this rank has done, in bytes. where: what is read, for the message of an unexpected error.

    Raises:
        ConfigError: on every rank, where a step of one failed.
    """
    iterator, started, everywhere = iter(steps), time.monotonic(), False
    while not everywhere:
        until, finished = time.monotonic() + ROUND_SECONDS, True
        error: str | None = None
        cause: Exception | None = None
        try:
            for _ in iterator:
                if time.monotonic() > until:
                    finished = False
                    break
        except (ConfigError, OSError) as refused:
            error = str(refused)
        except Exception as failed:
            error, cause = f"{where}: {type(failed).__name__}: {failed}", failed
        everyone = all_gather_object((done(), error, finished))
        if errors := sorted({found for _, found, _ in everyone if found is not None}):
            raise ConfigError("; ".join(errors[:3])) from cause
        everywhere = all(complete for _, _, complete in everyone)
        yield sum(count for count, _, _ in everyone), time.monotonic() - started


def attempted(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None), or (None, exception) where `work` raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _shared(failures: dict[int, _Failure], message: str) -> Exception:
    kinds = {failure.kind for failure in failures.values()}
    if None in kinds:
        unexpected = {rank: failure for rank, failure in failures.items() if failure.kind is None}
        causes = (f"rank {rank} failed at {failure.place}: {failure.message}" for rank, failure in unexpected.items())
        return SharedError(message, "; ".join(causes))
    return ConfigError(message) if ConfigError in kinds else SaveError(message)
