"""The records of evaluations and events, and the JSON form of all records. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.io.files import finite
from megatron_moe.report.metric import StepRecord, metrics


@dataclass(frozen=True)
class EvalRecord:
    """One pass over a split: the mean loss in nats per token over `tokens` tokens, after `iteration` steps.

    time, run_id, attempt: as in the record of a step; None in lines of older versions.
    """

    iteration: int
    split: str
    loss: float
    tokens: int
    seconds: float
    time: str | None = None
    run_id: str | None = None
    attempt: int | None = None


EVENTS: dict[str, str] = {
    "start": "the run, or its next attempt, begins",
    "loaded": "weights were read; `path`",
    "saved": "a checkpoint is written; `path` and `seconds`",
    "fault": "a value that is not finite, a loss spike, replicas that differ, an error, a rank that died or hangs",
    "warning": "what the summary repeats, a checkpoint that was not written, a batch that teaches nothing",
    "stop": "a signal or flag ends the run before its last iteration; `by` names it",
    "end": "the attempt ends, as metrics.run.json says",
    "message": "any other line for the person who watches",
}
"""The kinds of events -> what happened, and the facts that they have."""


@dataclass(frozen=True)
class EventRecord:
    """Something that happened in a run after `iteration` steps, of a kind of `EVENTS`.

    text: for people. facts: by kind, such as the path of a checkpoint. shown: whether a console prints the text; it is
    False where the console shows the same in its own way.
    """

    iteration: int
    kind: str
    text: str
    time: str
    run_id: str
    attempt: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    shown: bool = True


def to_json(record: StepRecord | EvalRecord | EventRecord) -> dict[str, Any]:
    """Return a dict that `json.dumps(..., allow_nan=False)` takes; NAME_hex hold the exact bits of floats."""
    if isinstance(record, EventRecord):
        return finite({**{name: getattr(record, name) for name in _EVENT_KEYS}, **record.facts})
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


_EVENT_KEYS = ("time", "run_id", "attempt", "iteration", "kind", "text")


def _hex(name: str, value: float | None) -> dict[str, str]:
    return {} if value is None else {f"{name}_hex": float(value).hex()}


def exact(record: StepRecord) -> dict[str, Any]:
    """Return the values of a step that two runs must agree on to the bit, as plain values.

    Checkpoints keep them, and `verify-resume` compares them. Floats are float.hex, so that NaN and infinity can be
    compared too.
    """
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
    values = {field.name: line[field.name] for field in dataclasses.fields(EvalRecord) if field.name in line}
    if "loss_hex" in line:
        values["loss"] = float.fromhex(line["loss_hex"])
    return EvalRecord(**values)


def event_from_json(line: dict[str, Any]) -> EventRecord:
    """Return the record that `to_json` made the line of."""
    facts = {name: value for name, value in line.items() if name not in _EVENT_KEYS}
    return EventRecord(**{name: line[name] for name in _EVENT_KEYS}, facts=facts)
