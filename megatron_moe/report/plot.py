"""A picture of a run, drawn from metrics.jsonl: the loss, the balance of the experts, the load of each expert."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import replacing
from megatron_moe.report.jsonl import read_evaluations, read_steps
from megatron_moe.report.metric import metrics
from megatron_moe.report.sink import Sink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 512
"""Rows (layers x experts) up to which every expert gets a row of the heat map; beyond, every layer gets one."""
STEPS_OF_SOURCES, MOST_SOURCES = 10, 8
"""Measured steps whose choices by source are added up, and the sources that are shown of them."""
MAX_COLUMNS = 800
"""Points in time at which the loads of experts are shown: those of longer runs are averaged over equal spans of counted
steps, so that reading a run of any length takes a bounded memory for them."""

_INK: dict[Any, Any] = {
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.size": 9.5,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
_TRAIN, _SPLITS, _ENTROPY = "#2563a8", {"valid": "#d1495b", "test": "#3b8746"}, "#6b6b6b"


class Spans:
    """The means of a series of rows over at most `most` equal spans, of which the last may be shorter.

    Where a row would begin one span too many, each two neighbours become one: what is kept does not grow.
    """

    def __init__(self, most: int) -> None:
        self.width = 1
        """Rows per span."""
        self.rows = 0
        self._most = most
        self._sums: list[np.ndarray] = []

    def add(self, row: np.ndarray) -> None:
        """Add a row, [R]."""
        if self.rows == self._most * self.width:
            self._sums = [np.sum(self._sums[at : at + 2], axis=0) for at in range(0, len(self._sums), 2)]
            self.width *= 2
        if self.rows % self.width == 0:
            self._sums.append(row)
        else:
            self._sums[-1] = self._sums[-1] + row
        self.rows += 1

    def means(self) -> np.ndarray:
        """Return the means, [spans, R]."""
        sizes = np.full(len(self._sums), self.width)
        sizes[-1] = self.rows - (len(self._sums) - 1) * self.width
        return np.stack(self._sums) / sizes[:, None]


class Loads:
    """The loads of the experts in the steps where they were counted: tokens over the mean of the expert's layer.

    Args:
        experts: layer -> its number of experts, in the order of the layers.
    """

    def __init__(self, experts: dict[int, int]) -> None:
        self.experts = experts
        self.by_expert = sum(experts.values()) <= MAX_ROWS
        """Whether `rows` has one for each expert; otherwise it is `fullest`."""
        self.iterations: list[int] = []
        """The first and the last step."""
        self.steps = Spans(MAX_COLUMNS)
        """The iterations, [1]."""
        self.fullest = Spans(MAX_COLUMNS)
        """Of each layer the load of its fullest expert, [L]."""
        self.rows = Spans(MAX_COLUMNS) if self.by_expert else self.fullest

    def add(self, iteration: int, tokens_per_expert: dict[int, list[int]]) -> None:
        """Add a step."""
        self.iterations = [*self.iterations[:1], iteration]
        self.steps.add(np.array([iteration], dtype=np.float64))
        loads = []
        for layer in self.experts:
            counts = np.asarray(tokens_per_expert[layer], dtype=np.float64)
            loads.append(counts / max(float(counts.mean()), 1e-9))
        self.fullest.add(np.array([load.max() for load in loads]))
        if self.by_expert:
            self.rows.add(np.concatenate(loads))


class SourceLoads:
    """How the tokens of each source fell on the experts of each layer, in the last steps where that was counted."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.iterations: deque[int] = deque(maxlen=STEPS_OF_SOURCES)
        self._counts: deque[dict[str, np.ndarray]] = deque(maxlen=STEPS_OF_SOURCES)

    def add(self, iteration: int, counts: Mapping[int, Mapping[str, Sequence[int]]]) -> None:
        """Take the counts of a step, layer -> source -> its choices that each expert got; none leaves all as it is."""
        found: dict[str, np.ndarray] = {}
        most = max((len(row) for of_layer in counts.values() for row in of_layer.values()), default=0)
        for place, of_layer in enumerate(counts.values()):
            for name, row in of_layer.items():
                # Layers with fewer experts have NaN at their end.
                table = found.setdefault(name, np.full((len(counts), most), np.nan))
                table[place, : len(row)] = row
        if not found:
            return
        if list(counts) != self.layers:
            self.layers = list(counts)
            self.iterations.clear()
            self._counts.clear()
        self.iterations.append(iteration)
        self._counts.append(found)

    def loads(self) -> dict[str, np.ndarray]:
        """Return source -> [L, E] its choices over the mean of the layer, of up to `MOST_SOURCES` with the most."""
        totals: dict[str, np.ndarray] = {}
        for step in self._counts:
            for name, table in step.items():
                totals[name] = totals.get(name, 0) + table
        largest = sorted(totals, key=lambda name: -np.nansum(totals[name]))[:MOST_SOURCES]
        for name, table in list(totals.items()):
            if name in largest:
                totals[name] = table / np.maximum(np.nanmean(table, axis=1, keepdims=True), 1e-9)
            else:
                del totals[name]
        return totals


