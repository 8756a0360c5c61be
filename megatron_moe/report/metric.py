"""A metric of a training step: its name and unit, how it is computed, and where and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_moe.report.records import StepFacts, StepRecord


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
    function of these steps' records that returns the part. Nothing is shown for None."""
    console_rank: int = 85
    """The parts of a log line are sorted by it: 10 is the loss, 80 the dropped share, 90 what was skipped."""
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
