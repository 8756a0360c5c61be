"""The metrics of a training step: what is known about a step, the metrics computed from it, and their registry.

A `Metric` computes one value from the `StepFacts` of a step and declares where the value is shown. The registry holds
the built-in metrics (`builtin_metrics.py`) and those that a program adds with `register_metric`. `compute_metrics`
makes the `StepRecord` of a step: the values of all metrics by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.report.health import Health, load_max_over_mean

_TERA = 1e12
_EVALUATION_TAGS = ("loss/valid", "loss/test")


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
        """The most uneven layer's max / mean of the token counts."""
        loads = [load_max_over_mean(counts) for counts in self.tokens_per_expert.values()]
        return max((load for load in loads if load is not None), default=None)

    @property
    def empty(self) -> int:
        """The number of (layer, expert) pairs without a token."""
        return sum(counts.count(0) for counts in self.tokens_per_expert.values())


@dataclass(frozen=True)
class StepFacts:
    """The facts about a step that its metrics are computed from, on every rank; see `Metric.compute`."""

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
    params_norm: float | None = None
    """The norm of all weights after the step, at those of --log-interval with --log-params-norm."""
    num_zeros: int | None = None
    """Elements of all gradients that are 0, at the same steps with --log-num-zeros-in-grad."""
    max_attention_logit: float | None = None
    """The largest attention logit of any head, with --qk-clip or --log-max-attention-logit."""
    clipped_heads: int | None = None
    """With --qk-clip, the heads of all layers with a logit above its threshold; None at skipped steps."""
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    """The slowest rank's time per iteration in each part of a step, at the same steps with --timing-log-level."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """What the allocator of this rank's device holds, by Megatron-LM's names, with --log-memory-to-tensorboard."""

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch_size * self.run.model.seq_length

    @property
    def model_tflops(self) -> float:
        """The rate of model FLOPs of one device, in 10^12 per second."""
        return self.flops_per_token * self.tokens / self.seconds / self.world_size / _TERA

    @property
    def mfu(self) -> float | None:
        """`model_tflops` as a share of --peak-tflops, None without that flag."""
        peak = self.run.logging.peak_tflops
        return self.model_tflops / peak if peak else None


class MetricError(Exception):
    """A metric could not be computed or shown; the message names it."""


@dataclass(frozen=True)
class Metric:
    """One metric of a step. It declares all that the log, the files and the plot know about it.

    A number that is NaN or infinite is null in metrics.jsonl, as JSON has no word for it.
    """

    name: str
    """Its key in metrics.jsonl and its attribute in a `StepRecord`: a Python identifier."""
    unit: str = ""
    """For people: the table in docs/metrics.md and the axis of the plot."""
    compute: Callable[[StepFacts], Any] | None = None
    """Return the value from what is known about the step: a number, a string, a list or dict of such, or None where
    there is none. Without it, the value is the fact of the metric's name. It is called at every step on every rank,
    with the same facts but for `seconds` and `memory_bytes`."""
    console: str | Callable[[Sequence[StepRecord]], str | None] | None = None
    """Its part of a log line: a format string for the last value of the line's steps, such as "share {:.3f}", or a
    function of these steps' records, of the last 10,000 at most, that returns the part. The last record alone has
    `tokens_per_expert` and `dropped_per_expert`. Nothing is shown for None."""
    console_rank: int = 85
    """The parts of a log line are sorted by it: 10 is the loss, 80 the dropped share, 100 the time left, and 110 what
    only some lines have."""
    tensorboard: str | Callable[[StepRecord], Mapping[str, float | None]] | None = None
    """The tag of its TensorBoard scalar, or a function that returns several, tag -> number."""
    plot: bool = False
    """The picture of the run has a panel with this number over the iterations."""
    exact: bool = False
    """The JSON line also has NAME_hex, the float's bits, so that two runs can be compared bit by bit, NaN included."""
    required: bool = False
    """A record cannot do without it."""
    empty: Callable[[], Any] = lambda: None
    """Make the value of a record, or of an older file's line, that has none."""
    to_json: Callable[[Any], Any] | None = None
    """Return plain values of the value, where it is something else."""
    from_json: Callable[[Any], Any] | None = None
    """Return the value from what JSON made of it, where that is something else."""

    def value(self, facts: StepFacts) -> Any:
        """Compute the value.

        Raises:
            MetricError: `compute` raised, or returned what cannot be written or shown.
        """
        if self.compute is None:
            return getattr(facts, self.name)
        try:
            value = self.compute(facts)
        except Exception as error:
            raise MetricError(
                f"metric {self.name} failed at iteration {facts.iteration}: {type(error).__name__}: {error}; "
                "return None at steps that have no value"
            ) from error
        as_number = isinstance(self.console, str) or isinstance(self.tensorboard, str) or self.plot or self.exact
        if not (value is None or isinstance(value, (int, float)) if as_number else is_plain(value)):
            wanted = "a number or None" if as_number else "plain values or None"
            raise MetricError(
                f"metric {self.name} returned a {type(value).__name__} at iteration {facts.iteration}; "
                f"return {wanted}, of a tensor for example tensor.item()"
            )
        return value

    def console_text(self, records: Sequence[StepRecord]) -> str | None:
        """Return the part of the log line of these steps, None to show nothing."""
        if not isinstance(self.console, str):
            return None if self.console is None else self._shown("console", self.console, records)
        values = [getattr(record, self.name) for record in records]
        known = [value for value in values if value is not None]
        return self.console.format(known[-1]) if known else None

    def scalars(self, record: StepRecord) -> dict[str, float]:
        """Return the TensorBoard scalars of a step, tag -> number."""
        if self.tensorboard is None:
            return {}
        if isinstance(self.tensorboard, str):
            found: Mapping[str, float | None] = {self.tensorboard: getattr(record, self.name)}
        else:
            found = self._shown("tensorboard", self.tensorboard, record)
        return {tag: float(number) for tag, number in found.items() if number is not None}

    def _shown(self, where: str, show: Callable[[Any], Any], shown: Any) -> Any:
        try:
            return show(shown)
        except Exception as error:
            raise MetricError(f"metric {self.name}: its `{where}` failed: {type(error).__name__}: {error}") from error


