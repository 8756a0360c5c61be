"""QK-clip (Kimi K2, arXiv:2507.20534): weights of queries and keys are scaled down where attention logits grow large.

A head whose largest logit of a step was m has eta = min(threshold / m, 1): with queries times eta^alpha and keys times
eta^(1 - alpha) the same inputs would give it logits of the threshold at most. Query heads that share a key have one
eta, that of the largest of their logits. In latent attention the rotary part of the key is shared by all heads and
stays; there the query alone is multiplied, by eta. Values stay, and so do momenta and moments.

A step measures in its forward passes (`MeasuredCoreAttention`), takes the maxima over all ranks, and has the optimizer
scale what it has just updated, before the new weights are copied and gathered. A step that is not applied scales
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.optimizer import OwnedPart
from megatron_moe.engine.schedules import get_model_config
from megatron_moe.model.attention import MeasuredCoreAttention, measured_attentions
from megatron_moe.model.mla import LatentAttention
from megatron_moe.platform.protocols import ProcessGroups


def largest_attention_logits(model: Sequence[torch.nn.Module], pg: ProcessGroups) -> Tensor | None:
    """Return the largest logit of each head in the step, fp32 [L, n], the same on every rank; None: not measured.

    Layers of further predictions come last. Collective over all ranks: one all-reduce, of which each rank brings its
    heads.
    """
    config: Any = get_model_config(model[-1])
    if not config.log_max_attention_logit:
        return None
    layers = config.num_layers + (config.mtp_num_layers or 0)
    found = torch.full((layers, config.num_attention_heads), -math.inf, device=platform.device())
    for attention in measured_attentions(model):
        if attention.largest_logits is not None:
            own = found[attention.layer_number - 1].chunk(pg.tp.size())[pg.tp.rank()]
            own.copy_(attention.largest_logits)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


class ClippedWeight(NamedTuple):
    """A weight, or the bias, of queries or keys on this rank.

    layer: its row in what `largest_attention_logits` returns. rows: of each query group in turn how many rows it has,
    with the power of eta that they are multiplied by.
    """

    weight: torch.nn.Parameter
    layer: int
    rows: tuple[tuple[int, float], ...]


def clipped_weights(run: Run, chunk: torch.nn.Module) -> Iterator[ClippedWeight]:
    """Yield the weights and biases of a chunk that QK-clip scales."""
    model, alpha = run.model, run.optimizer.qk_clip_alpha
    head, heads_of_group = run.derived.head_size, model.num_attention_heads // run.derived.num_query_groups
    for module in chunk.modules():
        attention: Any = module
        core = getattr(module, "core_attention", None)
        if not isinstance(core, MeasuredCoreAttention):
            continue
        layer = core.layer_number - 1
        if isinstance(module, LatentAttention):
            query = attention.linear_q_proj if model.q_lora_rank is None else attention.linear_q_up_proj
            parts = ((model.qk_head_dim, alpha), (model.qk_pos_emb_head_dim, 1.0))
            yield ClippedWeight(query.weight, layer, parts)
            parts = ((model.qk_head_dim, 1 - alpha), (model.v_head_dim, 0.0))
            yield ClippedWeight(attention.linear_kv_up_proj.weight, layer, parts)
            continue
        rows = ((heads_of_group * head, alpha), (head, 1 - alpha), (head, 0.0))
        for weight in (attention.linear_qkv.weight, attention.linear_qkv.bias):
            if weight is not None:  # a bias of queries or keys is part of the logits too
                yield ClippedWeight(weight, layer, rows)


class QKClip:
    """Scales the weights of queries and keys, in the parts that this rank's optimizers update."""

    def __init__(self, run: Run, pg: ProcessGroups) -> None:
        self._tp = pg.tp
        latent = run.model.multi_latent_attention
        self._groups = run.model.num_attention_heads if latent else run.derived.num_query_groups
        self.threshold = run.optimizer.qk_clip_threshold
        self._etas: Tensor | None = None

    def begin(self, logits: Tensor) -> None:
        """Take each query group's eta for the coming update from the logits [L, n] of the step."""
        largest = logits.unflatten(1, (self._groups, -1)).amax(2)
        etas = torch.where(largest > self.threshold, self.threshold / largest, 1.0)
        self._etas = etas.chunk(self._tp.size(), 1)[self._tp.rank()]

    def scale(self, clipped: ClippedWeight, own: OwnedPart, main: Tensor) -> None:
        """Multiply what this rank updates of a weight, `main`, fp32; nothing before the first `begin`."""
        if self._etas is None:
            return
        eta = self._etas[clipped.layer].to(main.device).unsqueeze(1)
        factors = torch.cat([eta.pow(power).expand(-1, rows) for rows, power in clipped.rows], 1).flatten()  # [R]
        (axis, begin, end), width = own, clipped.weight.shape[1:].numel()
        if axis is not None:
            if axis == 0:
                factors = factors[begin:end]
            main.mul_(factors.view(-1, *[1] * (main.dim() - 1)))
            return
        flat = main.view(-1)
        first, last = -(-begin // width), end // width  # the whole rows among those that it has elements of
        if first > last:
            flat.mul_(factors[last])
            return
        head, rows, tail = flat.split([first * width - begin, (last - first) * width, end - last * width])
        rows.view(-1, width).mul_(factors[first:last].unsqueeze(1))
        for piece, row in ((head, first - 1), (tail, last)):
            if piece.numel():
                piece.mul_(factors[row])


def attention_figures(clip: QKClip | None, logits: Tensor | None) -> Tensor:
    """Return what is reported of the logits [L, n], fp64: the largest, and with --qk-clip how many heads are clipped.

    It is empty where they were not measured.
    """
    if logits is None:
        return torch.empty(0, dtype=torch.float64, device=platform.device())
    figures = [logits.max().double()]
    if clip is not None:
        figures.append((logits > clip.threshold).sum().double())
    return torch.stack(figures)
