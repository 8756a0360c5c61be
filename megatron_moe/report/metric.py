"""The metrics of a training step: what is known about a step, the metrics computed from it, and where they are shown.

A `Metric` declares where a value is shown. `BUILT_IN` lists the metrics of every run; a program adds its own, which
also compute their value from the `StepFacts` of a step, with `register_metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_moe.config.schema import Run
from megatron_moe.io.texts import duration_text
from megatron_moe.report.health import load_max_over_mean, scalars, summary_line
from megatron_moe.report.records import OWN_WORK, StepRecord

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
    expert_bias_error: float | None = None
    """The most that a bias of quantile balancing may be off; see `moe.load_balance.quantile_bias`."""

    @property
    def worst(self) -> float | None:
        """The most uneven layer's max / mean of the token counts."""
        loads = map(load_max_over_mean, self.tokens_per_expert.values())
        return max(filter(None, loads), default=None)

    @property
    def empty(self) -> int | None:
        """The number of (layer, expert) pairs without a token; None without counts."""
        layers = self.tokens_per_expert.values()
        return sum(counts.count(0) for counts in layers) if layers else None


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step on every rank, for `Metric.compute`. Fields of `record` are attributes of it, too."""

    run: Run
    world_size: int
    record: StepRecord
    """The metrics of every run; time, run_id and attempt are filled in where it is written."""
    load: ExpertLoad
    """Without counts at steps between those of --log-interval and --health-interval: they are not gathered there."""
    flops_per_token: float
    """Model FLOPs, no recomputation counted."""
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    """The slowest rank's time per iteration in each part of a step, at logged steps with --timing-log-level."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called for names that are not fields
            return getattr(self.__dict__["record"], name)


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
    """For people: the table in docs/reference/metrics.md and the axis of the plot."""
    compute: Callable[[StepFacts], Any] | None = None
    """Return the value from what is known about the step: a number, a string, a list or dict of such, or None where
    there is none. It is called at every step on every rank, with the same facts but for `seconds` and `memory_bytes`.
    The metrics of every run have no function: the trainer computes them."""
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

    def value(self, facts: StepFacts) -> Any:
        """Compute the value; a MetricError if `compute` raised, or returned what cannot be written or shown."""
        assert self.compute is not None, self.name
        try:
            value = self.compute(facts)
        except Exception as error:
            raise MetricError(
                f"metric {self.name} failed at iteration {facts.record.iteration}: {type(error).__name__}: {error}; "
                "return None at steps that have no value"
            ) from error
        if isinstance(self.console, str) or isinstance(self.tensorboard, str) or self.plot or self.exact:
            wanted, fits = "a number", value is None or isinstance(value, (int, float))
        else:
            wanted, fits = "plain values", is_plain(value)
        if not fits:
            raise MetricError(
                f"metric {self.name} returned a {type(value).__name__} at iteration {facts.record.iteration}; "
                f"return {wanted} or None, of a tensor for example tensor.item()"
            )
        return value

    def console_text(self, records: Sequence[StepRecord]) -> str | None:
        """Return the part of the log line of these steps, None to show nothing."""
        if self.console is None:
            return None
        if isinstance(self.console, str):
            for record in reversed(records):
                value = getattr(record, self.name, None)
                if value is not None:
                    return self.console.format(value)
            return None
        try:
            return self.console(records)
        except Exception as error:
            raise self._not_shown("console", error) from error

    def scalars(self, record: StepRecord) -> dict[str, float]:
        """Return the TensorBoard scalars of a step, tag -> number."""
        if self.tensorboard is None:
            return {}
        if isinstance(self.tensorboard, str):
            found: Mapping[str, float | None] = {self.tensorboard: getattr(record, self.name, None)}
        else:
            try:
                found = self.tensorboard(record)
            except Exception as error:
                raise self._not_shown("tensorboard", error) from error
        return {tag: float(number) for tag, number in found.items() if number is not None}

    def _not_shown(self, where: str, error: Exception) -> MetricError:
        return MetricError(f"metric {self.name}: its `{where}` failed: {type(error).__name__}: {error}")


def is_plain(value: Any) -> bool:
    """Return whether JSON can hold the value."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(inner) for inner in value)
    return value is None or isinstance(value, (bool, int, float, str))


# Parts of a log line: losses are means over the steps that were applied, speeds are over the time of all steps, and
# everything else is the last step's. What is not in every line comes last, so that the columns stay where they are; a
# narrow terminal cuts a line there, so what must be seen comes first.


def _applied(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps that were not skipped, or the last one where all were."""
    return [record for record in records if not record.skipped] or [records[-1]]


def _mean_loss(records: Sequence[StepRecord]) -> str:
    losses = [record.loss for record in _applied(records)]
    return f"loss {math.fsum(losses) / len(losses):.4f}"


def _mean_mtp_losses(records: Sequence[StepRecord]) -> str | None:
    text = ""
    for losses in zip(*(record.mtp_losses for record in _applied(records))):
        text += f" {math.fsum(losses) / len(losses):.4f}"
    return f"mtp{text}" if text else None


