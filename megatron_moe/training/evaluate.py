"""Mean loss of a split, per token, exact over all ranks; leaves no trace in the model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_moe.data.batches import Batch
from megatron_moe.report.records import EvalRecord
from megatron_moe.training.step import Model, forward_step, local_loss, sum_over_job
from megatron_moe.training.timers import untimed


def evaluate(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    *,
    split: str,
    iteration: int,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroupCollection,
) -> EvalRecord:
    """Forward passes over `num_micro_batches` micro-batches per rank, in evaluation mode and without gradients.

    Every token that the loss mask keeps weighs the same, whichever micro-batch or rank it stands in. No expert is
    counted, no random number drawn (dropout is off).

    Args:
        batches: one iterator of micro-batches per model chunk.
    """
    begin = time.perf_counter()
    with evaluation_mode(model):
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(batches) if len(batches) > 1 else batches[0],
            model=list(model),
            num_microbatches=num_micro_batches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=True,
        )
        loss_sum, tokens = sum_over_job(*local_loss(losses, pg_collection))
    loss = loss_sum / tokens if tokens else float("nan")
    return EvalRecord(iteration, split, loss, int(tokens), time.perf_counter() - begin)


@contextlib.contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """All parameters gathered, modules in evaluation mode, no gradients; training mode again afterwards."""
    with gathered_parameters(model), untimed(model), torch.no_grad():
        for chunk in model:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in model:
                chunk.train()


@contextlib.contextmanager
def gathered_parameters(model: Model) -> Iterator[None]:
    """Finish what `--overlap-param-gather` left to the next training forward, so that every weight is the new one.

    Without that flag the optimizer step has gathered them already.
    """
    hooked = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
    for chunk in hooked:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
