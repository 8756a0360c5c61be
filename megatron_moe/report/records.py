"""What sinks are told about a run: the records of steps, evaluations and events. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_moe.report.health import Health


@dataclass(frozen=True)
class SourceStep:
    """A named source in one step.

    loss: nats per token, None without tokens. tokens: of the step that count for the loss. epochs: the passes over it
    since the run began.
    """

    loss: float | None
    tokens: int
    epochs: float


OWN_WORK = ("data", "forward", "backward", "optimizer", "save")
"""The parts of a rank's own work, by which it is compared with others."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The metrics of one optimizer step, in the order of the keys in metrics.jsonl.

    docs/reference/metrics.md describes each. Metrics that a program registered, and keys of lines that another program
    wrote, are in `extra`; they can be read as attributes, too.
    """

    iteration: int
    consumed_samples: int
    loss: float  # not finite in some steps that were skipped
    learning_rate: float
    grad_norm: float | None  # before clipping
    loss_scale: float
    skipped: bool  # the step was not applied
    tokens: int  # without padding
    seconds: float
    tokens_per_second: float = 0.0
    model_tflops: float = 0.0
    mfu: float | None = None  # with --peak-tflops
    tokens_per_expert: dict[int, list[int]] = field(default_factory=dict)
    expert_load: float | None = None
    empty_experts: int | None = None
    expert_bias_max: float | None = None
    expert_bias_error: float | None = None  # with quantile balancing
    aux_losses: dict[str, float] = field(default_factory=dict)
    seconds_left: float = 0.0
    global_batch_size: int = 0
    memory_bytes: int = 0
    health: Health | None = None  # at the steps of --health-interval
    dropped_per_expert: dict[int, list[int]] = field(default_factory=dict)
    mtp_losses: list[float] = field(default_factory=list)
    sources: dict[str, SourceStep] = field(default_factory=dict)
    params_norm: float | None = None
    num_zeros: int | None = None
    max_attention_logit: float | None = None
    clipped_heads: int | None = None
    timers: Mapping[str, float] = field(default_factory=dict)
    rank_seconds: Mapping[str, list[float]] = field(default_factory=dict)  # by part, of each rank
    memory: Mapping[str, int] = field(default_factory=dict)
    world_size: int | None = None
    data_hash: str | None = None  # of what the step read; the same on every layout
    expert_bias_hash: str | None = None  # of every layer's expert_bias after the step
    time: str | None = None
    run_id: str | None = None
    attempt: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:  # misspelled names of fields stay errors for a type checker

        def __getattr__(self, name: str) -> Any:  # called for names that are not fields
            extra = self.__dict__.get("extra", {})
            if name not in extra:
                known = ", ".join([*self.__dict__, *extra])
                raise AttributeError(f"the record of a step has no {name}; it has {known}")
            return extra[name]

    def values(self) -> dict[str, Any]:
        """Return all metrics, name -> value, in the order of a line of metrics.jsonl."""
        values = dict(self.__dict__)
        values.update(values.pop("extra"))
        return values

    def replace(self, **changes: Any) -> StepRecord:
        """Return the record with other values of the fields named."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class EvalRecord:
    """One pass over a split: the mean loss in nats per token over `tokens` tokens, after `iteration` steps.

    bytes: of the text of these tokens; None where the tokenizer does not tell, and in lines of older versions.
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
    bytes: int | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """The loss of the text in bits per byte, which models with other tokenizers can be compared by."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


EVENTS = ("start", "loaded", "saved", "fault", "warning", "slow", "stop", "end", "message")
"""The kinds of events; docs/reference/metrics.md says what happened, and which facts each has."""


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


def exact(record: StepRecord) -> dict[str, Any]:
    """Return the values of a step that two runs must agree on to the bit; floats as float.hex, NaN among them."""
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
