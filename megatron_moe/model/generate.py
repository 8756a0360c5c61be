"""Text generation under any layout, through the engine's own schedule.

All ranks call `generate` together and get the same result. It has no cache: each token costs one forward pass over the
padded sequence, which is enough for a sample at the end of a run. `continuation` has a cache, for a model that is whole
in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.modules import fp32_parameters
from megatron_moe.engine.schedules import get_attr_wrapped_model, get_forward_backward_func
from megatron_moe.model.attention import SDPACoreAttention, attend_with_last
from megatron_moe.model.cross_entropy import cross_entropy
from megatron_moe.model.mla import LatentAttention, rotated
from megatron_moe.model.rotary import Angles
from megatron_moe.parallel.collectives import all_gather_rows
from megatron_moe.parallel.sequence import context_parallel_slice, holder
from megatron_moe.platform.protocols import ProcessGroups

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
    logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1.0:
        # What is not drawn from gets -inf. Of equally likely tokens the first ids stay.
        ranked, ids = logits.sort(descending=True, stable=True)
        ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
        if sampling.top_p < 1.0:
            probs = torch.softmax(ranked, dim=-1)
            # A token stays while those before it have less than top_p: the likeliest one always does.
            stays = probs.cumsum(-1) - probs < sampling.top_p
            ranked, ids = ranked[stays], ids[stays]
        logits = torch.full_like(logits, float("-inf")).scatter(0, ids, ranked)
    return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))


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
    # One of the ranks that share the sequence has the position; the others' logits are of another, and not used.
    cp_rank, index = holder(position, length, groups.cp.size())
    own = _forward(chunks, tokens, groups, lambda logits: logits[:, index])
    if own is not None:
        logits = all_gather_rows(own.float().t(), groups.tp).t().contiguous()
    else:
        logits = torch.empty(batch, get_attr_wrapped_model(chunks[0], "vocab_size"), device=tokens.device)
    if groups.pp.size() > 1:
        dist.broadcast(logits, dist.get_global_rank(groups.pp, groups.pp.size() - 1), group=groups.pp)
    if groups.cp.size() > 1:
        dist.broadcast(logits, dist.get_global_rank(groups.cp, cp_rank), group=groups.cp)
    return logits


def token_scores(chunks: Chunks, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and the likeliest token in its place.

    The ranks of one replica of the model call it together. The model is in evaluation mode meanwhile.

    Args:
        chunks, tokens: see `next_token_logits`.
        labels: [B, S] int64 on the device, the tokens that are asked for after those of `tokens`.

    Returns:
        [B, S] fp64 (fp32's values), in nats, and [B, S] int64; the same on every rank of the replica.
    """
    groups = get_attr_wrapped_model(chunks[0], "pg_collection")
    places = torch.arange(tokens.shape[1], device=tokens.device)
    if groups.cp.size() > 1:
        places = context_parallel_slice(places, groups.cp.rank(), groups.cp.size())

    def scored(logits: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).contiguous()
        losses = cross_entropy(flat, labels[:, places].flatten(), groups.tp)
        best, ids = flat.max(dim=1)
        best, ids = (all_gather_rows(own[None], groups.tp) for own in (best, ids + groups.tp.rank() * flat.shape[1]))
        likeliest = ids.gather(0, best.argmax(dim=0, keepdim=True))[0]  # of equal ones the first id
        return torch.stack((-losses.double(), likeliest.double())).unflatten(1, logits.shape[:2])

    # Every place is one rank's, and nothing is added to it: sums are exact.
    scores = torch.zeros(2, *tokens.shape, dtype=torch.float64, device=tokens.device)
    own = _forward(chunks, tokens, groups, scored)
    if own is not None:
        scores[:, :, places] = own
    for group in (groups.cp, groups.pp):
        if group.size() > 1:
            dist.all_reduce(scores, group=group)
    return scores[0], scores[1].long()