class History:
    """The data of a run that the picture shows, read from its metrics file; a skipped step has a gap in the loss."""

    def __init__(self, metrics_file: Path) -> None:
        self.iterations, self.losses = array("q"), array("d")
        self.loads: Loads | None = None
        """None where no load was counted."""
        self.tokens, self.seconds = 0, 0.0
        self.plotted = {metric.name: array("d") for metric in metrics() if metric.plot}
        """Of each metric that has a panel of its own (`Metric.plot`), its values; NaN where there is none."""
        self.sources: dict[str, tuple[array[int], array[float]]] = {}
        """Of each source the iterations with tokens of it, and its loss there."""
        self.source_loads = SourceLoads()
        for record in read_steps(metrics_file):
            self.iterations.append(record.iteration)
            self.losses.append(math.nan if record.skipped else record.loss)
            for name, values in self.plotted.items():
                value = getattr(record, name)
                values.append(math.nan if value is None else float(value))
            for name, source in record.sources.items():
                if source.loss is not None and not record.skipped:
                    iterations, losses = self.sources.setdefault(name, (array("q"), array("d")))
                    iterations.append(record.iteration)
                    losses.append(source.loss)
            if record.health is not None:
                layers = record.health.layers.items()
                self.source_loads.add(record.iteration, {number: layer.tokens_per_source for number, layer in layers})
            self.tokens += record.tokens
            self.seconds += record.seconds
            if record.tokens_per_expert:
                experts = {layer: len(counts) for layer, counts in sorted(record.tokens_per_expert.items())}
                if self.loads is None or self.loads.experts != experts:
                    self.loads = Loads(experts)
                self.loads.add(record.iteration, record.tokens_per_expert)
        self.evaluations = list(read_evaluations(metrics_file))


class PlotSink(Sink):
    """Draws `plot_file` from `metrics_file` when the run ends with a summary.

    Raises:
        ConfigError: matplotlib is missing; this is found at the start, not at the end of the run.
    """

    def __init__(self, plot_file: Path, metrics_file: Path) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"--plot-file {plot_file} needs matplotlib; install it with `pip install matplotlib`, or drop the flag"
            ) from error
        self.artifact = plot_file
        self._metrics_file = metrics_file
        self._unigram_entropy: float | None = None

    def start(self, facts: dict[str, Any]) -> None:
        self._unigram_entropy = facts.get("unigram_entropy")

    def close(self, summary: dict[str, Any] | None) -> None:
        if summary is None:
            return
        assert self.artifact is not None
        entropy = summary.get("unigram_entropy", self._unigram_entropy)
        draw(self._metrics_file, self.artifact, unigram_entropy=entropy)


