"""What the ranks do in test_build_ranks.py: one step of a model under a layout, and where its tensors come from."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe.config.schema import Run

VOCAB = 256
SEQUENCES = 4


def global_batch(length: int) -> dict[str, torch.Tensor]:
    """Four sequences, the same for every layout; some tokens have no loss."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, length + 1), generator=generator)
    mask = torch.ones(SEQUENCES, length)
    mask[:, 5:9] = 0  # as many in each sequence: then a mean over micro-batches is a mean over tokens
    positions = torch.arange(length).expand(SEQUENCES, length)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def one_step(run: Run) -> dict[str, Any]:
    """Build the model, run one step up to the gradient norm, and ask for a token.

    Returns:
        loss: mean over the global batch, on every rank. grad_norm. logits [1, VOCAB] after the first ten tokens.
        tensors: global name -> (cut, weight, gradient); `cut` lists (axis, index, parts, stride) that lead from the
        full tensor to this rank's.
    """
    from megatron_moe.model.build import build_model
    from megatron_moe.model.generate import next_token_logits
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.optimizer import build_optimizer

    pg_collection = groups.initialize(run)
    seed_everything(run)
    chunks = build_model(run, pg_collection, VOCAB)
    optimizer = build_optimizer(run, chunks, pg_collection)
    weights = [{name: p.detach().clone() for name, p in chunk.named_parameters()} for chunk in chunks]
    tokens = global_batch(run.model.seq_length)["tokens"][:1]
    logits = next_token_logits(chunks, tokens, position=9)
    loss = forward_backward(run, chunks, pg_collection)
    optimizer.prepare_grads()
    tensors: dict[str, Any] = {}
    for chunk, kept in zip(chunks, weights):
        tensors.update(_tensors(chunk, kept))
    return {"loss": loss, "grad_norm": float(optimizer.get_grad_norm()), "logits": logits, "tensors": tensors}


def forward_backward(
    run: Run, chunks: list[torch.nn.Module], pg_collection: Any, samples: dict[str, torch.Tensor] | None = None
) -> float:
    """All micro-batches through the engine's schedule; gradients are reduced in main_grad. Returns the global loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_moe.parallel.sequence import context_parallel_slice
    from megatron_moe.training.finalize_model_grads import finalize_model_grads
    from megatron_moe.training.step import forward_step
    from megatron_moe.training.step_sums import local_loss, sum_over_ranks

    dp_rank, dp_size = pg_collection.dp.rank(), pg_collection.dp.size()
    cp = pg_collection.cp
    batch = {
        key: context_parallel_slice(tensor, cp.rank(), cp.size())
        for key, tensor in (samples or global_batch(run.model.seq_length)).items()
    }
    share = len(batch["tokens"]) // dp_size
    rows = range(dp_rank * share, (dp_rank + 1) * share)
    micro_batches = [{key: tensor[row : row + 1] for key, tensor in batch.items()} for row in rows]
    for chunk in chunks:
        chunk.zero_grad_buffer()
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    iterators = [iter(micro_batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=share,
        seq_length=run.model.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    loss_sum, count = sum_over_ranks(local_loss(losses, pg_collection))
    return loss_sum / count


def _tensors(ddp: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    from megatron_moe.apps.doctor.assemble import parameter_shards

    names = {id(parameter): name for name, parameter in ddp.named_parameters()}
    return {
        place.name: (place.cuts, weights[names[id(parameter)]], parameter.main_grad.detach().clone())
        for place, parameter in parameter_shards(ddp)
    }


def continuation(run: Run, temperature: float) -> list[int]:
    """Five tokens after a prompt that is longer than the sequence."""
    from megatron_moe.model.build import build_model
    from megatron_moe.model.generate import generate
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything

    pg_collection = groups.initialize(run)
    seed_everything(run)
    chunks = build_model(run, pg_collection, VOCAB)
    prompt = global_batch(run.model.seq_length)["tokens"].flatten().tolist()[: run.model.seq_length + 3]
    counts = [buffer for chunk in chunks for name, buffer in chunk.named_buffers() if "local_tokens" in name]
    new = generate(chunks, prompt, 5, run.model.seq_length, vocab_size=200, temperature=temperature, seed=3)
    assert all(not count.any() for count in counts)
    assert all(chunk.training for chunk in chunks)
    return new
