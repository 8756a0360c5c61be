"""What every node reads for itself is the same on all of them, and a folder that they share is one folder.

Ranks on several machines open the same paths. Where a path is on a local disk of each, one machine may have other data,
another tokenizer or another checkpoint under it: the ranks would train on different data, or start from different
weights, without any error. So the ranks compare the files before the first is used: by size, and by content where they
are not one file on a shared file system, for which the ranks of a node divide the reading. A run on one node does none
of it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import local_world_size
from megatron_moe.config.paths import is_url
from megatron_moe.config.schema import Run
from megatron_moe.data.checks import cache_folder, sources_of
from megatron_moe.data.index_file import sidecar_path
from megatron_moe.parallel.groups import RankFacts, host_group
from megatron_moe.training.plan import RunPlan

_BLOCK = 64 << 20
_SAMPLE, _SAMPLES = 1 << 20, 64
"""Bytes and number of the parts that are compared of a file of which not all can be."""
_SECONDS_TO_APPEAR = 10.0
"""So long a network file system may take until another node sees a new file."""
_REMEDY = "copy it to all nodes again, or put it on a file system that they share"


@dataclass(frozen=True)
class _View:
    """What one rank sees. identities: path -> size, and what tells one file on a shared file system from copies."""

    host: str
    first_rank: int
    """Of its node."""
    tokenizer: str
    identities: dict[str, tuple[int, ...] | None]


def require_one_view(planned: RunPlan, ranks: RankFacts) -> list[str]:
    """Check that all nodes read the same files and share the folders that rank 0 writes; return what was compared.

    Collective over all ranks.

    Raises:
        ConfigError: on all ranks, with the file or the flag, and the host.
    """
    here = local_world_size(ranks.world_size) or ranks.world_size
    if here == ranks.world_size:
        return []
    identities: dict[str, tuple[int, ...] | None] = {}
    # The tokenizer's files are compared by their hash.
    paths: list[str | Path] = []
    if planned.run.data.data_config is not None:
        paths.append(planned.run.data.data_config)
    for prefix in planned.data:
        paths += [f"{prefix}.bin", f"{prefix}.idx"]
        if os.path.exists(sidecar_path(prefix)):
            paths.append(sidecar_path(prefix))
    if planned.imported is not None:
        of_model = planned.imported.folder
        paths += [of_model.path / name for name in ("config.json", *of_model.identities)]
    if planned.start_from.source is not None and not planned.start_from.source.is_local:
        paths += [path for path in sorted(planned.start_from.source.step.rglob("*")) if path.is_file()]
    for path in map(str, paths):
        try:
            about = os.stat(path)
        except OSError:
            identities[path] = None
        else:
            identities[path] = (about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns)
    own = _View(socket.gethostname(), ranks.rank - ranks.local_rank, planned.tokenizer.sha256, identities)
    views = all_gather_object(own)
    for rank, view in enumerate(views):
        if view.tokenizer != views[0].tokenizer:
            raise ConfigError(f"the tokenizer of rank {rank} on {view.host} is not that of rank 0; {_REMEDY}")
        for path in sorted(views[0].identities.keys() | view.identities.keys()):
            first, other = views[0].identities.get(path), view.identities.get(path)
            if (first is None) != (other is None):
                where = "rank 0"
                if other is None:
                    where = f"rank {rank} on {view.host}"
                raise ConfigError(f"{path}: is not there for {where}; {_REMEDY}")
            if first is not None and other is not None and first[0] != other[0]:
                raise ConfigError(
                    f"{path}: has {other[0]} bytes for rank {rank} on {view.host}, and {first[0]} for rank 0; {_REMEDY}"
                )
    copies: dict[str, int] = {}
    for path, identity in identities.items():
        if identity is not None and len({view.identities[path] for view in views}) > 1:
            copies[path] = identity[0]
    notes = []
    if copies:
        notes = _require_same_content(planned, copies, views, ranks.local_rank, here)
    for flag, folder in shared_folders(planned.run):
        if blind := blind_ranks(folder, ranks.rank):
            raise ConfigError(
                f"{flag}: rank {blind[0]} on {views[blind[0]].host} does not see what rank 0 writes there; name a "
                "folder that all nodes share"
            )
    return notes


def _require_same_content(
    planned: RunPlan, copies: dict[str, int], views: list[_View], local_rank: int, here: int
) -> list[str]:
    """Compare files that are not one file for all ranks, each rank of a node with its part of the blocks."""
    limit = planned.run.data.data_verify_gb * 10**9
    whole = sum(copies.values()) <= limit
    blocks: list[tuple[str, int, int]] = []
    for path, size in copies.items():
        if whole or size <= _SAMPLE * _SAMPLES:
            for at in range(0, size, _BLOCK):
                blocks.append((path, at, min(_BLOCK, size - at)))
        else:
            for number in range(_SAMPLES):
                blocks.append((path, (size - _SAMPLE) * number // (_SAMPLES - 1), _SAMPLE))
    digests = {}
    for path, at, size in blocks[local_rank::here]:
        with open(path, "rb") as file:
            file.seek(at)
            digests[path, at] = hashlib.sha256(file.read(size)).hexdigest()
    of_node: dict[int, dict[tuple[str, int], str]] = {}
    for view, found in zip(views, all_gather_object(digests)):
        of_node.setdefault(view.first_rank, {}).update(found)
    for node, found in of_node.items():
        for place, digest in found.items():
            if of_node[0].get(place, digest) != digest:
                raise ConfigError(
                    f"{place[0]}: has other content on {views[node].host} (rank {node}) than on {views[0].host} "
                    f"(rank 0), from byte {place[1]}; {_REMEDY}"
                )
    compared = "SHA-256" if whole else f"SHA-256 of {_SAMPLES} parts each (--data-verify-gb {limit / 10**9:g})"
    return [
        f"{len(copies)} files that are no one file for all nodes are equal on {len(of_node)} of them, by {compared}"
    ]


def shared_folders(run: Run) -> Iterator[tuple[str, Path]]:
    """Yield the folders that rank 0 writes and other nodes read, each with the flag that names it."""
    save = run.checkpoint.save
    if save is not None and not is_url(save):
        yield f"--save {save}", Path(save)
    sources = sources_of(run)
    if not sources.mock:
        cache = cache_folder(run, sources)
        given = run.data.data_cache_path is not None
        yield f"--data-cache-path {cache}" + ("" if given else ", the default"), Path(cache)


def blind_ranks(folder: Path, rank: int) -> list[int]:
    """Return the ranks that do not see what rank 0 writes to a folder, or to the one that it will be made in.

    Collective over all ranks; nothing is left of it.
    """
    chosen: list[Path] = [folder]
    if rank == 0:
        parent = next(path for path in (folder, *folder.parents) if path.is_dir())
        chosen = [parent / f".shared-{uuid.uuid4().hex}"]
        chosen[0].touch()
    dist.broadcast_object_list(chosen, src=0, group=host_group())
    file, deadline = chosen[0], time.monotonic() + _SECONDS_TO_APPEAR
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [rank for rank, sees in enumerate(all_gather_object(seen)) if not sees]
    if rank == 0:
        file.unlink()
    return blind