def draw(metrics_file: Path, plot_file: Path, *, unigram_entropy: float | None = None) -> None:
    """Draw a run's metrics as a PNG, written atomically.

    The upper panel shows the training loss, its running mean, the evaluations and the unigram entropy (nats per token);
    the others, where sources have names, the loss of each; where the model has experts, max / mean of each MoE layer's
    load, and the load of each expert; below these, each metric that asks for a panel, and the loads by source.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = History(metrics_file)
    heights, by_source = [3.2], history.source_loads.loads()
    if history.sources:
        heights.append(2.4)
    if history.loads is not None:
        heights += [1.7, 2.8]
    heights += [1.7] * len(history.plotted)
    if by_source:
        heights.append(2.4)
    with matplotlib.rc_context(_INK):
        figure = Figure(figsize=(10, 1.3 + sum(heights)), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        panels: list[Axes] = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
        if by_source:
            _draw_source_loads(panels.pop(), history.source_loads, by_source)
        for panel in panels[1:]:
            panel.sharex(panels[0])
        for panel in panels[:-1]:
            panel.tick_params(labelbottom=False)
        _draw_loss(panels[0], history, unigram_entropy)
        if history.sources:
            _draw_source_losses(panels[1], history)
        if history.loads is not None:
            first = 2 if history.sources else 1
            _draw_balance(panels[first], history.loads)
            _draw_load(panels[first + 1], history.loads)
        own_panels = panels[len(panels) - len(history.plotted) :]
        for panel, metric in zip(own_panels, filter(lambda metric: metric.plot, metrics())):
            panel.plot(history.iterations, history.plotted[metric.name], ".-", color=_TRAIN, lw=1.0, ms=3)
            panel.set_title(metric.name)
            panel.set_ylabel(metric.unit)
        panels[-1].set_xlabel("iteration")
        if history.iterations:
            panels[-1].set_xlim(history.iterations[0] - 0.5, history.iterations[-1] + 0.5)
        plot_file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(plot_file, "wb") as file:
            figure.savefig(file, format="png")


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the mean of up to `reach` neighbours on either side, fewer on both sides near an end; NaNs are left out.

    A centred mean does not lag behind a falling curve, as an exponential one does.
    """
    valid = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(valid, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(valid)])
    here = np.arange(len(values))
    span = np.minimum(reach, np.minimum(here, len(values) - 1 - here))
    first, last = here - span, here + span + 1
    number = counts[last] - counts[first]
    return np.where(number > 0, (sums[last] - sums[first]) / np.maximum(number, 1), np.nan)


