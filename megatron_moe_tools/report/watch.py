"""What is noticed step by step: losses and gradients that jump, slow steps, clipped and skipped ones."""

from __future__ import annotations

from collections import deque
from typing import Any

_SPAN, _ENOUGH, _MOST = 64, 20, 200
_DEVIATIONS, _LEAST_JUMP = 8.0, 0.1
_NORM_JUMP, _SLOW = 8.0, 3.0


class StepWatch:
    """Counts and places of unusual steps, each compared with the steps shortly before it.

    A loss spikes where it is above the median of the last 64 by 8 deviations (of the median absolute deviation) and by
    a tenth of it; a gradient norm where it is 8 times the median; a step is slow where it takes 3 times the median.
    """

    def __init__(self) -> None:
        self.clip: float | None = None
        """The norm from which on gradients are clipped, where the run's flags are known."""
        self.skipped = self.not_finite = self.clipped = self.norms = self.slow = 0
        self.skipped_in_a_row = 0
        """The skipped steps since the last one that was applied."""
        self.seconds_lost = 0.0
        self.last_skipped: int | None = None
        self.spikes: deque[tuple[int, float]] = deque(maxlen=_MOST)
        self.spike_count = self.norm_spikes = 0
        self.first_not_finite: int | None = None
        self._losses, self._norms, self._times = (deque[float](maxlen=_SPAN) for _ in range(3))

    def step(self, line: dict[str, Any], values: dict[str, float]) -> None:
        """Take a step: its line, and the finite numbers of it by name."""
        iteration = line["iteration"]
        loss, norm, seconds = (values.get(name) for name in ("loss", "grad_norm", "seconds"))
        if line.get("skipped"):
            self.skipped += 1
            self.last_skipped = iteration
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
        if loss is None:
            self.not_finite += 1
            self.first_not_finite = self.first_not_finite or iteration
        elif not line.get("skipped"):
            if len(self._losses) >= _ENOUGH and loss > self._most_loss():
                self.spike_count += 1
                self.spikes.append((iteration, loss))
            self._losses.append(loss)
        if norm is not None:
            self.norms += 1
            self.clipped += bool(self.clip) and norm > (self.clip or 0)
            if len(self._norms) >= _ENOUGH and norm > _NORM_JUMP * _median(self._norms):
                self.norm_spikes += 1
            self._norms.append(norm)
        if seconds is not None:
            if len(self._times) >= _ENOUGH and seconds > _SLOW * _median(self._times):
                self.slow += 1
                self.seconds_lost += seconds - _median(self._times)
            self._times.append(seconds)

    def _most_loss(self) -> float:
        middle = _median(self._losses)
        deviation = 1.4826 * _median([abs(loss - middle) for loss in self._losses])
        return middle + max(_DEVIATIONS * deviation, _LEAST_JUMP * abs(middle))


def _median(values: Any) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])
