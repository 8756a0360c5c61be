"""What the ranks do in test_mtp.py and test_mtp_ranks.py: steps of a model with multi-token prediction."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe.config.schema import Run
from tests.helpers import model_cases

SEQUENCES = model_cases.SEQUENCES


def steps(run: Run, count: int = 2) -> dict[str, Any]:
    """Build the model and take some steps of Adam on the same global batch.

    Returns:
        losses, mtp_losses, grad_norms of each step; counts: layer number -> tokens per expert in the last step.
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
        micro_batches = share_of_global_batch(run, pg_collection)
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
    tensors: dict[str, Any] = {}
    with gathered_parameters(chunks):
        for chunk in chunks:
            weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
            tensors.update(model_cases._tensors(chunk, weights))
    return {
        "losses": [result.loss for result in results],
        "mtp_losses": [result.mtp_losses for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "counts": expert_load(results[-1].router_update, pg_collection).tokens_per_expert,
        "tables": [type(m).__name__ for chunk in chunks for name, m in chunk.named_modules() if "word_emb" in name],
        "tensors": tensors,
    }


def share_of_global_batch(run: Run, pg_collection: Any) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of the four sequences."""
    from megatron_moe.parallel.sequence import context_parallel_slice

    cp, dp = pg_collection.cp, pg_collection.dp
    share, size = SEQUENCES // dp.size(), run.training.micro_batch_size
    batch = {
        key: context_parallel_slice(tensor, cp.rank(), cp.size())
        for key, tensor in model_cases.global_batch(run.model.seq_length).items()
    }
    first = dp.rank() * share
    return [
        {key: tensor[row : row + size] for key, tensor in batch.items()} for row in range(first, first + share, size)
    ]


def moved(length: int, steps: list[int], cp_size: int) -> dict[int, dict[str, torch.Tensor]]:
    """A sequence of counted tokens shifted by each of `steps`, and the gradient of (shifted x 1, 2, 3, ...) by it."""
    from megatron_moe.config.schema import replace
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.sequence import all_gather_sequence, context_parallel_slice, shifted

    group = groups.initialize(replace(Run(), context_parallel_size=cp_size)).cp
    whole = torch.stack([torch.arange(1, length + 1), torch.arange(101, length + 101)])
    part = context_parallel_slice(whole, group.rank(), group.size())

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return all_gather_sequence(x.detach().t(), group).t()

    found = {}
    for by in steps:
        x = part.double().requires_grad_()
        out = shifted(x, by, group)
        (out * part).sum().backward()
        assert x.grad is not None
        found[by] = {"out": gathered(out), "grad": gathered(x.grad), "ids": gathered(shifted(part, by, group))}
    return found
