"""What happened, as plain values: one record per optimizer step, one per evaluation. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.io.files import finite

# ---- What a health measurement found, as plain values. Nothing here imports torch.


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


@dataclass(frozen=True)
class Health:
    """One measured step of the whole job.

    An addition is an element of an in-place addition in bf16 or fp16 to which something other than zero was added; it
    was swallowed where rounding left the element as it was. gradient_* are those into the gradient buffers, other_*
    all others, over all ranks. Where the gradient buffers are fp32, gradient_* are 0 of 0 and the others are not
    watched: none. expert_grad_norm and dense_grad_norm are before clipping, of the experts' parameters and of all
    others; their squares add up to the square of the step's grad_norm; none where a gradient was not finite.
    skipped_iterations, loss_scale_raised and loss_scale_lowered count since iteration 0.
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

    @property
    def worst(self) -> dict[str, float]:
        """The worst layer's value of each figure: what goes first to 0 or to infinity. Figures that none has are left
        out; dead_experts and hot_experts are sums over the layers."""
        layers, loads = self.layers.values(), [layer.load for layer in self.layers.values() if layer.load is not None]
        found = {
            "max_violation": _most(load.max_violation for load in loads),
            "effective_experts": _least(load.effective_experts for load in loads),
            "dead_experts": float(sum(load.dead_experts for load in loads)) if loads else None,
            "hot_experts": float(sum(load.hot_experts for load in loads)) if loads else None,
            "flip_rate": _most(layer.flip_rate for layer in layers),
            "margin_mean": _least(layer.margin_mean for layer in layers),
            "margin_p5": _least(layer.margin_p5 for layer in layers),
            "max_logit": _most(layer.max_logit for layer in layers),
            "bias_min": _least(layer.bias_min for layer in layers),
            "bias_max": _most(layer.bias_max for layer in layers),
        }
        return {name: value for name, value in found.items() if value is not None}


def load_health(counts: list[int]) -> LoadHealth | None:
    """One layer's load from its E counts; none where no token was counted."""
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


def health_from_json(line: dict[str, Any] | None) -> Health | None:
    """The inverse of `dataclasses.asdict` through JSON; none stays none."""
    if line is None:
        return None
    layers = {
        int(number): LayerHealth(**{**layer, "load": None if layer["load"] is None else LoadHealth(**layer["load"])})
        for number, layer in line["layers"].items()
    }
    return Health(**{**line, "layers": layers})


def scalars(health: Health) -> dict[str, float]:
    """One name per figure, `health/NAME` for the job and the worst layer, `health_by_layer/NAME_LAYER` for each."""
    plain = dataclasses.asdict(health)
    layers = plain.pop("layers")
    found = {f"health/{name}": value for name, value in {**plain, **health.worst}.items()}
    for number, layer in layers.items():
        for name, value in {**layer, **(layer["load"] or {})}.items():
            if name != "load":
                found[f"health_by_layer/{name}_{number}"] = value
    return {name: float(value) for name, value in found.items() if value is not None}


def glance(health: Health) -> list[str]:
    """What a person needs to see at once, the worst layer's, as parts of a log line."""
    worst = health.worst
    parts = []
    if "max_violation" in worst:
        parts.append(f"MaxVio {worst['max_violation']:.2f}")
        parts.append(f"effective {worst['effective_experts']:.1f}")
        parts.append(f"dead {worst['dead_experts']:.0f}")
    if "flip_rate" in worst:
        parts.append(f"flips {100 * worst['flip_rate']:.1f}%")
    if any(layer.sampled_tokens for layer in health.layers.values()):
        broken = any(layer.sampled_tokens and layer.max_logit is None for layer in health.layers.values())
        parts.append("max logit inf" if broken else f"max logit {worst['max_logit']:.3g}")
    if health.expert_grad_norm is not None and health.dense_grad_norm is not None:
        parts.append(f"dense/expert norm {health.dense_grad_norm:.2g}/{health.expert_grad_norm:.2g}")
    if health.gradient_swallowed:
        parts.append(f"LOST {100 * health.gradient_swallowed / health.gradient_additions:.2g}% of gradient additions")
    return parts


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# ----


