"""finalize_model_grads: the engine's gradient reduction, then the bias step in fp32 from exact counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.engine import schedules
from megatron_moe.moe.load_balance import TokenCountError, quantile_bias, updated_expert_bias
from megatron_moe.moe.router import TopKRouter, routers
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.precision.contract import PrecisionError


@dataclass(frozen=True)
class RouterUpdate:
    """What the routers of this rank's layers did in the step, over the whole global batch.

    layer_numbers: global, one-based. tokens_per_expert: one [E] int64 per layer, exact: what the experts got.
    expert_bias: one [E] fp32 per layer after the update, or None. aux_losses: per layer each loss, without its
    coefficient, as the mean over the tokens of the global batch. dropped_per_expert: one [E] int64 per layer, exact:
    choices beyond the experts' capacity, not in tokens_per_expert; None for a layer without a capacity. bias_error: per
    layer the bound of `quantile_bias`, or None.
    """

    layer_numbers: tuple[int, ...]
    tokens_per_expert: tuple[Tensor, ...]
    expert_bias: tuple[Tensor | None, ...]
    aux_losses: tuple[dict[str, Tensor], ...]
    dropped_per_expert: tuple[Tensor | None, ...]
    bias_error: tuple[Tensor | None, ...]


@torch.no_grad()
def finalize_model_grads(
    model: list[torch.nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroups | None = None,
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

    Raises:
        PrecisionError: if a count or a bias is not float32: it would have been rounded already.
        TokenCountError: if a router's counts are not its tokens x K.
    """
    # With a bias in its configuration the engine would update that of every module that has one.
    with schedules.configured(model[:1], moe_router_enable_expert_bias=False):
        schedules.finalize_model_grads(model, num_tokens, pg_collection, force_all_reduce, **engine_options)
    return update_routers(model)


def update_routers(model: list[torch.nn.Module]) -> RouterUpdate:
    """Update expert_bias of all routers of `model`, with one all-reduce of all counts, in int64.

    Quantile balancing needs one more for each layer's histogram.

    That of a frozen router stays: it is a part of the choice that was frozen.
    """
    found = list(routers(model))
    counts = _global_counts(found)
    # Each layer's auxiliary losses, as the mean over the tokens of the global batch.
    aux_losses: list[dict[str, Tensor]] = [{} for _ in found]
    shares: dict[tuple[int, str], Tensor] = {}
    for layer, router in enumerate(found):
        if router.aux_losses is not None:
            for name, share in sorted(router.aux_losses.totals.items()):
                shares[layer, name] = share
    if shares:
        totals, group = torch.stack(list(shares.values())), found[0].groups.tp_dp_cp
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        for (layer, name), total in zip(shares, totals):
            aux_losses[layer][name] = total / counts[layer].tokens.squeeze().clamp(min=1)
    biases: list[Tensor | None] = []
    dropped: list[Tensor | None] = []
    errors: list[Tensor | None] = []
    for router, count in zip(found, counts):
        bias, error = router.expert_bias, None
        if bias is not None and router.weight.requires_grad and router.local_differences is not None:
            differences = all_reduce_sum(router.local_differences.to(torch.int64), router.groups.tp_dp_cp)
            updated, error = quantile_bias(bias, differences, router.options.topk, router.options.quantile_ema)
            bias.copy_(updated)
        elif bias is not None and router.weight.requires_grad:
            rate, center = router.options.bias_update_rate, router.options.bias_center
            requested = count.kept + count.dropped if router.local_live_per_expert is None else count.live
            bias.copy_(updated_expert_bias(bias, requested, rate, center))
        biases.append(None if bias is None else bias.clone())
        errors.append(error)
        dropped.append(None if router.local_dropped_per_expert is None else count.dropped)
        router.reset_counts()
    return RouterUpdate(
        layer_numbers=tuple(router.layer_number or 0 for router in found),
        tokens_per_expert=tuple(count.kept for count in counts),
        expert_bias=tuple(biases),
        aux_losses=tuple(aux_losses),
        dropped_per_expert=tuple(dropped),
        bias_error=tuple(errors),
    )


class _LayerCounts(NamedTuple):
    """Counts of one layer over TP x CP x DP, int64: [E] choices dispatched, [E] beyond the capacity, [1] tokens.

    live: [E], or [0] where the bias does not go by them; see `TopKRouter.local_live_per_expert`.
    """

    kept: Tensor
    dropped: Tensor
    tokens: Tensor
    live: Tensor


def _global_counts(found: list[TopKRouter]) -> list[_LayerCounts]:
    """Add up the counts of all layers, which may differ in E, with one all-reduce; check that no token is lost."""
    if not found:
        return []
    local = []
    for router in found:
        for name in router.fp32_state:
            tensor = getattr(router, name)
            if tensor is not None and tensor.dtype != torch.float32:
                raise PrecisionError(f"layer {router.layer_number}: {name} is {tensor.dtype}, must be torch.float32")
        kept, dropped = router.local_tokens_per_expert, router.local_dropped_per_expert
        local += [kept, torch.zeros_like(kept) if dropped is None else dropped, router.local_num_tokens]
        if router.local_live_per_expert is not None:
            local.append(router.local_live_per_expert)
    total = torch.cat(local).to(torch.int64)
    group = found[0].groups.tp_dp_cp
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    counts, sums, begin = [], [], 0
    for router in found:
        experts = router.options.num_experts
        live = 0 if router.local_live_per_expert is None else experts
        own = total[begin : begin + 2 * experts + 1 + live]
        begin += len(own)
        count = _LayerCounts(*own.split([experts, experts, 1, live]))
        counts.append(count)
        sums.append(torch.stack([count.kept.sum(), count.dropped.sum(), count.tokens.sum()]))
    for router, (got, lost, num_tokens) in zip(found, torch.stack(sums).tolist()):
        announced, topk = router.step.global_batch, router.options.topk
        wanted = num_tokens if announced is None else announced.num_tokens
        if num_tokens != wanted or got + lost != wanted * topk:
            raise TokenCountError(
                f"layer {router.layer_number}: {wanted} tokens of the global batch x {topk} experts are "
                f"{wanted * topk} choices, but {got} were dispatched and {lost} dropped, of {num_tokens} tokens "
                "counted. Tokens are lost or counted twice; the step is not applied."
            )
    return counts
