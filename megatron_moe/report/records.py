"""What happened, as plain values: one record per optimizer step, one per evaluation. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.report.health_record import Health, health_from_json

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


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


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
