"""What the ranks do in test_layout_matrix.py: many layouts in one set of processes, only the groups are made anew."""

from __future__ import annotations

import os
import traceback
from typing import Any, NamedTuple


class Job(NamedTuple):
    """One layout of one model: `request` on `ranks` ranks; rank r's record goes to `folder`/r.pt."""

    request: Any
    ranks: int
    folder: str


def measure_all(jobs: list[Job], limit: float) -> None:
    """Measure every job. Jobs of fewer ranks than there are run beside each other, on ranks of their own.

    What fails is written in its record's place, and the next job begins: a job that lost a rank ends by itself, since
    its groups' connections close.
    """
    import torch
    import torch.distributed as dist

    from megatron_moe.apps.doctor.measure import measure
    from megatron_moe.io.local_ranks import join_group

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for size in sorted({job.ranks for job in jobs}):
        team, seat = divmod(rank, size)
        teams = world // size
        mine = [job for job in jobs if job.ranks == size][team::teams]
        for job in mine:
            try:
                join_group(os.path.join(job.folder, "store"), seat, size, limit)
                record = measure(job.request)
            except Exception:
                record = {"error": traceback.format_exc()}
            torch.save(record, os.path.join(job.folder, f"{seat}.pt"))
