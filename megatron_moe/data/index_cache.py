"""The engine's index caches, which hold the order of samples between runs: used only as they were written.

The engine takes any file of the right name: one that a kill cut short, one with a flipped bit, one of other data, and
it would run a pickle inside. So rank 0 keeps the SHA-256 of each in `verified.json` beside them, and removes what does
not agree before the engine looks. What is missing is built again, and is the same for the same data. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_moe.data.checks import hashing
from megatron_moe.data.sidecar import read_sidecar

LISTED = "verified.json"
_LOCK = ".lock"
_SAMPLED = 1 << 24  # bytes


def name_of_cache(prefixes: list[str]) -> str:
    """Folder name for the caches of these datasets, the same on every rank; another one when any is written again.

    The engine keys its caches by path, so that new data under an old path would meet the old order. The order follows
    from the `.idx` files, so each is named by the hash that its sidecar knows, or else by size, time of the last change
    and the first and last 16 MiB.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        identity = _sampled(f"{prefix}.idx") if sidecar is None else sidecar.idx_sha256
        digest.update(f"{os.path.abspath(prefix)} {identity} {os.path.getsize(f'{prefix}.bin')}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def verified_caches(folder: str | None) -> Iterator[None]:
    """Around the engine's building, in the one process that writes: what is not as it was written is removed first,
    and what is there afterwards is written down. Other jobs with the same data wait. None: no caches, nothing to do.
    """
    if folder is None:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, _LOCK), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        kept = _keep_verified(folder)
        yield
        _write_down(folder, kept)


def _keep_verified(folder: str) -> dict[str, str]:
    """Remove every array that is not listed or not as listed; returns the others with their hashes."""
    known, kept = _listed(folder), {}
    for name in _arrays(folder):
        path = os.path.join(folder, name)
        if name in known and hashing(path) == known[name]:
            kept[name] = known[name]
        else:
            os.unlink(path)
    return kept


def _write_down(folder: str, kept: dict[str, str]) -> None:
    now = {name: kept.get(name) or hashing(os.path.join(folder, name)) for name in _arrays(folder)}
    if now == _listed(folder):
        return
    aside = os.path.join(folder, f".{LISTED}.new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(now, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, os.path.join(folder, LISTED))


def _listed(folder: str) -> dict[str, str]:
    """File name -> SHA-256; empty where the list is missing or unreadable: then all is built again."""
    try:
        with open(os.path.join(folder, LISTED), encoding="utf-8") as file:
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _arrays(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".npy"))


def _sampled(path: str) -> str:
    about = os.stat(path)
    with open(path, "rb") as file:
        content = file.read(_SAMPLED)
        if about.st_size > _SAMPLED:
            file.seek(max(_SAMPLED, about.st_size - _SAMPLED))
            content += file.read(_SAMPLED)
    return f"{about.st_size} {about.st_mtime_ns} {hashlib.sha256(content).hexdigest()}"
