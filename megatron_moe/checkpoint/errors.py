"""Errors of saving and loading, raised on all ranks together: the others would wait for a rank that leaves alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.io.files import free_bytes
from megatron_moe.io.texts import size_text

T = TypeVar("T")


class SaveError(RunFault):
    """A step could not be saved. What was there before is as it was; the same on every rank."""


def refusal(error: OSError, root: Path, needed_bytes: int) -> str:
    """Return the message of an error while saving: what, where, and for a full disk how much is needed and free."""
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += f"; {_room(root, needed_bytes)}"
    return text


def _room(root: Path, needed_bytes: int) -> str:
    free, there = free_bytes(root), "the file system does not say how much is free"
    if free is not None:
        there = f"{size_text(free, exact=True)} are free"
    return f"the step takes {size_text(needed_bytes, exact=True)}, {there} at {root}"


def on_rank_zero(work: Callable[[], T]) -> T | None:
    """Do something on rank 0 and return its result there, None on the other ranks. Collective.

    Raises:
        SaveError: on every rank, where rank 0 raised an OSError. RuntimeError: where it raised something else.
    """
    result, failure = None, None
    if torch.distributed.get_rank() == 0:
        result, failure = attempted(work)
    outcome = [None if failure is None else (isinstance(failure, OSError), _message(failure))]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        _raise(outcome[0], failure)
    return result


def gathered(result: T | None, failure: Exception | None, describe: Callable[[OSError], str]) -> list[T] | None:
    """Return every rank's result on rank 0, None on the others. Collective.

    Args:
        failure: what this rank raised instead of a result.
        describe: returns the message of an OSError.

    Raises:
        SaveError: on every rank, where some rank raised an OSError. RuntimeError: where one raised something else.
    """
    mine: tuple[T | None, tuple[bool, str] | None] = (result, None)
    if failure is not None:
        expected = isinstance(failure, OSError)
        mine = (None, (expected, describe(failure) if isinstance(failure, OSError) else _message(failure)))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parts: list | None = [None] * world_size if rank == 0 else None
    torch.distributed.gather_object(mine, parts, dst=0)
    outcome: list[tuple[bool, str] | None] = [None]
    if parts is not None:
        failures = [(number, failed) for number, (_, failed) in enumerate(parts) if failed is not None]
        if failures:
            message = "; ".join(
                f"rank {number}: {failed[1]}" if world_size > 1 else failed[1] for number, failed in failures
            )
            outcome = [(all(failed[0] for _, failed in failures), message)]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        _raise(outcome[0], failure)
    return None if parts is None else [part for part, _ in parts]


def read_on_rank_zero(work: Callable[[], T], elsewhere: T) -> T:
    """Return what rank 0 reads on rank 0, and `elsewhere` on the other ranks. Collective.

    Raises:
        ConfigError: on every rank, where rank 0 raised it.
    """
    result, refused = elsewhere, None
    if torch.distributed.get_rank() == 0:
        try:
            result = work()
        except ConfigError as error:
            refused = str(error)
    outcome = [refused]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise ConfigError(outcome[0])
    return result


def from_all(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks. Collective."""
    found: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found  # type: ignore[return-value]


def attempted(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None), or (None, exception) where `work` raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _raise(outcome: tuple[bool, str], own: Exception | None) -> None:
    expected, message = outcome
    raise (SaveError if expected else RuntimeError)(message) from own