def _sources(records: Sequence[StepRecord]) -> str | None:
    """Return each source's mean loss and its tokens, in the steps that were applied, and its epochs so far."""
    parts = []
    for name, last in records[-1].sources.items():
        steps = [record.sources[name] for record in _applied(records)]
        tokens = sum(step.tokens for step in steps)
        losses = math.fsum(step.tokens * step.loss for step in steps if step.loss is not None)
        loss = f"{losses / tokens:.4f}" if tokens else "-"
        parts.append(f"{name} {loss} {tokens:,} tok {last.epochs:.2f} ep")
    return " | ".join(parts) or None


def _source_scalars(record: StepRecord) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, source in record.sources.items():
        found[f"loss/source/{name}"] = source.loss
        found[f"tokens/source/{name}"] = source.tokens
        found[f"epochs/source/{name}"] = source.epochs
    return found


def _mean_rate(records: Sequence[StepRecord], name: str) -> float:
    """Return the mean of a rate over the time of all steps."""
    amount = seconds = 0.0
    for record in records:
        amount += (getattr(record, name) or 0.0) * record.seconds
        seconds += record.seconds
    return amount / seconds if seconds > 0 else 0.0


def _tokens_per_second(records: Sequence[StepRecord]) -> str:
    seconds = sum(record.seconds for record in records)
    rate = sum(record.tokens for record in records) / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f} tok/s"


def _health(records: Sequence[StepRecord]) -> str | None:
    for record in reversed(records):
        if record.health is not None:
            return summary_line(record.health) or None
    return None


def _load(records: Sequence[StepRecord]) -> str | None:
    last = records[-1]
    return None if last.expert_load is None else f"load {last.expert_load:.2f} | empty {last.empty_experts}"


def dropped_share(record: StepRecord) -> float | None:
    """Return the share of choices that was dropped in the layers whose experts have a capacity; None without one."""
    dropped = kept = 0
    for layer, counts in record.dropped_per_expert.items():
        dropped += sum(counts)
        kept += sum(record.tokens_per_expert[layer])
    return dropped / (dropped + kept) if dropped + kept else None


def _dropped(records: Sequence[StepRecord]) -> str | None:
    share = dropped_share(records[-1])
    return None if share is None else f"dropped {100 * share:.2f}%"


def _skipped(records: Sequence[StepRecord]) -> str | None:
    skipped = sum(record.skipped for record in records)
    return f"SKIPPED {skipped} (loss scale {records[-1].loss_scale:g})" if skipped else None


def _layer_loads(record: StepRecord) -> dict[str, float | None]:
    tag = "experts_by_layer/load_max_over_mean"
    return {f"{tag}_{layer}": load_max_over_mean(counts) for layer, counts in record.tokens_per_expert.items()}


def _timers(record: StepRecord) -> dict[str, float | None]:
    """Return the times and the throughput by Megatron-LM's tags."""
    times: dict[str, float | None] = {f"{name}-time": seconds for name, seconds in record.timers.items()}
    if times:
        times["throughput"] = record.model_tflops
    return times


def _rank_scalars(record: StepRecord) -> dict[str, float | None]:
    """Return how uneven the ranks' own work is, and the share of their time in which they wait for others."""
    if not record.rank_seconds:
        return {}
    waiting = sum(record.rank_seconds["waiting"])
    everything = sum(map(sum, record.rank_seconds.values()))
    own = [sum(parts) for parts in zip(*(record.rank_seconds[name] for name in OWN_WORK))]
    usual = median(own)
    return {
        "ranks/work_max_over_median": max(own) / usual if usual else None,
        "ranks/waiting_share": waiting / everything if everything else None,
    }


