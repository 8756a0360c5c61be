"""What a health measurement found about routing, rounding and gradients, as plain values (no torch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadHealth:
    """How one layer's K x T choices fell on its E experts in one step.

    effective_experts is the exponential of the load's entropy: E where all are equal, 1 where one takes everything.
    dead_experts got no token, hot_experts more than twice the mean. max_violation is the largest load over the mean,
    less 1 (MaxVio, arXiv 2408.15664).
    """

    effective_experts: float
    dead_experts: int
    hot_experts: int
    max_violation: float


@dataclass(frozen=True)
class LayerHealth:
    """One MoE layer in one step, over all ranks.

    load is none for a layer that got no token. Of `sampled_tokens`: margin_mean and margin_p5, mean and 5th percentile
    (good to 9 %) of the K-th less the (K+1)-th biased choice score, none where no token had an alternative; flip_rate,
    the share whose set of experts fp64 would have chosen differently. max_logit is the largest |router logit| of all
    tokens, none where it was not finite. bias_min, bias_max and bias_mean are those of expert_bias after the step,
    none where the layer has no bias.
    """

    load: LoadHealth | None
    sampled_tokens: int
    margin_mean: float | None
    margin_p5: float | None
    flip_rate: float | None
    max_logit: float | None
    bias_min: float | None
    bias_max: float | None
    bias_mean: float | None
    tokens_per_source: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """The E counts of each named source, which sum to the layer's tokens_per_expert."""

    def figures(self) -> dict[str, float]:
        """Return the numbers that the layer has, those of its load included."""
        found = dataclasses.asdict(self)
        found.update(found.pop("load") or {})
        del found["tokens_per_source"]
        return {name: float(value) for name, value in found.items() if value is not None}


WORST_OF_LAYERS: dict[str, Callable[[list[float]], float]] = {
    "max_violation": max,
    "effective_experts": min,
    "dead_experts": sum,
    "hot_experts": sum,
    "flip_rate": max,
    "margin_mean": min,
    "margin_p5": min,
    "max_logit": max,
    "bias_min": min,
    "bias_max": max,
}
"""Figures of a layer -> what makes one number of all layers'."""


@dataclass(frozen=True)
class Health:
    """One measured step of the whole run.

    An addition is an element of an in-place addition in bf16 or fp16 to which something other than zero was added; it
    was swallowed where rounding left the element as it was. gradient_* are those into the gradient buffers, other_*
    all others, over all ranks. Where the gradient buffers are fp32, gradient_* are 0 of 0 and the others are not
    watched: none. expert_grad_norm and dense_grad_norm are before clipping, of the experts' parameters and of all
    others; their squares add up to the square of the step's grad_norm; none where a gradient was not finite.
    skipped_iterations, loss_scale_raised and loss_scale_lowered count since iteration 0. first_moment_rounding,
    second_moment_rounding and update_rounding are norms of what the rounding of stored moments changed, over the norms
    of the values, in a sample of the elements: of the first moment, of the second one's root, and of AdamW's
    update. None where they are not rounded, and where the step was not committed.
    """

    gradient_additions: int
    gradient_swallowed: int
    other_additions: int | None
    other_swallowed: int | None
    dense_grad_norm: float | None
    expert_grad_norm: float | None
    skipped_iterations: int
    skip_rate: float
    loss_scale_raised: int
    loss_scale_lowered: int
    layers: dict[int, LayerHealth]
    first_moment_rounding: float | None = None
    second_moment_rounding: float | None = None
    update_rounding: float | None = None

    def without_counts(self) -> Health:
        """Return the health without `tokens_per_source`, which may be megabytes."""
        layers = {number: dataclasses.replace(layer, tokens_per_source={}) for number, layer in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    @property
    def worst(self) -> dict[str, float]:
        """The worst layer's value of each known figure; dead_experts and hot_experts are sums over the layers."""
        of_layers = [layer.figures() for layer in self.layers.values()]
        worst = {}
        for name, combine in WORST_OF_LAYERS.items():
            known = [figures[name] for figures in of_layers if name in figures]
            if known:
                worst[name] = combine(known)
        return worst


def load_max_over_mean(counts: list[int]) -> float | None:
    """Return max / mean of one layer's token counts; None for a layer that got no token at all."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else None


def load_health(counts: list[int]) -> LoadHealth | None:
    """Return one layer's load from its E counts; None where no token was counted."""
    total = sum(counts)
    if not total:
        return None
    shares = [count / total for count in counts if count]
    return LoadHealth(
        effective_experts=math.exp(-math.fsum(share * math.log(share) for share in shares)),
        dead_experts=counts.count(0),
        hot_experts=sum(count * len(counts) > 2 * total for count in counts),
        max_violation=max(counts) * len(counts) / total - 1,
    )


def scalars(health: Health) -> dict[str, float]:
    """Return one number per figure: `health/NAME` of the run and the worst layer, `health_by_layer/NAME_LAYER`."""
    found = {f"health/{name}": value for name, value in health.worst.items()}
    for field in dataclasses.fields(health):
        value = getattr(health, field.name)
        if field.name != "layers" and value is not None:
            found[f"health/{field.name}"] = float(value)
    for number, layer in health.layers.items():
        for name, value in layer.figures().items():
            found[f"health_by_layer/{name}_{number}"] = value
    return found


def summary_line(health: Health) -> str:
    """Return the part of a log line about the health: figures of the worst layer that not every line has, or ""."""
    worst = health.worst
    parts = []
    if health.gradient_swallowed:
        parts.append(f"LOST {100 * health.gradient_swallowed / health.gradient_additions:.2g}% of gradient additions")
    if "effective_experts" in worst:
        parts.append(f"effective {worst['effective_experts']:.1f}")
    if "flip_rate" in worst:
        parts.append(f"flips {100 * worst['flip_rate']:.1f}%")
    sampled = [layer for layer in health.layers.values() if layer.sampled_tokens]
    if any(layer.max_logit is None for layer in sampled):
        parts.append("max logit inf")
    elif sampled:
        parts.append(f"max logit {worst['max_logit']:.3g}")
    if health.expert_grad_norm is not None and health.dense_grad_norm is not None:
        parts.append(f"dense/expert norm {health.dense_grad_norm:.2g}/{health.expert_grad_norm:.2g}")
    if health.update_rounding is not None:
        parts.append(f"update rounding {100 * health.update_rounding:.2g}%")
    return " | ".join(parts)
