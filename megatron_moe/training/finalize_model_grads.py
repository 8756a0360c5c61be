"""finalize_model_grads: the engine's gradient reduction, then the bias step in fp32 from exact counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads as engine_finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_moe.moe.load_balance import LostTokens, updated_expert_bias
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.state import routers
from megatron_moe.precision.contract import PrecisionError


@dataclass(frozen=True)
class RouterUpdate:
    """What the routers of this rank's layers did in the step, over the whole global batch.

    layer_numbers: global, one-based. tokens_per_expert: one [E] int64 per layer, exact: what the experts got.
    expert_bias: one [E] fp32 per layer after the update, or None. aux_losses: per layer each loss, without its
    coefficient, as the mean over the tokens of the global batch. dropped_per_expert: one [E] int64 per layer, exact:
    choices beyond the experts' capacity, not in tokens_per_expert; None for a layer without a capacity.
    """

    layer_numbers: tuple[int, ...]
    tokens_per_expert: tuple[Tensor, ...]
    expert_bias: tuple[Tensor | None, ...]
    aux_losses: tuple[dict[str, Tensor], ...]
    dropped_per_expert: tuple[Tensor | None, ...]


@torch.no_grad()
def finalize_model_grads(
    model: list[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
    **engine_options: Any,
) -> RouterUpdate:
    """Reduce all gradients as megatron-core does, then update every router's expert_bias and start counting anew.

    A drop-in for megatron-core's function of the same name, as `config.finalize_model_grads_func`. The engine's own
    bias update is not used: it counts in the model's dtype and sums in floating point. A caller whose optimizer may
    skip the step takes a `RouterSnapshot` before the step and restores it when the step is skipped; `training/step.py`
    does.

    Args:
        model: the chunks of this rank, wrapped in DDP.
        num_tokens: tokens of the global batch on this rank, for a per-token loss; None otherwise.
        pg_collection: the engine's process groups; its default ones if None.
        force_all_reduce: as the engine's.

    Returns:
        Exact global counts, the new biases and the auxiliary losses of this rank's layers.

    Raises:
        PrecisionError: if a count or a bias is not float32: it would have been rounded already.
        LostTokens: if a router's counts are not its tokens x K.
    """
    with _engine_bias_update_off(get_model_config(model[0])):
        engine_finalize_model_grads(model, num_tokens, pg_collection, force_all_reduce, **engine_options)
    return update_routers(model)


def update_routers(model: list[torch.nn.Module]) -> RouterUpdate:
    """Update expert_bias of all routers of `model`, with one all-reduce of all counts, in int64.

    That of a frozen router stays: it is a part of the choice that was frozen.
    """
    found = list(routers(model))
    kept, dropped, tokens = _global_counts(found)
    _require_conservation(found, kept, dropped, tokens)
    aux_losses = _global_aux_losses(found, tokens)
    for router, got, turned_away in zip(found, kept, dropped):
        if router.expert_bias is not None and router.weight.requires_grad:
            rate, center = router.options.bias_update_rate, router.options.bias_center
            router.expert_bias.copy_(updated_expert_bias(router.expert_bias, got + turned_away, rate, center))
        router.reset_counts()
    return RouterUpdate(
        layer_numbers=tuple(router.layer_number or 0 for router in found),
        tokens_per_expert=tuple(kept),
        expert_bias=tuple(None if r.expert_bias is None else r.expert_bias.clone() for r in found),
        aux_losses=tuple(aux_losses),
        dropped_per_expert=tuple(
            None if r.local_dropped_per_expert is None else turned_away for r, turned_away in zip(found, dropped)
        ),
    )


def _global_counts(found: list[TopKRouter]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Count over TP x CP x DP, per layer, int64: choices dispatched to each expert [E], dropped ones [E], tokens [1].

    Layers may differ in E.
    """
    if not found:
        return [], [], []
    for router in found:
        for name in router.fp32_state:
            tensor = getattr(router, name)
            if tensor is not None and tensor.dtype != torch.float32:
                raise PrecisionError(f"layer {router.layer_number}: {name} is {tensor.dtype}, must be torch.float32")
    kept = [router.local_tokens_per_expert for router in found]
    dropped = [torch.zeros_like(k) if (d := r.local_dropped_per_expert) is None else d for r, k in zip(found, kept)]
    tokens = [router.local_num_tokens for router in found]
    local = torch.cat([tensor.to(torch.int64) for tensor in (*kept, *dropped, *tokens)])
    group = found[0].groups.tp_dp_cp
    if group.size() > 1:
        dist.all_reduce(local, group=group)
    experts = [router.options.num_experts for router in found]
    total = list(local.split([*experts, *experts, *[1 for _ in found]]))
    return total[: len(found)], total[len(found) : 2 * len(found)], total[2 * len(found) :]


def _require_conservation(
    found: list[TopKRouter], kept: list[Tensor], dropped: list[Tensor], tokens: list[Tensor]
) -> None:
    """Raise `LostTokens` unless every token of the global batch was given K experts once, in every layer."""
    if not found:
        return
    counted = torch.stack([torch.stack([k.sum(), d.sum(), t.sum()]) for k, d, t in zip(kept, dropped, tokens)])
    for router, (got, turned_away, num_tokens) in zip(found, counted.tolist()):
        announced, topk = router.step.global_batch, router.options.topk
        wanted = num_tokens if announced is None else announced.num_tokens
        if num_tokens != wanted or got + turned_away != wanted * topk:
            raise LostTokens(
                f"layer {router.layer_number}: {wanted} tokens of the global batch x {topk} experts are "
                f"{wanted * topk} choices, but {got} were dispatched and {turned_away} dropped, of {num_tokens} tokens "
                "counted. Tokens are lost or counted twice; the step is not applied."
            )


def _global_aux_losses(found: list[TopKRouter], tokens: list[Tensor]) -> list[dict[str, Tensor]]:
    """Return each layer's auxiliary losses, as the mean over the tokens of the global batch."""
    shares = [{} if router.aux_losses is None else router.aux_losses.totals for router in found]
    names = [(i, name) for i, of_layer in enumerate(shares) for name in sorted(of_layer)]
    losses: list[dict[str, Tensor]] = [{} for _ in found]
    if not names:
        return losses
    group = found[0].groups.tp_dp_cp
    totals = torch.stack([shares[i][name] for i, name in names])
    if group.size() > 1:
        dist.all_reduce(totals, group=group)
    for (i, name), total in zip(names, totals):
        losses[i][name] = total / tokens[i].squeeze().clamp(min=1)
    return losses


@contextmanager
def _engine_bias_update_off(config: Any) -> Iterator[None]:
    """Disable the bias in the engine's configuration, or the engine would update it for every module that has one."""
    enabled = config.moe_router_enable_expert_bias
    config.moe_router_enable_expert_bias = False
    try:
        yield
    finally:
        config.moe_router_enable_expert_bias = enabled