BUILT_IN: tuple[Metric, ...] = (
    Metric("iteration"),
    Metric("consumed_samples", "sequences"),
    Metric("loss", "nats per token", exact=True, console=_mean_loss, console_rank=10, tensorboard="loss/train"),
    Metric("learning_rate", console="lr {:.2e}", console_rank=20, tensorboard="optimizer/learning_rate"),
    Metric(
        "grad_norm",
        exact=True,
        console=lambda steps: "grad norm -" if steps[-1].grad_norm is None else f"grad norm {steps[-1].grad_norm:.3f}",
        console_rank=30,
        tensorboard="optimizer/grad_norm",
    ),
    Metric("loss_scale", tensorboard="optimizer/loss_scale"),
    Metric("skipped", console=_skipped, console_rank=16, tensorboard="optimizer/skipped"),
    Metric("tokens", "tokens"),
    Metric("seconds", "s", tensorboard="speed/step_seconds"),
    Metric(
        "tokens_per_second",
        "tokens/s, all devices",
        console=_tokens_per_second,
        console_rank=40,
        tensorboard="speed/tokens_per_second",
    ),
    Metric(
        "model_tflops",
        "10^12 model FLOPs/s, of a device",
        console=lambda steps: f"{_mean_rate(steps, 'model_tflops'):.3g} TFLOP/s",
        console_rank=50,
        tensorboard="speed/model_tflops",
    ),
    Metric(
        "mfu",
        "share of --peak-tflops",
        console=lambda steps: None if steps[-1].mfu is None else f"MFU {100 * _mean_rate(steps, 'mfu'):.1f}%",
        console_rank=60,
        tensorboard="speed/mfu",
    ),
    Metric("tokens_per_expert", "choices, by layer", tensorboard=_layer_loads),
    Metric(
        "expert_load",
        "max / mean of the worst layer",
        console=_load,
        console_rank=70,
        tensorboard="experts/load_max_over_mean",
    ),
    Metric("empty_experts", "(layer, expert) pairs", tensorboard="experts/empty"),
    Metric("expert_bias_max", "largest magnitude", tensorboard="experts/bias_max"),
    Metric(
        "expert_bias_error",
        "bound of quantile balancing",
        console="bias within {:.2g}",
        console_rank=75,
        tensorboard="experts/bias_error",
    ),
    Metric(
        "aux_losses",
        "nats per token",
        tensorboard=lambda record: {f"loss/{name}": loss for name, loss in record.aux_losses.items()},
    ),
    Metric(
        "seconds_left", "s", console=lambda steps: f"left {duration_text(steps[-1].seconds_left)}", console_rank=100
    ),
    Metric("global_batch_size", "sequences", tensorboard="batch/global_batch_size"),
    Metric("memory_bytes", "bytes, the peak of the rank that writes", tensorboard="memory/peak_bytes"),
    Metric(
        "health",
        console=_health,
        console_rank=110,
        tensorboard=lambda record: {} if record.health is None else scalars(record.health),
    ),
    Metric(
        "dropped_per_expert",
        "choices, by layer",
        console=_dropped,
        console_rank=80,
        tensorboard=lambda record: {"experts/dropped_share": dropped_share(record)},
    ),
    Metric(
        "mtp_losses",
        "nats per target",
        console=_mean_mtp_losses,
        console_rank=15,
        tensorboard=lambda record: {f"loss/mtp_{i}": loss for i, loss in enumerate(record.mtp_losses, start=1)},
    ),
    Metric(
        "sources",
        "by source",
        console=_sources,
        console_rank=105,
        tensorboard=_source_scalars,
    ),
    Metric("params_norm", console="params norm {:.3f}", console_rank=31, tensorboard="params-norm"),
    Metric(
        "num_zeros", "elements of all gradients", console="num zeros {:.0f}", console_rank=32, tensorboard="num-zeros"
    ),
    Metric(
        "max_attention_logit", console="max attention logit {:.4g}", console_rank=33, tensorboard="max_attention_logit"
    ),
    Metric(
        "clipped_heads",
        "heads of all layers",
        console="clipped heads {:.0f}",
        console_rank=34,
        tensorboard="optimizer/clipped_heads",
    ),
    Metric("timers", "s per iteration, by part", tensorboard=_timers),
    Metric("rank_seconds", "s per step, by part and rank", tensorboard=_rank_scalars),
    Metric("memory", "by statistic of the allocator", tensorboard=lambda record: record.memory),
    Metric("world_size", "ranks", tensorboard="world-size"),
    Metric("data_hash"),
    Metric("expert_bias_hash"),
    Metric("time", "UTC, ISO 8601"),
    Metric("run_id", "16 hex digits"),
    Metric("attempt", "1 for the first start, +1 at each that continues"),
)


_added: dict[str, Metric] = {}


def metrics() -> tuple[Metric, ...]:
    """Return all metrics in the order of their keys in a line of metrics.jsonl."""
    return (*BUILT_IN, *_added.values())


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
    taken = f"metric {metric.name}: there is one of this name; choose another, or unregister_metric it"
    if metric.name == "extra" or hasattr(StepRecord, metric.name):
        raise ValueError(taken)
    tag = metric.tensorboard
    if isinstance(tag, str) and tag in _EVALUATION_TAGS:
        raise ValueError(f"metric {metric.name}: TensorBoard tag {tag} is that of the evaluation; choose another")
    for known in metrics():
        if isinstance(tag, str) and tag == known.tensorboard:
            raise ValueError(f"metric {metric.name}: TensorBoard tag {tag} is that of {known.name}; choose another")
        if metric.name in (known.name, f"{known.name}_hex"):
            raise ValueError(taken)
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
    """Take out a metric that `register_metric` has added; a ValueError if there is none of this name."""
    if name not in _added:
        raise ValueError(f"metric {name}: none of this name was added; there are {', '.join(_added) or 'none'}")
    del _added[name]


def with_added_metrics(facts: StepFacts) -> StepRecord:
    """Return the record of a step with the metrics that a program added; a MetricError if one failed."""
    return facts.record.replace(extra={name: metric.value(facts) for name, metric in _added.items()})
