"""A metric is registered once: what is refused, what is shown, and what the page says of those of every run."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe.report import Metric, MetricError, register_metric, unregister_metric
from megatron_moe.report.console import ConsoleSink
from megatron_moe.report.jsonl import JsonlSink, read_steps, step_from_json, to_json
from megatron_moe.report.metric import metrics
from megatron_moe.report.plot import draw
from megatron_moe.report.records import StepRecord
from tests.report.steps import REQUIRED, STEP

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@contextmanager
def registered(name: str = "top_share", **options: Any) -> Iterator[Metric]:
    metric = Metric(name, **{"compute": lambda facts: 0.5, **options})
    register_metric(metric)
    try:
        yield metric
    finally:
        unregister_metric(name)


def table_row(metric: Metric) -> str:
    """The row of docs/reference/metrics.md about a metric."""
    shown = "" if metric.console is None else "yes"
    tag = f"`{metric.tensorboard}`" if isinstance(metric.tensorboard, str) else "several" * bool(metric.tensorboard)
    return f"| `{metric.name}` | {metric.unit} | {shown} | {tag} |"


def test_the_documentation_has_the_metrics_of_every_run_in_the_order_of_the_keys() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == [table_row(metric) for metric in metrics()]
    assert list(STEP.values()) == [metric.name for metric in metrics()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "loss"}, "loss"),
        ({"name": "loss_hex"}, "loss_hex"),
        ({"name": "replace"}, "replace"),
        ({"name": "top share"}, "identifier"),
        ({"compute": None}, "compute"),
        ({"tensorboard": "loss/train"}, "loss/train is that of loss"),
        ({"tensorboard": "loss/valid"}, "loss/valid"),
        ({"console": "share {:d}"}, "share {:d}"),
        ({"console": "share {1}"}, "share {1}"),
    ],
)
def test_a_metric_that_collides_or_cannot_be_shown_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    before = metrics()
    name = options.pop("name", "top_share")
    with pytest.raises(ValueError, match=f"metric '?{name}") as error, registered(name, **options):
        pass
    assert said in str(error.value) and metrics() == before


def test_two_metrics_of_a_program_cannot_have_one_name_or_one_tag() -> None:
    with registered(tensorboard="experts/top"):
        with pytest.raises(ValueError, match="top_share"), registered():
            pass
        with pytest.raises(ValueError, match="that of top_share"), registered("b", tensorboard="experts/top"):
            pass
    for name in ("top_share", "loss"):
        with pytest.raises(ValueError, match=name):
            unregister_metric(name)


def test_what_raises_or_cannot_be_shown_as_a_number_is_an_error_that_names_the_metric() -> None:
    facts: Any = SimpleNamespace(record=STEP.replace(iteration=7))
    for returned, kind in (("much", "str"), ([1.0], "list"), (object(), "object")):
        with pytest.raises(MetricError, match=f"metric top_share returned a {kind} at iteration 7"):
            Metric("top_share", compute=lambda _, value=returned: value, console="{:.1f}").value(facts)
    with pytest.raises(MetricError, match="object"):
        Metric("top_share", compute=lambda _: object()).value(facts)
    assert Metric("top_share", compute=lambda _: [1.0]).value(facts) == [1.0], "metrics.jsonl takes any plain value"
    with pytest.raises(MetricError, match="metric top_share failed at iteration 7: ZeroDivisionError"):
        Metric("top_share", compute=lambda _: 1 / 0).value(facts)
    with pytest.raises(MetricError, match="metric top_share: its `console` failed: KeyError"):
        Metric("top_share", console=lambda _: {}["no"]).console_text([STEP])


def test_a_line_of_the_log_shows_the_last_value_that_there_is_where_its_rank_puts_it() -> None:
    stream = io.StringIO()
    with registered(console="share {:.2f}", console_rank=12):
        sink = ConsoleSink(stream, train_iters=3, log_interval=3)
        for iteration, value in ((1, None), (2, 0.25), (3, None)):
            sink.step(STEP.replace(iteration=iteration, extra={"top_share": value}))
    first, last = stream.getvalue().splitlines()
    assert "share" not in first
    assert "| loss 3.0000 | share 0.25 | lr" in last


def test_a_line_of_metrics_keeps_its_keys_and_the_new_one_comes_behind_them(tmp_path: Path) -> None:
    known = list(to_json(STEP))
    with registered():
        line = to_json(STEP.replace(extra={"top_share": float("nan")}))
        assert list(line) == [*known[:-2], "top_share", *known[-2:]] and line["top_share"] is None
        assert step_from_json(to_json(STEP)).top_share is None, "a step without it, or an older line"
        sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
        sink.step(STEP.replace(extra={"top_share": 0.25}))
        sink.close(None)
    (record,) = read_steps(tmp_path / "metrics.jsonl")  # by a program that does not know the metric
    assert record.top_share == 0.25


def test_two_functions_cannot_write_one_tensorboard_tag(tmp_path: Path) -> None:
    from megatron_moe.report.sink import TensorBoardSink

    with registered(tensorboard=lambda record: {"loss/aux_loss": 1.0}):
        sink = TensorBoardSink(tmp_path, 0)
        with pytest.raises(MetricError, match="top_share: TensorBoard tag loss/aux_loss is that of aux_losses"):
            sink.step(STEP.replace(aux_losses={"aux_loss": 1.0}))
        sink.close(None)


def test_the_picture_has_a_panel_of_a_metric_that_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self))
    with registered(plot=True, unit="share"):
        sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
        for iteration, value in ((1, 0.5), (2, None), (3, 0.75)):
            sink.step(STEP.replace(iteration=iteration, extra={"top_share": value}))
        sink.close(None)
        draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    _, panel = figures[0].axes
    assert (panel.get_title(loc="left"), panel.get_ylabel()) == ("top_share", "share")
    x, y = panel.lines[0].get_data()
    assert list(x) == [1, 2, 3] and list(y[[0, 2]]) == [0.5, 0.75] and y[1] != y[1]


def test_a_record_does_not_change_and_says_what_it_lacks() -> None:
    with pytest.raises(AttributeError, match="loss"):
        STEP.loss = 2.0
    with pytest.raises(AttributeError, match="no top_share"):
        _ = STEP.top_share
    with pytest.raises(TypeError, match="'loss'"):
        StepRecord(**{name: value for name, value in REQUIRED.items() if name != "loss"})
    assert STEP.replace(loss=2.0).loss == 2.0 and STEP.loss == 3.0 and STEP.replace(loss=2.0) != STEP