def _draw_loss(panel: Axes, history: History, unigram_entropy: float | None) -> None:
    losses = np.asarray(history.losses, dtype=np.float64)
    if len(losses) < 30:
        panel.plot(history.iterations, losses, color=_TRAIN, lw=1.4, alpha=1, label="train")
    else:
        panel.plot(history.iterations, losses, color=_TRAIN, lw=0.7, alpha=0.35)
        reach = max(3, len(losses) // 50)
        smooth = running_mean(losses, reach)
        smooth[-reach // 2 :] = np.nan  # so near the end it is a mean of few, and would show their noise as a trend
        panel.plot(history.iterations, smooth, color=_TRAIN, lw=1.8, label="train (running mean)")
    for split in dict.fromkeys((*_SPLITS, *(record.split for record in history.evaluations))):
        x, y = [], []
        for record in history.evaluations:
            if record.split == split:
                x.append(record.iteration)
                y.append(record.loss)
        if y:
            label = f"{split} (last {y[-1]:.3f})"
            panel.plot(x, y, "o-", color=_SPLITS.get(split), ms=5, lw=1.0, label=label, zorder=3, clip_on=False)
    if unigram_entropy is not None:
        label = f"unigram entropy {unigram_entropy:.3f}"
        panel.axhline(unigram_entropy, color=_ENTROPY, ls=(0, (5, 3)), lw=1.2, label=label)
    panel.set_title("Loss")
    panel.set_ylabel("nats per token")
    if history.seconds > 0:
        rate = history.tokens / history.seconds
        note = f"{history.tokens / 1e6:,.2f}M tokens in {history.seconds:,.0f} s: {rate:,.0f} tokens/s"
        panel.set_title(note, loc="right", fontsize=9, fontweight="normal", color="#555555")
    panel.legend(loc="upper right")
    panel.margins(x=0.01)


def _draw_source_losses(panel: Axes, history: History) -> None:
    for name, (iterations, losses) in history.sources.items():
        values = np.asarray(losses, dtype=np.float64)
        if len(values) >= 30:
            values = running_mean(values, max(3, len(values) // 50))
        panel.plot(iterations, values, lw=1.2, label=f"{name} (last {losses[-1]:.3f})")
    panel.set_title("Loss of each source")
    panel.set_ylabel("nats per token")
    panel.legend(loc="upper right", ncols=2)


def _draw_source_loads(panel: Axes, found: SourceLoads, loads: Mapping[str, np.ndarray]) -> None:
    """Draw the experts of each source side by side, a row for each layer."""
    experts = next(iter(loads.values())).shape[1]
    image = np.concatenate(list(loads.values()), axis=1)
    mesh = panel.imshow(image, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="nearest")
    for number in range(1, len(loads)):
        panel.axvline(number * experts - 0.5, color="#222222", lw=0.8)
    panel.set_xticks([(number + 0.5) * experts - 0.5 for number in range(len(loads))], list(loads))
    shown = range(0, len(found.layers), max(1, len(found.layers) // 16))
    panel.set_yticks(list(shown), [f"layer {found.layers[place]}" for place in shown])
    panel.grid(False)
    panel.set_title(f"Tokens of each source by expert / mean of the layer, {len(found.iterations)} steps")
    panel.figure.colorbar(mesh, ax=panel, pad=0.01, fraction=0.03, extend="max")


def _draw_balance(panel: Axes, loads: Loads) -> None:
    from matplotlib import colormaps

    iterations, fullest = loads.steps.means()[:, 0], loads.fullest.means()
    few = len(loads.experts) <= 8
    colours = colormaps["viridis"](np.linspace(0.1, 0.85, len(loads.experts)))
    for column, (layer, colour) in enumerate(zip(loads.experts, colours, strict=True)):
        label = f"layer {layer}" if few else None
        panel.plot(iterations, fullest[:, column], color=colour, lw=1.0, alpha=0.9, label=label)
    panel.axhline(1.0, color=_ENTROPY, ls=(0, (5, 3)), lw=1.0)
    panel.set_ylim(bottom=0.9)
    panel.set_title("Load of the fullest expert, max / mean tokens")
    panel.set_ylabel("max / mean")
    if few:
        panel.legend(loc="upper right", ncols=len(loads.experts))


def _draw_load(panel: Axes, loads: Loads) -> None:
    layers, image = list(loads.experts), loads.rows.means().T
    if loads.by_expert:
        title, colours, low, high = "Tokens of each expert / mean of its layer", "RdBu_r", 0.0, 2.0
        rows_of_layers = list(loads.experts.values())
    else:
        title, colours, low, high = "Load of each layer's fullest expert", "viridis", 1.0, 4.0
        rows_of_layers = [1] * len(layers)
    # A column begins and ends half a distance next to the first and the last step that it is the mean of.
    first, last = loads.iterations[0], loads.iterations[-1]
    half = (last - first) / max(loads.steps.rows - 1, 1) / 2 or 0.5
    right = first - half + 2 * half * loads.steps.width * image.shape[1]
    mesh = panel.imshow(
        image,
        aspect="auto",
        cmap=colours,
        vmin=low,
        vmax=high,
        interpolation="nearest",
        extent=(first - half, right, len(image), 0),
    )
    edges = np.cumsum([0, *rows_of_layers])
    if loads.by_expert:
        for edge in edges[1:-1]:
            panel.axhline(edge, color="#222222", lw=0.8)
    shown = range(0, len(layers), max(1, len(layers) // 16))
    panel.set_yticks([(edges[i] + edges[i + 1]) / 2 for i in shown], [f"layer {layers[i]}" for i in shown])
    panel.grid(False)
    panel.set_title(title)
    panel.figure.colorbar(mesh, ax=panel, pad=0.01, fraction=0.03, extend="max")
