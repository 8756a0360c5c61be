"""What a launcher (torchrun, srun, mpirun) says of the ranks, read from the environment and checked. Loads no torch."""

from __future__ import annotations

import os
import re

from megatron_moe.config.errors import ConfigError

_START = "start the ranks with torchrun --nproc-per-node N, which sets all of these"
_LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
_LARGEST_WORLD = 1 << 22
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:.]+(%\w+)?")
"""A name, or an address of either version."""


def rank_that_prints() -> int:
    """Return RANK, or 0 where it is no rank of WORLD_SIZE, or that is not set: the rank that prints what is wrong."""
    text = os.environ.get("RANK", "0")
    rank = int(text) if text.isascii() and text.isdigit() else 0
    world = os.environ.get("WORLD_SIZE", "0")  # without it, no other rank is known of
    return 0 if world.isascii() and world.isdigit() and rank >= int(world) else rank


def launched_world() -> tuple[int, int]:
    """Return (rank, world size) of the launcher's environment, (0, 1) without one. Needs no process group.

    Raises:
        ConfigError: a number is malformed or missing, or two of them contradict each other.
    """
    found = {name: _count(name, least) for name, least in _LEAST.items()}
    rank, world = found["RANK"], found["WORLD_SIZE"]
    if world is None:
        for name, starter in _TASKS.items():  # which do not know of one another
            text = os.environ.get(name, "")
            if text.isascii() and text.isdigit() and int(text) > 1:
                raise ConfigError(
                    f"{name}={text} without WORLD_SIZE: each task of {starter} would be a run of its own, and all would"
                    f" write the same files; let {starter} start one torchrun on each node (megatron-moe slurm), or "
                    "one task"
                )
        if rank:
            raise ConfigError(
                f"RANK={rank} without WORLD_SIZE: how many ranks there are is not known; for one process unset RANK, "
                f"or {_START}"
            )
        return 0, 1
    if rank is None:
        if world > 1:
            raise ConfigError(
                f"WORLD_SIZE={world} without RANK: which of the ranks this is is not known; for one process unset "
                "WORLD_SIZE; for more, and for a --dry-run of more, use megatron-moe train --nproc-per-node N"
            )
        rank = 0
    if rank >= world:
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}: ranks are counted from 0 to {world - 1}; {_START}")
    local, locals_ = found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]
    if locals_ is not None and locals_ > world:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={locals_}, WORLD_SIZE={world}: one machine has more ranks than all; {_START}"
        )
    if local is not None and local >= (locals_ or world):
        of = f"LOCAL_WORLD_SIZE={locals_}" if locals_ else f"WORLD_SIZE={world}"
        raise ConfigError(f"LOCAL_RANK={local}, {of}: ranks of a machine are counted from 0; {_START}")
    return rank, world


def local_world_size(world_size: int) -> int | None:
    """Return how many ranks this machine has; None where the launcher of several ranks does not say."""
    given = _count("LOCAL_WORLD_SIZE", 1)
    return given if given is not None or world_size > 1 else 1


def require_rendezvous(world_size: int) -> None:
    """Refuse several ranks whose MASTER_ADDR or MASTER_PORT is missing or malformed: they cannot meet."""
    if world_size == 1:
        return
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not _HOST.fullmatch(address):
        found = "is missing" if address is None else f"is {address!r}, no host"
        raise ConfigError(f"MASTER_ADDR {found}: {world_size} ranks meet at rank 0's machine; {_START}")
    if port is None or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        found = "is missing" if port is None else f"is {port!r}, no port from 1 to 65535"
        raise ConfigError(f"MASTER_PORT {found}: {world_size} ranks meet at rank 0's machine; {_START}")


def _count(name: str, least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text) <= _LARGEST_WORLD):
        raise ConfigError(f"{name}={text}: is no whole number of at least {least}; unset it, or {_START}")
    return int(text)