_EXACT = ("loss", "grad_norm")
"""Fields that a JSON line also carries as float.hex, so that two runs can be compared bit by bit, NaN included."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of the whole job.

    iteration counts completed steps from 1. loss and auxiliary losses are in nats per token, averaged over the global
    batch. grad_norm is the norm before clipping; none where it was not computed. seconds is the time of the step on
    the slowest rank; tokens_per_second is that of the whole job, model_tflops (10^12 model FLOPs a second, no
    recomputation counted) and mfu (a share, 0 to 1) are per device. tokens_per_expert holds, per MoE layer of the
    whole model, the E counts of the step over all ranks; it may be empty, and with it expert_load none, at a step whose
    counts were not gathered. expert_load is max / mean of those counts in the worst layer,
    empty_experts how many (layer, expert) pairs got no token, memory_bytes the peak on this rank. health is there at
    the steps of --health-interval. dropped_per_expert holds, beside tokens_per_expert, per layer the choices that were
    beyond an expert's capacity; it is empty where there is none, and tokens_per_expert is then all there were.
    mtp_losses: of each depth of multi-token prediction, unweighted, in nats per target. data_hash, expert_bias_hash:
    what the step read, and every layer's expert_bias after it, in 16 hex digits; the same on every layout.
    """

    iteration: int
    consumed_samples: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    model_tflops: float
    mfu: float | None
    tokens_per_expert: dict[int, list[int]]
    expert_load: float | None
    empty_experts: int
    expert_bias_max: float | None
    aux_losses: dict[str, float]
    seconds_left: float
    global_batch_size: int
    memory_bytes: int
    health: Health | None = None
    dropped_per_expert: dict[int, list[int]] = field(default_factory=dict)
    mtp_losses: list[float] = field(default_factory=list)
    data_hash: str | None = None
    expert_bias_hash: str | None = None


@dataclass(frozen=True)
class EvalRecord:
    """One pass over a split: the mean loss in nats per token over `tokens` tokens, after `iteration` steps."""

    iteration: int
    split: str
    loss: float
    tokens: int
    seconds: float


def dropped_share(record: StepRecord) -> float | None:
    """Of all choices of experts in the layers that have a capacity, the share that was dropped; none without one."""
    dropped = sum(sum(counts) for counts in record.dropped_per_expert.values())
    kept = sum(sum(record.tokens_per_expert[layer]) for layer in record.dropped_per_expert)
    return dropped / (dropped + kept) if dropped + kept else None


def load_max_over_mean(counts: list[int]) -> float | None:
    """max / mean of one layer's token counts; none for a layer that got no token at all."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else None


def to_json(record: StepRecord | EvalRecord) -> dict[str, Any]:
    """A dict that `json.dumps(..., allow_nan=False)` takes; `loss_hex` and `grad_norm_hex` hold the exact bits."""
    plain = dataclasses.asdict(record)
    exact = {f"{name}_hex": float(plain[name]).hex() for name in _EXACT if plain.get(name) is not None}
    return finite({**plain, **exact})


def exact(record: StepRecord) -> dict[str, Any]:
    """What two runs of the same step must agree on to the bit, as plain values: kept in checkpoints, compared by
    tools/verify_resume.py. Floats are float.hex, so that NaN and infinity are values too."""
    return {
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "global_batch_size": record.global_batch_size,
        "loss_hex": float(record.loss).hex(),
        "grad_norm_hex": None if record.grad_norm is None else float(record.grad_norm).hex(),
        "learning_rate_hex": float(record.learning_rate).hex(),
        "loss_scale_hex": float(record.loss_scale).hex(),
        "skipped": record.skipped,
        "data_hash": record.data_hash,
        "expert_bias_hash": record.expert_bias_hash,
    }


def step_from_json(line: dict[str, Any]) -> StepRecord:
    """The inverse of `to_json` for a step: the same record, also where the loss was NaN or infinite."""
    plain = _plain(StepRecord, line)
    plain["tokens_per_expert"] = {int(layer): counts for layer, counts in plain["tokens_per_expert"].items()}
    dropped = line.get("dropped_per_expert", {})  # lines of earlier versions have none of these
    plain["dropped_per_expert"] = {int(layer): counts for layer, counts in dropped.items()}
    plain["health"] = health_from_json(line.get("health"))
    plain["mtp_losses"] = [math.nan if loss is None else loss for loss in line.get("mtp_losses", ())]
    plain["data_hash"], plain["expert_bias_hash"] = line.get("data_hash"), line.get("expert_bias_hash")
    return StepRecord(**plain)


def eval_from_json(line: dict[str, Any]) -> EvalRecord:
    """The inverse of `to_json` for an evaluation."""
    return EvalRecord(**_plain(EvalRecord, line))


def _plain(cls: type, line: dict[str, Any]) -> dict[str, Any]:
    missing = dataclasses.MISSING
    required = (f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing)
    plain = {name: line[name] for name in required}
    for name in _EXACT:
        if f"{name}_hex" in line:
            plain[name] = float.fromhex(line[f"{name}_hex"])
    return plain
