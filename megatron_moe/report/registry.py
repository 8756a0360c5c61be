"""Which metrics there are: those of every run, and those that a program has added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moe.report.builtin_metrics import BUILT_IN
from megatron_moe.report.metric import Metric

if TYPE_CHECKING:
    from megatron_moe.report.records import StepFacts, StepRecord

_EVALUATION_TAGS = ("loss/valid", "loss/test")
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
    taken = {name for known in metrics() for name in (known.name, f"{known.name}_hex")}
    if metric.name in taken or hasattr(_record_type(), metric.name):
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


def computed(facts: StepFacts) -> StepRecord:
    """Return the record of a step.

    Raises:
        MetricError: a metric failed.
    """
    return _record_type()(**{metric.name: metric.value(facts) for metric in metrics()})


def _record_type() -> type[StepRecord]:
    from megatron_moe.report.records import StepRecord  # which needs the metrics

    return StepRecord
