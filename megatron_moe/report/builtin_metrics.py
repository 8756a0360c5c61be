"""The metrics of every run (`BUILT_IN`), in the order of the keys in a line of metrics.jsonl."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron_moe.io.texts import duration_text
from megatron_moe.report import health
from megatron_moe.report.health import Health, load_max_over_mean
from megatron_moe.report.metric import Metric, StepFacts, StepRecord

Records = Sequence[StepRecord]


# Parts of a log line: losses are means over the steps that were applied, speeds are over the time of all steps, and
# everything else is the last step's. What is not in every line comes last, so that the columns stay where they are; a
# narrow terminal cuts a line there, so what must be seen comes first.


def _taken(records: Records) -> list[StepRecord]:
    """Return the steps that were not skipped, or the last one where all were."""
    return [record for record in records if not record.skipped] or [records[-1]]


def _mean_loss(records: Records) -> str:
    losses = [record.loss for record in _taken(records)]
    return f"loss {math.fsum(losses) / len(losses):.4f}"


def _mean_mtp_losses(records: Records) -> str | None:
    by_depth = zip(*(record.mtp_losses for record in _taken(records)))
    means = [math.fsum(losses) / len(losses) for losses in by_depth]
    return f"mtp {' '.join(f'{mean:.4f}' for mean in means)}" if means else None


def _grad_norm(records: Records) -> str:
    norm = records[-1].grad_norm
    return "grad norm -" if norm is None else f"grad norm {norm:.3f}"


def _tokens_per_second(records: Records) -> str:
    seconds = sum(record.seconds for record in records)
    rate = sum(record.tokens for record in records) / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f} tok/s"


def _model_tflops(records: Records) -> str:
    return f"{_over_time(records, 'model_tflops'):.3g} TFLOP/s"


def _mfu(records: Records) -> str | None:
    return None if records[-1].mfu is None else f"MFU {100 * _over_time(records, 'mfu'):.1f}%"


def _over_time(records: Records, name: str) -> float:
    """Return the mean rate over the steps: each step's rate counts with the step's time."""
    seconds = sum(record.seconds for record in records)
    amount = sum((getattr(record, name) or 0.0) * record.seconds for record in records)
    return amount / seconds if seconds > 0 else 0.0


def _last_health(records: Records) -> Health | None:
    return next((record.health for record in reversed(records) if record.health is not None), None)


def _health(records: Records) -> str | None:
    measured = _last_health(records)
    return None if measured is None else " | ".join(health.glance(measured)) or None


def _load(records: Records) -> str | None:
    last = records[-1]
    return None if last.expert_load is None else f"load {last.expert_load:.2f} | empty {last.empty_experts}"


def dropped_share(record: StepRecord) -> float | None:
    """Return the share of choices that was dropped in the layers whose experts have a capacity; None without one."""
    dropped = sum(sum(counts) for counts in record.dropped_per_expert.values())
    kept = sum(sum(record.tokens_per_expert[layer]) for layer in record.dropped_per_expert)
    return dropped / (dropped + kept) if dropped + kept else None


def _dropped(records: Records) -> str | None:
    share = dropped_share(records[-1])
    return None if share is None else f"dropped {100 * share:.2f}%"


def _skipped(records: Records) -> str | None:
    skipped = sum(record.skipped for record in records)
    return f"SKIPPED {skipped} (loss scale {records[-1].loss_scale:g})" if skipped else None


def _left(records: Records) -> str:
    return f"left {duration_text(records[-1].seconds_left)}"


# TensorBoard scalars of metrics that are more than one number.


def _layer_loads(record: StepRecord) -> dict[str, float | None]:
    loads = {layer: load_max_over_mean(counts) for layer, counts in record.tokens_per_expert.items()}
    return {f"experts_by_layer/load_max_over_mean_{layer}": load for layer, load in loads.items()}


def _empty_experts(record: StepRecord) -> dict[str, float | None]:
    return {"experts/empty": float(record.empty_experts)} if record.tokens_per_expert else {}


def _named_losses(record: StepRecord) -> dict[str, float | None]:
    return {f"loss/{name}": value for name, value in record.aux_losses.items()}


def _losses_of_depths(record: StepRecord) -> dict[str, float | None]:
    return {f"loss/mtp_{depth}": loss for depth, loss in enumerate(record.mtp_losses, start=1)}


def _health_scalars(record: StepRecord) -> dict[str, float | None]:
    return {} if record.health is None else dict(health.scalars(record.health))


def _times(record: StepRecord) -> dict[str, float | None]:
    """Return the times and the throughput by Megatron-LM's tags."""
    times = {f"{name}-time": seconds for name, seconds in record.timers.items()}
    return {**times, "throughput": record.model_tflops} if times else {}


# The values of --log-timers-to-tensorboard and the like, whose tags are Megatron-LM's: empty without the flag.


def _timers(facts: StepFacts) -> dict[str, float]:
    return {"iteration": facts.seconds, **facts.part_seconds} if facts.run.logging.log_timers_to_tensorboard else {}


def _world_size(facts: StepFacts) -> int | None:
    return facts.world_size if facts.run.logging.log_world_size_to_tensorboard else None


# Values read back from JSON.


