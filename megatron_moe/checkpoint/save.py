"""Write one step: hidden folder, all ranks' files, then one rename."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint import dist, folder, optimizer_state, random_state
from megatron_moe.checkpoint.state import FORMAT_VERSION, Progress, Trained, layout, metadata, model_state
from megatron_moe.config.schema import Run, flatten
from megatron_moe.parallel.groups import rank_facts


def save(run: Run, trained: Trained, progress: Progress, *, facts: dict[str, Any]) -> Path:
    """Write the step of `progress` into `--save` and return its folder. Collective over all ranks.

    Parameters have to be gathered (`training.evaluate.gathered_parameters`). fp32 state is written as fp32.

    Args:
        facts: plain values worth keeping beside the tensors, such as versions.

    Raises:
        OSError: the step could not be written; what is there already stays as it was. FileExistsError where the step
            exists: nothing is overwritten.
    """
    root = Path(run.checkpoint.save or "")
    place = rank_facts()
    _on_rank_zero(place.rank, "prepare the folder", lambda: folder.open_hidden(root, progress.iteration))
    hidden = folder.hidden_folder(root, progress.iteration)
    state = model_state(trained)
    if not run.checkpoint.no_save_optim:
        options = metadata(trained.pg_collection)
        state["optimizer"] = optimizer_state.sharded_state(trained.optimizer, state, options, loading=False)
    dist.save_tensors(state, hidden)
    if not run.checkpoint.no_save_rng:
        random_state.save(random_state.path_of(hidden, place.rank))
    torch.distributed.barrier()

    def complete() -> None:
        about = {
            "format_version": FORMAT_VERSION,
            **asdict(progress),
            "scheduler": trained.scheduler.state_dict(),
            "has_optimizer": not run.checkpoint.no_save_optim,
            "layout": layout(place),
            **facts,
        }
        folder.write_json(hidden / folder.CONFIG, flatten(run))
        folder.write_json(hidden / folder.STATE, about)
        folder.publish(root, progress.iteration)

    _on_rank_zero(place.rank, "complete the step", complete)
    return folder.step_folder(root, progress.iteration)


def _on_rank_zero(rank: int, task: str, work: Callable[[], object]) -> None:
    """Do something on rank 0; where it fails, it fails on every rank, so that none waits for one that left."""
    error: OSError | None = None
    if rank == 0:
        try:
            work()
        except OSError as caught:
            error = caught
    verdict = [str(error) if error is not None else None]
    torch.distributed.broadcast_object_list(verdict, src=0)
    if error is not None:
        raise error
    if verdict[0] is not None:
        raise OSError(f"checkpoint: rank 0 could not {task}: {verdict[0]}")
