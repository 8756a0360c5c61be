"""Text generation under any layout, through the engine's own schedule.

All ranks call these functions together and get the same result. There is no cache: each token costs one forward pass
over the padded sequence, which is enough for a sample at the end of a run. `key_value_cache.py` has a cache, for a
model that is whole in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.engine.schedules import get_attr_wrapped_model, get_forward_backward_func
from megatron_moe.parallel.sequence import context_parallel_slice, holder

Chunks = Sequence[torch.nn.Module]


@dataclass(frozen=True)
class Sampling:
    """The rule by which a token is chosen from its logits.

    temperature: 0 takes the likeliest token; otherwise the logits are divided by it and a token is drawn.
    top_k: draw from this many likeliest tokens; None: from all.
    top_p: draw from the fewest likeliest tokens that have this probability together, after `top_k`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token for logits [V], fp32 on the CPU; `generator` is used if it is drawn."""
    if sampling.temperature <= 0.0:
        return int(logits.argmax())
    probs = torch.softmax(_likely(logits / sampling.temperature, sampling), dim=-1)
    return int(torch.multinomial(probs, 1, generator=generator))


def _likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits with -inf for the tokens that are not drawn from. Of equally likely ones the first ids stay."""
    if sampling.top_k is None and sampling.top_p >= 1.0:
        return logits
    ranked, ids = logits.sort(descending=True, stable=True)
    ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    if sampling.top_p < 1.0:
        probs = torch.softmax(ranked, dim=-1)
        # A token stays while those before it have less than top_p: the likeliest one always does.
        stays = probs.cumsum(-1) - probs < sampling.top_p
        ranked, ids = ranked[stays], ids[stays]
    return torch.full_like(logits, float("-inf")).scatter(0, ids, ranked)


def next_token_logits(chunks: Chunks, tokens: Tensor, position: int) -> Tensor:
    """Return the logits of the token after `tokens[:, position]`.

    The model is in evaluation mode meanwhile, so that no tokens are counted or dropped. Tokens after `position` are
    padding, which does not change the result because attention is causal.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        tokens: [B, S] int64 on the device, the same on every rank; S / CP is a multiple of TP under sequence
            parallelism, and S of 2 x CP under context parallelism.
        position: index of the last token that is known, below S.

    Returns:
        [B, padded vocabulary] fp32, the same on every rank.
    """
    groups = get_attr_wrapped_model(chunks[0], "pg_collection")
    batch, length = tokens.shape
    # The interleaved schedule needs as many micro-batches as stages: the same one is repeated, the first result used.
    repeats = groups.pp.size() if len(chunks) > 1 else 1
    # One of the ranks that share the sequence has the position; the others' logits are of another, and not used.
    cp_rank, index = holder(position, length, groups.cp.size())
    with evaluation(chunks):
        outputs = get_forward_backward_func()(
            forward_step_func=lambda batches, chunk: (chunk(*next(batches)), lambda logits, **_: logits[:, index]),
            data_iterator=[_micro_batches(tokens, repeats, groups.cp) for _ in chunks],
            model=list(chunks),
            num_microbatches=repeats,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if outputs:
        logits = _gather_vocabulary(outputs[0].float(), groups.tp)
    else:
        logits = torch.empty(0, device=tokens.device)
    logits = _from_last_stage(logits, batch, groups.pp)
    if groups.cp.size() > 1:
        dist.broadcast(logits, dist.get_global_rank(groups.cp, cp_rank), group=groups.cp)
    return logits


def generate(
    chunks: Chunks,
    prompt_ids: Sequence[int],
    num_tokens: int,
    seq_length: int,
    *,
    vocab_size: int,
    temperature: float = 0.0,
    seed: int = 0,
    end_id: int | None = None,
) -> list[int]:
    """Continue a prompt token by token.

    Args:
        chunks: this rank's model chunks.
        prompt_ids: at least one token; of a prompt longer than seq_length the end is used.
        num_tokens: the largest number of tokens to generate.
        seq_length: length every forward pass is padded to; older tokens drop out when it is full.
        vocab_size: ids from here on are padding of the vocabulary and not chosen.
        temperature: see `Sampling`.
        seed: the seed of the draws.
        end_id: the token to stop after; None: stop at `num_tokens`.

    Returns:
        The new tokens, without the prompt; the same list on every rank.
    """
    if not prompt_ids:
        raise ValueError("a prompt needs at least one token")
    sampling, generator = Sampling(temperature), torch.Generator().manual_seed(seed)
    known, device = list(prompt_ids), platform.device()
    for _ in range(num_tokens):
        window = known[-seq_length:]
        tokens = torch.zeros(1, seq_length, dtype=torch.int64, device=device)
        tokens[0, : len(window)] = torch.tensor(window, device=device)
        logits = next_token_logits(chunks, tokens, len(window) - 1)[0, :vocab_size].cpu()
        known.append(_agreed(choose(logits, sampling, generator)))
        if known[-1] == end_id:
            break
    return known[len(prompt_ids) :]


def _agreed(token: int) -> int:
    """Return rank 0's token, since model replicas may differ in the last bit and so in a draw."""
    if dist.get_world_size() == 1:
        return token
    shared = torch.tensor([token], device=platform.device())
    dist.broadcast(shared, 0)
    return int(shared)


def _micro_batches(tokens: Tensor, repeats: int, cp: ProcessGroup) -> Iterator[tuple[Tensor, Tensor, None]]:
    """Return this rank's (tokens, positions, no mask) as the model's forward takes them."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if cp.size() > 1:
        tokens, positions = (context_parallel_slice(whole, cp.rank(), cp.size()) for whole in (tokens, positions))
    return iter([(tokens, positions, None)] * repeats)


def _gather_vocabulary(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return [B, V] from [B, V/TP] of every TP rank."""
    if group.size() == 1:
        return logits.contiguous()
    parts = [torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _from_last_stage(logits: Tensor, batch: int, group: ProcessGroup) -> Tensor:
    """Broadcast the last pipeline stage's logits to every stage."""
    if group.size() == 1:
        return logits
    last = dist.get_global_rank(group, group.size() - 1)
    width = torch.tensor([logits.numel() // batch], device=logits.device)
    dist.broadcast(width, last, group=group)
    if logits.numel() == 0:
        logits = torch.empty(batch, int(width), device=logits.device)
    dist.broadcast(logits, last, group=group)
    return logits


@contextlib.contextmanager
def evaluation(chunks: Chunks) -> Iterator[None]:
    """Set evaluation mode without gradients within the block, and restore each chunk's mode afterwards."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, mode in zip(chunks, modes):
            chunk.train(mode)
