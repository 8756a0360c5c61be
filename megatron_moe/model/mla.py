"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), without Transformer Engine.

    q = up(norm(down(x)))  or  proj(x)         per head: qk_head_dim without position + qk_pos_emb_head_dim rotated
    c, k_pos = split(down(x))                  one latent and one rotated key for all heads
    k, v = split(up(norm(c)))                  per head: qk_head_dim + v_head_dim

The down projections are the same on every tensor-parallel rank. The engine splits their output over the ranks instead
and then does not sum the gradient of k_pos, which all heads share.

Context-parallel ranks exchange k and v in the core attention, or here norm(c) and k_pos, of which each rank makes the k
and v of the whole sequence. A rank's gradients of these are then of its own queries alone: those of c and k_pos are
summed when they go back to their ranks, those of the weight of `up` with all gradients of the dense weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.config.rotary import amplitude, yarn_magnitude
from megatron_moe.engine.layers import AttnMaskType, MegatronModule, checkpoint
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.model.attention import WHOLE
from megatron_moe.model.rotary import Rotation
from megatron_moe.moe.experts import without_output
from megatron_moe.parallel.collectives import all_gather_rows, shared_by_ranks
from megatron_moe.parallel.sequence import (
    Documents,
    all_gather_sequence,
    all_gather_split_sequence,
    context_parallel_slice,
)
from megatron_moe.platform.cpu_half_gemm import linear
from megatron_moe.platform.protocols import AutogradContext, EngineConfig, ProcessGroups

# DeepSeek's code leaves the latent norms at the default of its RMSNorm, whatever the model's rms_norm_eps is.
LATENT_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class MLASubmodules:
    """The classes that latent attention is built from.

    They are the engine's column- and row-parallel linear layers (or Transformer Engine's), the norm of the latents
    (None: no norm) and the core attention.
    """

    column_linear: type
    row_linear: type
    latent_norm: type | None
    core_attention: type