def _counts_from_json(counts: dict[str, list[int]]) -> dict[int, list[int]]:
    return {int(layer): row for layer, row in counts.items()}


def _losses_from_json(losses: list[float | None]) -> list[float]:
    return [math.nan if loss is None else loss for loss in losses]


def _by_reporter(_: StepFacts) -> None:
    """Return None: the reporter of the rank that writes fills it in."""


def _required(name: str, **options: Any) -> Metric:
    return Metric(name, required=True, **options)


BUILT_IN: tuple[Metric, ...] = (
    _required("iteration"),
    _required("consumed_samples", unit="sequences"),
    _required("loss", unit="nats per token", exact=True, console=_mean_loss, console_rank=10, tensorboard="loss/train"),
    _required("learning_rate", console="lr {:.2e}", console_rank=20, tensorboard="optimizer/learning_rate"),
    _required("grad_norm", exact=True, console=_grad_norm, console_rank=30, tensorboard="optimizer/grad_norm"),
    _required("loss_scale", tensorboard="optimizer/loss_scale"),
    _required("skipped", console=_skipped, console_rank=16, tensorboard="optimizer/skipped"),
    _required("tokens", unit="tokens"),
    _required("seconds", unit="s", tensorboard="speed/step_seconds"),
    Metric(
        "tokens_per_second",
        unit="tokens/s, all devices",
        compute=lambda facts: facts.tokens / facts.seconds,
        console=_tokens_per_second,
        console_rank=40,
        tensorboard="speed/tokens_per_second",
    ),
    Metric(
        "model_tflops",
        unit="10^12 model FLOPs/s, of a device",
        console=_model_tflops,
        console_rank=50,
        tensorboard="speed/model_tflops",
    ),
    Metric("mfu", unit="share of --peak-tflops", console=_mfu, console_rank=60, tensorboard="speed/mfu"),
    Metric(
        "tokens_per_expert",
        unit="choices, by layer",
        compute=lambda facts: facts.load.tokens_per_expert,
        tensorboard=_layer_loads,
        empty=dict,
        from_json=_counts_from_json,
    ),
    Metric(
        "expert_load",
        unit="max / mean of the worst layer",
        compute=lambda facts: facts.load.worst,
        console=_load,
        console_rank=70,
        tensorboard="experts/load_max_over_mean",
    ),
    Metric(
        "empty_experts",
        unit="(layer, expert) pairs",
        compute=lambda facts: facts.load.empty,
        tensorboard=_empty_experts,
        empty=int,
    ),
    Metric(
        "expert_bias_max",
        unit="largest magnitude",
        compute=lambda facts: facts.load.expert_bias_max,
        tensorboard="experts/bias_max",
    ),
    Metric(
        "aux_losses",
        unit="nats per token",
        compute=lambda facts: facts.load.aux_losses,
        tensorboard=_named_losses,
        empty=dict,
    ),
    Metric("seconds_left", unit="s", console=_left, console_rank=100, empty=float),
    Metric("global_batch_size", unit="sequences", tensorboard="batch/global_batch_size"),
    Metric("memory_bytes", unit="bytes, the peak of the rank that writes", tensorboard="memory/peak_bytes"),
    Metric(
        "health",
        console=_health,
        console_rank=110,
        tensorboard=_health_scalars,
        to_json=dataclasses.asdict,
        from_json=health.health_from_json,
    ),
    Metric(
        "dropped_per_expert",
        unit="choices, by layer",
        compute=lambda facts: facts.load.dropped_per_expert,
        console=_dropped,
        console_rank=80,
        tensorboard=lambda record: {"experts/dropped_share": dropped_share(record)},
        empty=dict,
        from_json=_counts_from_json,
    ),
    Metric(
        "mtp_losses",
        unit="nats per target",
        console=_mean_mtp_losses,
        console_rank=15,
        tensorboard=_losses_of_depths,
        empty=list,
        from_json=_losses_from_json,
    ),
    Metric("params_norm", console="params norm {:.3f}", console_rank=31, tensorboard="params-norm"),
    Metric(
        "num_zeros",
        unit="elements of all gradients",
        console="num zeros {:.0f}",
        console_rank=32,
        tensorboard="num-zeros",
    ),
    Metric(
        "max_attention_logit",
        console="max attention logit {:.4g}",
        console_rank=33,
        tensorboard="max_attention_logit",
    ),
    Metric(
        "clipped_heads",
        unit="heads of all layers",
        console="clipped heads {:.0f}",
        console_rank=34,
        tensorboard="optimizer/clipped_heads",
    ),
    Metric("timers", unit="s per iteration, by part", compute=_timers, tensorboard=_times, empty=dict),
    Metric(
        "memory",
        unit="by statistic of the allocator",
        tensorboard=lambda record: record.memory,
        empty=dict,
    ),
    Metric("world_size", unit="ranks", compute=_world_size, tensorboard="world-size"),
    Metric("data_hash"),
    Metric("expert_bias_hash"),
    Metric("time", unit="UTC, ISO 8601", compute=_by_reporter),
    Metric("run_id", unit="16 hex digits", compute=_by_reporter),
    Metric("attempt", unit="1 for the first start, +1 at each that continues", compute=_by_reporter),
)
