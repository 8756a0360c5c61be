"""What happened, as plain values: one record per optimizer step, one per evaluation. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.io.files import finite
from megatron_moe.report.builtin_metrics import load_max_over_mean
from megatron_moe.report.health import Health
from megatron_moe.report.registry import metrics

_TERA = 1e12


@dataclass(frozen=True)
class ExpertLoad:
    """The routers of the whole model in one step: per MoE layer its E counts, over all ranks."""

    tokens_per_expert: dict[int, list[int]]
    expert_bias_max: float | None
    aux_losses: dict[str, float]
    """Each auxiliary loss in nats per token, the mean over the layers that have it."""
    dropped_per_expert: dict[int, list[int]] = field(default_factory=dict)
    """The choices beyond the capacity, of the layers whose experts have one; not among tokens_per_expert."""

    @property
    def worst(self) -> float | None:
        """max / mean of the most uneven layer."""
        loads = [load_max_over_mean(counts) for counts in self.tokens_per_expert.values()]
        return max((load for load in loads if load is not None), default=None)

    @property
    def empty(self) -> int:
        """(layer, expert) pairs without a token."""
        return sum(counts.count(0) for counts in self.tokens_per_expert.values())


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step when its metrics are computed, on every rank; see `Metric.compute`."""

    run: Run
    world_size: int
    iteration: int
    """Completed steps, this one included."""
    consumed_samples: int
    global_batch_size: int
    loss: float
    """In nats per token over the global batch; not finite in some steps that were skipped."""
    mtp_losses: list[float]
    learning_rate: float
    grad_norm: float | None
    """The norm before clipping."""
    loss_scale: float
    skipped: bool
    """The step was not applied."""
    data_hash: str | None
    """What the step read, in 16 hex digits; the same on every layout."""
    expert_bias_hash: str | None
    """Every layer's expert_bias after the step, in the same form."""
    load: ExpertLoad
    """Without counts at steps between those of --log-interval and --health-interval: they are not gathered there."""
    health: Health | None
    """At the steps of --health-interval."""
    flops_per_token: float
    """Model FLOPs, no recomputation counted."""
    seconds: float
    """This rank's time of the step."""
    seconds_left: float
    memory_bytes: int
    """This rank's peak."""

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch_size * self.run.model.seq_length

    @property
    def model_tflops(self) -> float:
        """10^12 model FLOPs a second, of one device."""
        return self.flops_per_token * self.tokens / self.seconds / self.world_size / _TERA

    @property
    def mfu(self) -> float | None:
        """`model_tflops` as a share of --peak-tflops, None without that flag."""
        peak = self.run.logging.peak_tflops
        return self.model_tflops / peak if peak else None


class StepRecord:
    """The metrics of one optimizer step by name; docs/metrics.md lists those of every run.

    Metrics that are not given are empty (`Metric.empty`). Names that no metric has are kept: they are of a file that
    another program wrote.
    """

    def __init__(self, **values: Any) -> None:
        for metric in metrics():
            if metric.required and metric.name not in values:
                raise TypeError(f"the record of a step needs {metric.name}")
        own = {metric.name: values[metric.name] if metric.name in values else metric.empty() for metric in metrics()}
        self.__dict__.update({**own, **values})

    def __getattr__(self, name: str) -> Any:  # for what is not there
        raise AttributeError(f"the record of a step has no {name}; it has {', '.join(self.__dict__)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a record does not change; replace(...) makes another one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepRecord) and self.values() == other.values()

    def __repr__(self) -> str:
        return f"StepRecord({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def values(self) -> Mapping[str, Any]:
        """Return all metrics, name -> value, in the order of a line of metrics.jsonl."""
        return dict(self.__dict__)

    def replace(self, **changes: Any) -> StepRecord:
        """Return the record with other values of the metrics named."""
        return StepRecord(**{**self.__dict__, **changes})


@dataclass(frozen=True)
class EvalRecord:
    """One pass over a split: the mean loss in nats per token over `tokens` tokens, after `iteration` steps."""

    iteration: int
    split: str
    loss: float
    tokens: int
    seconds: float


def to_json(record: StepRecord | EvalRecord) -> dict[str, Any]:
    """Return a dict that `json.dumps(..., allow_nan=False)` takes; NAME_hex hold the exact bits of floats."""
    if isinstance(record, EvalRecord):
        return finite({**dataclasses.asdict(record), **_hex("loss", record.loss)})
    values = record.values()
    line = dict(values)
    for metric in metrics():
        if metric.to_json is not None and values[metric.name] is not None:
            line[metric.name] = metric.to_json(values[metric.name])
        if metric.exact:
            line.update(_hex(metric.name, values[metric.name]))
    return finite(line)


def _hex(name: str, value: float | None) -> dict[str, str]:
    return {} if value is None else {f"{name}_hex": float(value).hex()}


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
    """Return the record that `to_json` made the line of, also where the loss was NaN or infinite."""
    values = dict(line)
    for metric in metrics():
        if metric.from_json is not None and values.get(metric.name) is not None:
            values[metric.name] = metric.from_json(values[metric.name])
        if metric.exact and f"{metric.name}_hex" in values:
            values[metric.name] = float.fromhex(values.pop(f"{metric.name}_hex"))
    return StepRecord(**values)


def eval_from_json(line: dict[str, Any]) -> EvalRecord:
    """Return the record that `to_json` made the line of."""
    values = {field.name: line[field.name] for field in dataclasses.fields(EvalRecord)}
    if "loss_hex" in line:
        values["loss"] = float.fromhex(line["loss_hex"])
    return EvalRecord(**values)
