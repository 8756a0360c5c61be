"""Generation with a key-value cache, one token per forward pass.

During a generation every attention of the model is wrapped by a module of this file; afterwards the model is as it was.
Training does not use the cache, and no part of it is saved. The whole model has to be in one process.

Grouped-query attention caches rotated keys and values, g (dk + dv) numbers per token. Latent attention caches the
latent after its norm and the one rotated key, rkv + dr numbers for all heads, and multiplies the query by the
up-projection of keys, and the context by that of values, instead of expanding every latent again (DeepSeek-V2, arXiv
2405.04434, section 2.1.2: the up-projections are absorbed).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.modules import fp32_parameters
from megatron_moe.engine.schedules import get_attr_wrapped_model
from megatron_moe.model.attention import SDPACoreAttention, attend_with_last
from megatron_moe.model.generate import Sampling, choose, evaluation
from megatron_moe.model.mla import LatentAttention
from megatron_moe.model.rotary import rotated

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
    # The engine's angles of grouped-query attention, fp32 [capacity, 1, 1, rotated width]
    rotary = getattr(whole, "rotary_pos_emb", None)
    table = None if rotary is None else rotary(capacity)
    with evaluation([model]), contextlib.ExitStack() as undo:
        for layer, attention in zip(whole.decoder.layers, attentions):
            undo.callback(setattr, layer, "self_attention", attention)
            if isinstance(attention, LatentAttention):
                layer.self_attention = _CachedLatentAttention(attention, length)
            else:
                core = attention.core_attention
                undo.callback(setattr, attention, "core_attention", core)
                attention.core_attention = _CachedCore(core, length)
                layer.self_attention = _CachedSelfAttention(attention, table, length)

        def step(tokens: Tensor) -> Tensor:
            length.check(tokens.shape[1])
            # Positions are attention's: no model has a table of them.
            logits = model(tokens, None, None)[:, -1]
            length.known += tokens.shape[1]
            return logits.float()

        yield step


class _Length:
    """The number of cached tokens, the same in all layers; `known` grows when the last layer is done."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.known = capacity, 0

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
    """Core attention that caches the keys and values it is given, after their rotation."""

    def __init__(self, core: torch.nn.Module, length: _Length) -> None:
        super().__init__()
        self.core, self._length = _own(core), length
        self._keys, self._values = _Rows(length), _Rows(length)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Attend as SDPACoreAttention does; key and value are those of the new tokens."""
        keys, values = self._keys.put(key), self._values.put(value)
        if self._length.known == 0:
            return self.core(query, key, value, *rest, **options)
        return attend_with_last(query, keys, values, self.core.scale).flatten(2)


class _CachedSelfAttention(torch.nn.Module):
    """The engine's attention with rotary positions that continue after the cached tokens."""

    def __init__(self, attention: torch.nn.Module, table: Tensor | None, length: _Length) -> None:
        super().__init__()
        self.attention, self._table, self._length = attention, table, length

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> Any:
        """Attend as the engine's SelfAttention, but not at the model's positions, which start at 0 in each pass."""
        if self._table is not None:
            known = self._length.known
            rotary_pos_emb = self._table[known : known + hidden_states.shape[0]]
        return self.attention(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **options)


class _CachedLatentAttention(torch.nn.Module):
    """Latent attention that caches [latent, rotated key] of every token."""

    def __init__(self, attention: LatentAttention, length: _Length) -> None:
        super().__init__()
        _own(attention.core_attention)
        self.attention, self._length, self._kept = attention, length, _Rows(length)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Attend as LatentAttention does."""
        attention, entered = self.attention, hidden_states.dtype
        if fp32_parameters(attention) is not None:  # an island, whose own hooks are bypassed here
            hidden_states = hidden_states.float()
        query_latent, latent_and_key_pos = attention.latents(hidden_states)
        latent, key_pos = attention.latent_and_key(latent_and_key_pos)
        kept = self._kept.put(torch.cat((latent, self._rotated(key_pos.unsqueeze(2)).squeeze(2)), dim=-1).unsqueeze(2))
        if self._length.known == 0:
            query, key, value = attention.query_key_value(query_latent, latent_and_key_pos)
            context = attention.core_attention(query, key, value, None, attn_mask_type=attention.attn_mask_type)
        else:
            context = self._absorbed(*attention.query_parts(query_latent), kept)
        output, bias = attention.linear_proj(context)
        return output.to(entered), bias

    def _rotated(self, x: Tensor) -> Tensor:
        """Return x [S, B, heads, dr] rotated for the positions after the cached tokens."""
        rotary, known = self.attention.rotary, self._length.known
        if rotary is None:
            return x
        return rotated(x, *(t[known : known + x.shape[0]] for t in rotary.tables(self._length.capacity, x.device)))

    def _absorbed(self, query_rest: Tensor, query_pos: Tensor, kept: Tensor) -> Tensor:
        """Return the context [1, B, n dv] of one token's query, [1, B, n, dn] and [1, B, n, dr], over the cached rows.

        q . (K c) = (K' q) . c and sum p (V c) = V (sum p c): all heads share one key and one value per token.
        """
        attention, config = self.attention, self.attention.config
        up = attention.linear_kv_up_proj.weight.unflatten(0, (attention.num_heads, attention.key_value_width))
        up_key, up_value = up.split((config.qk_head_dim, config.v_head_dim), dim=1)
        # The weight of a module that is kept in fp32 is fp32, between tensors of the model's dtype.
        query = torch.einsum("sbnd,ndr->sbnr", query_rest.to(up.dtype), up_key).to(query_rest.dtype)
        query = torch.cat((query, self._rotated(query_pos)), dim=-1)
        context = attend_with_last(query, kept, kept[..., : config.kv_lora_rank], attention.core_attention.scale)
        return torch.einsum("sbnr,nvr->sbnv", context.to(up.dtype), up_value).to(query_rest.dtype).flatten(2)


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
