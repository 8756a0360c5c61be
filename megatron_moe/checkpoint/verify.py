"""Does a step hold what was saved? Every rank hashes its share of the files before any weight is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_moe.checkpoint import manifest
from megatron_moe.checkpoint.plan import Plan, plan
from megatron_moe.checkpoint.ranks import from_all
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run

ROUND_SECONDS = 10.0
"""After so long the ranks tell each other how far they are: none waits in a collective until it times out."""


def verified(run: Run, found: Plan, tell: Callable[[str], None]) -> Plan:
    """The plan that stands when every file of the step to load holds what was saved. Collective over all ranks.

    Rank r hashes every world-size-th file, the largest first. A damaged step is passed over for the newest sound one
    before it, unless it was asked for with `--ckpt-step`; the notes of the plan say so.

    Args:
        tell: is given a line now and then on rank 0, while a large step is read.

    Raises:
        ConfigError: on every rank: the step asked for is damaged, none is sound, or the ranks see different folders.
    """
    while True:
        _require_one_view(found)
        if found.source is None or not run.checkpoint.verify_checkpoint:
            return found
        step = found.source.step
        reason, told = _damage(step, tell)
        if reason is None:
            return replace(found, notes=(*found.notes, told))
        known_bad = {**found.known_bad, found.source.iteration: reason}
        found = _planned_again(run, known_bad)


def _damage(step: Path, tell: Callable[[str], None]) -> tuple[str | None, str]:
    """What is wrong with the content of a step, the same words on every rank, or None; and what was done."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    files = manifest.read(step).files
    largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    outcomes = manifest.checked_content(step, largest_first[rank::world_size])
    total, started, done = sum(entry["bytes"] for entry in files.values()), time.monotonic(), 0
    while True:
        until, defect, finished = time.monotonic() + ROUND_SECONDS, None, True
        for outcome in outcomes:
            if isinstance(outcome, str):
                defect = outcome
                break
            done += outcome
            if time.monotonic() > until:
                finished = False
                break
        everyone = from_all((done, defect, finished))
        defects = [found for _, found, _ in everyone if found is not None]
        if defects:
            return "; ".join(defects[:3]), ""
        read, seconds = sum(count for count, _, _ in everyone), time.monotonic() - started
        if all(complete for _, _, complete in everyone):
            return None, f"verified {step}: {len(files)} files, {_size(read)} in {seconds:.1f} s"
        if rank == 0:
            tell(f"verifying {step}: {_size(read)} of {_size(total)}, {_size(int(read / seconds))}/s")


def _planned_again(run: Run, known_bad: dict[int, str]) -> Plan:
    """A plan without the damaged steps, or an error, on every rank."""
    outcome, error = None, None
    try:
        outcome = plan(run, known_bad)
    except ConfigError as refused:
        error = str(refused)
    errors = sorted({message for message in from_all(error) if message is not None})
    if errors or outcome is None:
        raise ConfigError("\n".join(errors))
    return outcome


def _require_one_view(found: Plan) -> None:
    """Every rank is to read the same step: file systems show different things on different machines."""
    mine = "no step"
    if found.source is not None:
        try:
            mine = f"step {found.source.iteration}, {manifest.read(found.source.step).digest[:12]}"
        except manifest.ManifestError as error:
            mine = str(error)
    seen = from_all(mine)
    if len(set(seen)) > 1:
        ranks = "; ".join(f"{view} on rank {seen.index(view)}" for view in sorted(set(seen)))
        raise ConfigError(
            f"--load: the ranks see different checkpoints: {ranks}; every rank has to see the same "
            "folder: put it on a file system that all machines share, or copy it to each"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
