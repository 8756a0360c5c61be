"""Steps of a model on ranks: multi-token prediction, auxiliary losses, overlapped micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe.config.schema import Run
from tests.helpers import model_cases

SEQUENCES = model_cases.SEQUENCES


def steps(run: Run, count: int = 1, loss_mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Build the model and take a step of Adam, or more on the same global batch.

    Args:
        loss_mask: [4, S] of the global batch; None: as in `global_batch`.

    Returns:
        losses, mtp_losses, grad_norms of each step; counts: layer number -> tokens per expert in the last step.
        aux, dropped: the same for this rank's layers' auxiliary losses and dropped choices. biases: of their routers.
        tables: class of each embedding table on this rank.
        tensors: global name -> (cut, weight, gradient of the last step), as `model_cases.one_step`.
    """
    from megatron_moe.model.build import build_model
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.evaluate import gathered_parameters
    from megatron_moe.training.metrics import expert_load
    from megatron_moe.training.optimizer import build_optimizer, build_scheduler
    from megatron_moe.training.step import connect, train_step

    pg_collection = groups.initialize(run)
    seed_everything(run)
    chunks = build_model(run, pg_collection, model_cases.VOCAB)
    optimizer = build_optimizer(run, chunks, pg_collection)
    scheduler = build_scheduler(run, optimizer)
    scheduler.step(increment=0)
    connect(chunks, optimizer)
    results = []
    for _ in range(count):
        micro_batches = share_of_global_batch(run, pg_collection, loss_mask)
        results.append(
            train_step(
                chunks,
                optimizer,
                scheduler,
                [iter(micro_batches) for _ in chunks],
                num_micro_batches=len(micro_batches),
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=pg_collection,
            )
        )
    assert all(result.committed for result in results)
    update = results[-1].router_update
    tensors: dict[str, Any] = {}
    with gathered_parameters(chunks):
        for chunk in chunks:
            weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
            tensors.update(model_cases._tensors(chunk, weights))
    return {
        "losses": [result.loss for result in results],
        "mtp_losses": [result.mtp_losses for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "counts": expert_load(update, pg_collection).tokens_per_expert,
        "aux": {n: {k: float(v) for k, v in one.items()} for n, one in zip(update.layer_numbers, update.aux_losses)},
        "biases": [bias for bias in update.expert_bias if bias is not None],
        "dropped": {n: d.tolist() for n, d in zip(update.layer_numbers, update.dropped_per_expert) if d is not None},
        "tables": [type(m).__name__ for chunk in chunks for name, m in chunk.named_modules() if "word_emb" in name],
        "tensors": tensors,
    }


def share_of_global_batch(
    run: Run, pg_collection: Any, loss_mask: torch.Tensor | None = None
) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of the four sequences; see `steps`."""
    from megatron_moe.parallel.sequence import context_parallel_slice

    cp, dp = pg_collection.cp, pg_collection.dp
    share, size = SEQUENCES // dp.size(), run.training.micro_batch_size
    batch = model_cases.global_batch(run.model.seq_length)
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    batch = {key: context_parallel_slice(tensor, cp.rank(), cp.size()) for key, tensor in batch.items()}
    first = dp.rank() * share
    return [
        {key: tensor[row : row + size] for key, tensor in batch.items()} for row in range(first, first + share, size)
    ]