class LatentAttention(DeepcopyKeepsGroups, MegatronModule):
    """Latent self-attention for megatron-core's TransformerLayer, with the engine's names of parameters.

    Parameters, n heads over TP ranks: linear_q_proj [n (dn + dr), H], or linear_q_down_proj [rq, H], q_layernorm [rq]
    and linear_q_up_proj [n (dn + dr), rq]; linear_kv_down_proj [rkv + dr, H]; kv_layernorm [rkv]; linear_kv_up_proj
    [n (dn + dv), rkv]; linear_proj [H, n dv].

    Args:
        config: the engine's MLATransformerConfig.
        submodules: the classes it is built from.
        layer_number: global, one-based.
        attn_mask_type, cp_comm_type, pp_layer_offset, name: the engine's protocol.
        pg_collection: process groups; `tp` is used, and `cp` where a sequence is split over ranks.
        recomputed: modules that are recomputed in the backward pass, of which "core_attn" and "mla_up_proj" are used.
        rotation: of the rotary part of queries and keys; without it there are no positions.
        gathers_latents: whether latents are gathered over `cp`, in place of keys and values.
    """

    def __init__(
        self,
        config: EngineConfig,
        submodules: MLASubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroups | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        recomputed: Collection[str] = (),
        rotation: Rotation | None = None,
        gathers_latents: bool = False,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None  # the engine's protocol has a default
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        self.query_width = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.key_value_width = config.qk_head_dim + config.v_head_dim
        self.cp_group = pg_collection.cp if gathers_latents else None
        cp_position = (pg_collection.cp.rank(), pg_collection.cp.size()) if config.context_parallel_size > 1 else (0, 1)
        self.rotary = None if rotation is None else Rotary(rotation, *cp_position)
        self.rotary_of_keys = Rotary(rotation) if rotation is not None and gathers_latents else self.rotary
        self.recompute_core = "core_attn" in recomputed
        self.recompute_up = "mla_up_proj" in recomputed
        heads, hidden = config.num_attention_heads, config.hidden_size

        def column(input_size: int, output_size: int, buffer_name: str, **of_this_one: Any) -> Any:
            options = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
            return submodules.column_linear(
                input_size,
                output_size,
                init_method=config.init_method,
                tp_comm_buffer_name=buffer_name,
                tp_group=self.tp_group,
                **{"config": config, **options, **of_this_one},
            )

        def latent_norm(width: int) -> Any:
            norm = submodules.latent_norm
            return None if norm is None else norm(config=config, hidden_size=width, eps=LATENT_NORM_EPSILON)

        if config.q_lora_rank is None:
            self.linear_q_proj = column(hidden, heads * self.query_width, "q_proj")
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, config.q_lora_rank)
            self.q_layernorm = latent_norm(config.q_lora_rank)
            self.linear_q_up_proj = column(config.q_lora_rank, heads * self.query_width, "q_up_proj")
            # The engine sums the gradients of every q_layernorm over TP ranks (finalize_model_grads): right for the
            # norms of a rank's own heads. Ours has the whole gradient on every rank already, unless the sequence is
            # split: the mean of equal gradients does not change it.
            if self.q_layernorm is not None and not config.sequence_parallel:
                self.q_layernorm.weight.average_gradients_across_tp_domain = True
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = latent_norm(config.kv_lora_rank)
        # Latents that are gathered over CP ranks are gathered over TP ranks with them, and their gradients summed.
        alone: dict[str, Any] = {}
        if gathers_latents:
            alone = {"config": _without_sequence_parallel(config), "disable_grad_reduce": True}
        self.linear_kv_up_proj = column(config.kv_lora_rank, heads * self.key_value_width, "kv_up_proj", **alone)
        self.linear_proj = submodules.row_linear(
            heads * config.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp_group,
        )
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=softmax_scale(config, rotation),
            k_channels=self.query_width,
            v_channels=config.v_head_dim,
            cp_comm_type=WHOLE if gathers_latents else cp_comm_type,
            pg_collection=pg_collection,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: object = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ([S, B, H], bias or None) for hidden states [S, B, H].

        S is this rank's part of the sequence under sequence and context parallelism.

        Raises:
            ValueError: for rotary tables, packed sequences or inference caches, which are not supported.
        """
        unexpected = [key for key, argument in unused.items() if argument is not None]
        if rotary_pos_emb is not None or packed_seq_params is not None or unexpected:
            raise ValueError(f"latent attention has its own positions; got {unexpected or 'those of others'}")
        documents = Documents.of(attention_mask, hidden_states.shape[1])
        latents, attend = self.latents(hidden_states), partial(self._attend, attention_mask)
        expand = partial(self.query_key_value, documents=documents)
        if self.recompute_up and self.training:
            context = without_output(expand, attend, *latents)
        elif self.recompute_core and self.training and self.cp_group is not None:
            # What is kept for the core attention are latents, not the keys and values of the whole sequence.
            to_latents = partial(self._attend_to_latents, attention_mask)
            context = checkpoint(to_latents, False, self.query(latents[0], documents), latents[1])
        else:
            context = attend(*expand(*latents))
        return self.linear_proj(context)

    def latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query's latent [S, B, rq], or the hidden states if it has none, and [S, B, rkv + dr]."""
        query_latent = hidden_states if self.config.q_lora_rank is None else self.linear_q_down_proj(hidden_states)
        return query_latent, self.linear_kv_down_proj(hidden_states)

    def query_key_value(
        self, query_latent: Tensor, latent_and_key_pos: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [S, B, n, dn + dr], value [S, B, n, dv], for this rank's n heads.

        Under context parallelism S is this rank's part, of key and value the whole sequence where latents are gathered.
        """
        return self.query(query_latent, documents), *self.key_value(latent_and_key_pos, documents)

    def query(self, query_latent: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the query [S, B, n, dn + dr] from its latent."""
        query_rest, query_pos = self.query_parts(query_latent)
        if self.rotary is None:
            return torch.cat((query_rest, query_pos), dim=-1)
        return self.rotary.join(query_rest, query_pos, None if documents is None else documents.positions.t())

    def key_value(self, latent_and_key_pos: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Return key [S, B, n, dn + dr] and value [S, B, n, dv], from [S or S/TP, B, rkv + dr]."""
        latent, key_pos = self.latent_and_key(latent_and_key_pos)
        places = None if documents is None else documents.places
        positions = None if documents is None else documents.positions.t()
        # Backward: the gradients of all ranks' heads are summed, and each rank keeps its part of the sequence.
        if self.cp_group is not None:
            latent, key_pos = self._of_whole_sequence(latent, key_pos, self.cp_group, places)
            if positions is not None:
                positions = all_gather_sequence(positions.contiguous(), self.cp_group, places)
        else:
            key_pos = self._over_tp_ranks(key_pos)  # the latent is by its up projection
        key_value, _ = self.linear_kv_up_proj(latent)
        key_value = key_value.unflatten(-1, (self.num_heads, self.key_value_width))
        key_rest, value = key_value.split((self.config.qk_head_dim, self.config.v_head_dim), dim=-1)
        key_pos = key_pos.unsqueeze(2)  # it is for all heads
        if self.rotary_of_keys is not None:
            return self.rotary_of_keys.join(key_rest, key_pos, positions), value
        return torch.cat((key_rest, key_pos.expand(-1, -1, self.num_heads, -1)), dim=-1), value

    def query_parts(self, query_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query's parts [S, B, n, dn] and [S, B, n, dr] from its latent, the second not yet rotated."""
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(query_latent)
        else:
            query, _ = self.linear_q_up_proj(_normed(self.q_layernorm, query_latent))
        query = query.unflatten(-1, (self.num_heads, self.query_width))
        return query.split((self.config.qk_head_dim, self.config.qk_pos_emb_head_dim), dim=-1)

    def latent_and_key(self, latent_and_key_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent after its norm [..., rkv] and the key [..., dr], not yet rotated, from [..., rkv + dr]."""
        latent, key_pos = latent_and_key_pos.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), dim=-1)
        return _normed(self.kv_layernorm, latent), key_pos

    def _over_tp_ranks(self, rows: Tensor) -> Tensor:
        """Return rows [S, ...] that all tensor-parallel ranks read, from [S, ...], or [S / TP, ...] of each rank."""
        spread = all_gather_rows if self.config.sequence_parallel else shared_by_ranks
        return spread(rows, self.tp_group)

    def _of_whole_sequence(
        self, latent: Tensor, key_pos: Tensor, cp_group: ProcessGroup, places: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the latents [S, B, rkv] and keys [S, B, dr] of all context-parallel ranks, gathered as one tensor."""
        rows = torch.cat((latent, key_pos), dim=-1)
        if self.config.sequence_parallel:
            rows = all_gather_split_sequence(rows, self.tp_group, cp_group, places)
        else:
            rows = all_gather_sequence(self._over_tp_ranks(rows), cp_group, places)
        latent, key_pos = rows.split((latent.shape[-1], key_pos.shape[-1]), dim=-1)
        return latent, key_pos

    def _attend(self, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.recompute_core and self.training:
            return checkpoint(partial(self._core, mask), False, query, key, value)
        return self._core(mask, query, key, value)

    def _attend_to_latents(self, mask: Tensor | None, query: Tensor, latent_and_key_pos: Tensor) -> Tensor:
        return self._core(mask, query, *self.key_value(latent_and_key_pos, Documents.of(mask, query.shape[1])))

    def _core(self, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core_attention(query, key, value, attention_mask=mask, attn_mask_type=self.attn_mask_type)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer y = x W^T with the same W [output_size, input_size] on every tensor-parallel rank.

    Under sequence parallelism each rank has the gradient of its part of the sequence, and the engine sums them;
    otherwise all ranks have the same, whole gradient.
    """

    def __init__(self, config: EngineConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=platform.device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., output_size] for x [..., input_size]."""
        return linear(x, self.weight)


def _without_sequence_parallel(config: EngineConfig) -> EngineConfig:
    changed = copy.copy(config)
    changed.sequence_parallel = False
    return changed


def _normed(norm: torch.nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


# ---- Rotary positions.
#
# As in DeepSeek's code, neighbouring elements form a pair. The tables are fp32 and not module state, so that no cast
# reaches them.


def softmax_scale(config: EngineConfig, rotation: Rotation | None) -> float:
    """Return latent attention's scale of q k^T: 1/sqrt(key width), times yarn's squared magnitude if configured."""
    scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
    if rotation is not None and rotation.model.rope_type == "yarn" and rotation.model.mscale_all_dim:
        scale *= yarn_magnitude(rotation.model.rotary_scaling_factor, rotation.model.mscale_all_dim) ** 2
    return scale


class Rotary:
    """The rotation of the pairs of a head's positional part by position x frequency.

    Args:
        cp_rank, cp_size: this rank among those that share a sequence, and their number.
    """

    def __init__(self, rotation: Rotation, cp_rank: int = 0, cp_size: int = 1) -> None:
        self.rotation, self._cp_rank, self._cp_size = rotation, cp_rank, cp_size
        self.amplitude = amplitude(rotation.model)
        self._tables: dict[tuple[int, torch.device, int], tuple[Tensor, Tensor]] = {}

    def join(self, rest: Tensor, positional: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return heads [S / CP, B, n, width + w]: `rest` [S / CP, B, n, width], and behind it the rotated `positional`.

        positional: [S / CP, B, n, w], or [S / CP, B, 1, w] for all heads, whose gradients are then added in fp32. The
        rotation is computed in fp32, and rounded once in both directions. positions: [S / CP, B] int64, from 0 to
        below S; None: places in the sequence.
        """
        if positions is None:
            return _JoinPositions.apply(rest, positional, *self.tables(rest.shape[0], rest.device))
        tables = self._cached(positions.shape[0] * self._cp_size, positions.device, 1)
        return _JoinPositions.apply(rest, positional, *(table[positions, 0] for table in tables))

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of this rank's `length` positions, fp32 [length, 1, 1, width / 2], times the amplitude.

        They are cached for the next call.
        """
        return self._cached(length * self._cp_size, device, self._cp_size)

    def _cached(self, length: int, device: torch.device, parts: int) -> tuple[Tensor, Tensor]:
        key = (length, device, parts)
        if key not in self._tables:
            positions = torch.arange(length, dtype=torch.float32)
            if parts > 1:
                positions = context_parallel_slice(positions, self._cp_rank, parts)
            angles = torch.outer(positions, self.rotation.frequencies(length))[:, None, None, :]
            cos, sin = self.amplitude * angles.cos(), self.amplitude * angles.sin()
            self._tables[key] = cos.to(device), sin.to(device)
        return self._tables[key]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [S, B, heads, width] rotated by fp32 tables [S, 1 or B, 1, width / 2], in x's dtype.

    The rotation is computed in fp32.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)


@has_kernel("join_positions")
def join_positions(rest: Tensor, positional: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [S, B, n, width + w] of `rest` [S, B, n, width] and the rotated `positional` [S, B, n or 1, w]."""
    turned = rotated(positional, cos, sin).expand(-1, -1, rest.shape[2], -1)
    return torch.cat((rest, turned), dim=-1)


@has_kernel("join_positions_backward")
def join_positions_backward(grad: Tensor, cos: Tensor, sin: Tensor, width: int, shared: bool) -> Tensor:
    """Return the gradient of `positional`, added up over the heads in fp32 where they share it, and rounded once.

    grad: [S, B, n, width + w], of what `join_positions` returns.
    """
    turned = grad[..., width:].float()
    return rotated(turned.sum(dim=2, keepdim=True) if shared else turned, cos, -sin).to(grad.dtype)


class _JoinPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rest: Tensor, positional: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.width, ctx.shared = rest.shape[-1], positional.shape[2] != rest.shape[2]
        return join_positions(rest, positional, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        found = join_positions_backward(grad, cos, sin, ctx.width, ctx.shared)
        return grad[..., : ctx.width], found, None, None
