"""The plot of a run: spans over which it averages the loads of experts, and what it shows of each source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_moe.report import plot
from megatron_moe.report.jsonl import JsonlSink
from megatron_moe.report.plot import SourceLoads, Spans
from megatron_moe.report.records import SourceStep
from tests.report.test_health import STEP


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 17, 1000])
def test_spans_are_the_means_of_equal_parts_and_bounded(rows):
    values = np.random.default_rng(0).random((rows, 3))
    spans = Spans(most=4)
    for row in values:
        spans.add(row)
    means = spans.means()
    assert 1 <= len(means) <= 4 and spans.rows == rows
    # The narrowest power of two with which all rows fit into four spans.
    width = 2 ** max(0, int(np.ceil(np.log2(rows / 4))))
    assert spans.width == width
    wanted = [values[first : first + width].mean(axis=0) for first in range(0, rows, width)]
    np.testing.assert_allclose(means, wanted)


def test_the_picture_has_the_loss_of_each_source_and_its_load_of_each_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self))
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    for iteration in (1, 2):
        late = {"rare": SourceStep(3.5, 7, 0.5)} if iteration == 2 else {}
        sink.step(STEP.replace(iteration=iteration, sources={**STEP.sources, **late}))
    sink.close(None)
    plot.draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    panels = {panel.get_title(loc="left"): panel for panel in figures[0].axes}
    lines = [list(map(list, line.get_data())) for line in panels["Loss of each source"].lines]
    assert lines == [[[1, 2], [2.5, 2.5]], [[2], [3.5]]]
    (image,) = panels["Tokens of each source by expert / mean of the layer, 2 steps"].images
    assert image.get_array().tolist() == [[2, 0, 2, 0, 0, 0, 4, 0]] * 2


def test_of_many_sources_those_with_the_most_tokens_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "MOST_SOURCES", 2)
    loads = SourceLoads()
    loads.add(1, {1: {"a": [9, 9]}})
    loads.add(2, {1: {"a": [1, 2], "b": [0, 0], "c": [3, 5]}, 2: {"a": [1, 2], "b": [0, 0], "c": [3, 5]}})  # anew
    loads.add(3, {})
    found = {name: table.tolist() for name, table in loads.loads().items()}
    assert found == {"a": [[2 / 3, 4 / 3]] * 2, "c": [[0.75, 1.25]] * 2}