def is_plain(value: Any) -> bool:
    """Return whether JSON can hold the value."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(inner) for inner in value)
    return value is None or isinstance(value, (bool, int, float, str))


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


_built_in: dict[str, Metric] = {}
_added: dict[str, Metric] = {}


def declare_built_in(metrics: Iterable[Metric]) -> None:
    """Declare the metrics of every run; `megatron_moe.report` calls it when it is imported."""
    _built_in.update((metric.name, metric) for metric in metrics)


def metrics() -> tuple[Metric, ...]:
    """Return all metrics in the order of their keys in a line of metrics.jsonl."""
    return (*_built_in.values(), *_added.values())


def added_metrics() -> tuple[Metric, ...]:
    """Return the metrics that `register_metric` added, in the order in which it was called."""
    return tuple(_added.values())


def register_metric(metric: Metric) -> None:
    """Add a metric to the runs of this process: to the log, metrics.jsonl, TensorBoard and the plot, as it says.

    Call it before `pretrain`, in the same way on every rank. A metric that raises, or returns what cannot be written,
    ends the run on all ranks with one error that names it.

    Raises:
        ValueError: the name is not an identifier, or is taken; there is no `compute`; the TensorBoard tag is taken; or
            the format string does not take a number.
    """
    if not metric.name.isidentifier():
        raise ValueError(f"metric {metric.name!r}: its name has to be a Python identifier, for example top_share")
    if metric.compute is None:
        raise ValueError(f"metric {metric.name}: it has no `compute`; give a function from StepFacts to its value")
    taken = {name for known in metrics() for name in (known.name, f"{known.name}_hex")}
    if metric.name in taken or hasattr(StepRecord, metric.name):
        raise ValueError(f"metric {metric.name}: there is one of this name; choose another, or unregister_metric it")
    tags = {known.tensorboard: known.name for known in metrics() if isinstance(known.tensorboard, str)}
    tags.update(dict.fromkeys(_EVALUATION_TAGS, "the evaluation"))
    if isinstance(metric.tensorboard, str) and metric.tensorboard in tags:
        raise ValueError(
            f"metric {metric.name}: TensorBoard tag {metric.tensorboard} is that of {tags[metric.tensorboard]}; "
            "choose another"
        )
    if isinstance(metric.console, str):
        try:
            metric.console.format(1.0)
        except (ValueError, LookupError) as error:
            raise ValueError(
                f"metric {metric.name}: console format {metric.console!r} does not take a number ({error}); "
                "write for example 'share {:.3f}'"
            ) from error
    _added[metric.name] = metric


def unregister_metric(name: str) -> None:
    """Take a metric out again that `register_metric` has added.

    Raises:
        ValueError: none of this name was added.
    """
    if name not in _added:
        raise ValueError(f"metric {name}: none of this name was added; there are {', '.join(_added) or 'none'}")
    del _added[name]


def compute_metrics(facts: StepFacts) -> StepRecord:
    """Return the record of a step.

    Raises:
        MetricError: a metric failed.
    """
    return StepRecord(**{metric.name: metric.value(facts) for metric in metrics()})