def _forward(
    chunks: Chunks, tokens: Tensor, groups: ProcessGroups, of_logits: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return what a function makes of this rank's logits [B, S / CP, V / TP]; None before the last stage."""
    batch, length = tokens.shape
    # The interleaved schedule needs as many micro-batches as stages: the same one is repeated, the first result used.
    repeats = groups.pp.size() if len(chunks) > 1 else 1
    with evaluation(chunks):
        outputs = get_forward_backward_func()(
            forward_step_func=lambda batches, chunk: (chunk(*next(batches)), lambda logits, **_: of_logits(logits)),
            data_iterator=[_micro_batches(tokens, repeats, groups.cp) for _ in chunks],
            model=list(chunks),
            num_microbatches=repeats,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return outputs[0] if outputs else None


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
        token = torch.tensor([choose(logits, sampling, generator)], device=device)
        dist.broadcast(token, 0)  # model replicas may differ in the last bit, and so in a draw
        known.append(int(token))
        if known[-1] == end_id:
            break
    return known[len(prompt_ids) :]


def _micro_batches(tokens: Tensor, repeats: int, cp: ProcessGroup) -> Iterator[tuple[Tensor, Tensor, None]]:
    """Return this rank's (tokens, positions, no mask) as the model's forward takes them."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if cp.size() > 1:
        tokens, positions = (context_parallel_slice(whole, cp.rank(), cp.size()) for whole in (tokens, positions))
    return iter([(tokens, positions, None)] * repeats)


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


# ---- With a key-value cache, one token per forward pass.
#
# During a generation every attention of the model is wrapped by a module of this file; afterwards the model is as it
# was. Training does not use the cache, and no part of it is saved. The whole model has to be in one process.
#
# Grouped-query attention caches rotated keys and values, g (dk + dv) numbers per token. Latent attention caches the
# latent after its norm and the one rotated key, rkv + dr numbers for all heads, and multiplies the query by the
# up-projection of keys, and the context by that of values, instead of expanding every latent again (DeepSeek-V2, arXiv
# 2405.04434, section 2.1.2: the up-projections are absorbed).


Step = Callable[[Tensor], Tensor]
"""The next tokens [B, S] int64 -> logits [B, padded vocabulary] fp32 of the token after the last one. The first call
takes the whole prompt, every other call one token."""


def numbers_per_token(run: Run) -> int:
    """Return how many numbers of the model's dtype all layers together cache per token."""
    model = run.model
    if model.multi_latent_attention:
        return model.num_layers * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    return model.num_layers * 2 * run.derived.num_query_groups * run.derived.head_size


@contextlib.contextmanager
def cached(model: torch.nn.Module, capacity: int) -> Iterator[Step]:
    """Let a model continue where its last forward pass ended, in evaluation mode and without gradients meanwhile.

    Args:
        model: the one chunk of a model that is whole in this process, wrapped or not.
        capacity: tokens of the prompt and the answer together, at most the model's number of positions.

    Raises:
        ValueError: the model is split over processes, has Transformer Engine's attention, or fewer positions.
    """
    whole = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    split = {name: getattr(whole.pg_collection, name).size() for name in ("tp", "pp", "cp", "ep")}
    if any(size > 1 for size in split.values()):
        raise ValueError(f"a key-value cache needs the whole model in one process, not {split}")
    if capacity > whole.max_sequence_length:
        raise ValueError(f"a key-value cache of {capacity} tokens: the model has {whole.max_sequence_length} positions")
    length = _Length(capacity)
    attentions = [layer.self_attention for layer in whole.decoder.layers]
    angles: Angles | None = getattr(whole, "rotary_pos_emb", None)  # latent attention has its own
    with evaluation([model]), contextlib.ExitStack() as undo:
        for layer, attention in zip(whole.decoder.layers, attentions):
            undo.callback(setattr, layer, "self_attention", attention)
            if isinstance(attention, LatentAttention):
                layer.self_attention = _CachedLatentAttention(attention, length)
            else:
                core = attention.core_attention
                undo.callback(setattr, attention, "core_attention", core)
                attention.core_attention = _CachedCore(core, length)
                layer.self_attention = _CachedSelfAttention(attention, length)
        seen: list[Tensor] = []

        def step(tokens: Tensor) -> Tensor:
            length.check(tokens.shape[1])
            end = length.known + tokens.shape[1]
            if angles is not None:
                seen.append(tokens)
                if length.known and angles.rotation.is_long(end) and not angles.rotation.is_long(length.known):
                    # LongRoPE: the cached keys are rotated at the frequencies of short sequences.
                    tokens, length.known = torch.cat(seen, dim=1), 0
                length.angles = angles.get_emb(tokens.shape[1], length.known)
            # Positions are attention's: no model has a table of them.
            logits = model(tokens, None, None)[:, -1]
            length.known = end
            return logits.float()

        yield step


class _Length:
    """The number of cached tokens, the same in all layers; `known` grows when the last layer is done.

    angles: of the new tokens, fp32 [S, 1, 1, rotated width]; None in latent attention and without positions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.known = capacity, 0
        self.angles: Tensor | None = None

    def check(self, new: int) -> None:
        """Refuse tokens that do not fit, and a second prompt: a token that sees all cached ones has to be the last."""
        if self.known + new > self.capacity:
            raise ValueError(f"{new} tokens behind {self.known}: the key-value cache has room for {self.capacity}")
        if self.known and new > 1:
            raise ValueError(f"{new} tokens behind {self.known}: after the prompt, tokens come one by one")


class _Rows:
    """One layer's cached rows, [B, g, capacity, width], in the dtype of the first rows that are put in."""

    def __init__(self, length: _Length) -> None:
        self._length = length
        self._rows: Tensor | None = None

    def put(self, new: Tensor) -> Tensor:
        """Append rows [S, B, g, width] and return a view of all so far, [B, g, known + S, width]."""
        known, end = self._length.known, self._length.known + new.shape[0]
        if self._rows is None:
            self._rows = new.new_empty(*new.shape[1:3], self._length.capacity, new.shape[3])
        self._rows[:, :, known:end] = new.permute(1, 2, 0, 3)
        return self._rows[:, :, :end]


class _CachedCore(torch.nn.Module):
    """Core attention that caches values and keys, these after their rotation and norm."""

    def __init__(self, core: torch.nn.Module, length: _Length) -> None:
        super().__init__()
        self.core, self._length = _own(core), length
        self._keys, self._values = _Rows(length), _Rows(length)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Attend as SDPACoreAttention does; key and value are those of the new tokens."""
        last, compared = self.core.compared(query, key)
        keys, values = self._keys.put(compared), self._values.put(value)
        if self._length.known == 0:
            return self.core(query, key, value, *rest, **options)
        core = self.core
        return attend_with_last(last, keys, values, core.scale, core.window, core.sinks(query)).flatten(2)


class _CachedSelfAttention(torch.nn.Module):
    """The engine's attention with rotary positions that continue after the cached tokens."""

    def __init__(self, attention: torch.nn.Module, length: _Length) -> None:
        super().__init__()
        self.attention, self._length = attention, length

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> Any:
        """Attend as the engine's SelfAttention, but not at the model's positions, which start at 0 in each pass."""
        return self.attention(hidden_states, *args, rotary_pos_emb=self._length.angles, **options)


class _CachedLatentAttention(torch.nn.Module):
    """Latent attention that caches [latent, rotated key] of every token."""

    def __init__(self, attention: LatentAttention, length: _Length) -> None:
        super().__init__()
        _own(attention.core_attention)
        self.attention, self._length, self._kept = attention, length, _Rows(length)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Attend as LatentAttention does."""
        attention, config, entered = self.attention, self.attention.config, hidden_states.dtype
        if fp32_parameters(attention) is not None:  # an island, whose own hooks are bypassed here
            hidden_states = hidden_states.float()
        query_latent, latent_and_key_pos = attention.latents(hidden_states)
        latent, key_pos = attention.latent_and_key(latent_and_key_pos)
        kept = self._kept.put(torch.cat((latent, self._rotated(key_pos.unsqueeze(2)).squeeze(2)), dim=-1).unsqueeze(2))
        if self._length.known == 0:
            query, key, value = attention.query_key_value(query_latent, latent_and_key_pos)
            context = attention.core_attention(query, key, value, None, attn_mask_type=attention.attn_mask_type)
        else:
            # One token's query [1, B, n, dn] and [1, B, n, dr], over the cached rows. q . (K c) = (K' q) . c and
            # sum p (V c) = V (sum p c): all heads share one key and one value per token.
            query_rest, query_pos = attention.query_parts(query_latent)
            up = attention.linear_kv_up_proj.weight.unflatten(0, (attention.num_heads, attention.key_value_width))
            up_key, up_value = up.split((config.qk_head_dim, config.v_head_dim), dim=1)
            # The weight of a module that is kept in fp32 is fp32, between tensors of the model's dtype.
            query = torch.einsum("sbnd,ndr->sbnr", query_rest.to(up.dtype), up_key).to(query_rest.dtype)
            query = torch.cat((query, self._rotated(query_pos)), dim=-1)
            context = attend_with_last(query, kept, kept[..., : config.kv_lora_rank], attention.core_attention.scale)
            context = torch.einsum("sbnr,nvr->sbnv", context.to(up.dtype), up_value).to(query_rest.dtype).flatten(2)
        output, bias = attention.linear_proj(context)
        return output.to(entered), bias

    def _rotated(self, x: Tensor) -> Tensor:
        """Return x [S, B, heads, dr] rotated for the positions after the cached tokens."""
        rotary, known = self.attention.rotary, self._length.known
        if rotary is None:
            return x
        return rotated(x, *(t[known : known + x.shape[0]] for t in rotary.tables(self._length.capacity, x.device)))


def _own(core: torch.nn.Module) -> SDPACoreAttention:
    """Refuse core attention that is not ours."""
    if not isinstance(core, SDPACoreAttention):
        raise ValueError(f"a key-value cache needs --transformer-impl local, not {type(core).__name__}")
    return core


def continuation(
    model: torch.nn.Module,
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    end_ids: Container[int] = (),
) -> Iterator[int]:
    """Continue a prompt, and yield each token as soon as it is chosen.

    Args:
        model: see `cached`; it is in use until the last token is taken or the iterator closed.
        prompt_ids: at least one token. num_tokens: the largest number of tokens to generate.
        vocab_size: ids from here on are padding of the vocabulary and not chosen.
        sampling: how a token is chosen; None: the likeliest one. seed: the seed of the draws.
        end_ids: the tokens to stop after; without any, stop at `num_tokens`.

    Raises:
        ValueError: for an empty prompt, and as `cached` for the prompt and `num_tokens` together.
    """
    if not prompt_ids:
        raise ValueError("a prompt needs at least one token")
    sampling, generator = sampling or Sampling(), torch.Generator().manual_seed(seed)
    device, new = platform.device(), list(prompt_ids)
    with cached(model, len(prompt_ids) + num_tokens) as step:
        for _ in range(num_tokens):
            logits = step(torch.tensor([new], device=device))[0, :vocab_size].cpu()
            new = [choose(logits, sampling, generator)]
            yield new[0]
            if new[0] in end_ids:
                return
