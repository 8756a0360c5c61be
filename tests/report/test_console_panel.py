"""The panel below the lines of a terminal fits it, and shows what is known of the run."""

import io

import pytest
from rich.console import Console

from megatron_moe.report.console import LEGEND, SMALLEST, ConsoleSink, Curve, LiveDashboard
from megatron_moe.report.metric import metrics
from megatron_moe.report.records import EvalRecord, SourceStep
from tests.report.test_console import STEP
from tests.report.test_health import HEALTH


def drawn(view, columns=100, rows=40):
    stream = io.StringIO()
    Console(file=stream, width=columns, height=rows, force_terminal=True, color_system=None).print(view)
    return stream.getvalue().rstrip("\n")


def watched(steps=3, **changes):
    view = LiveDashboard(True, 400, 0)
    view.start({"device": "cpu", "layout": "TP 1, EP 2", "dtype": "bfloat16", "parameters": 7})
    for iteration in range(1, steps + 1):
        view.step(STEP.replace(iteration=iteration, **changes))
    return view


def test_a_panel_shows_what_a_person_who_watches_wants_to_know():
    view = watched(memory_bytes=3 * 10**9, tokens_per_expert={2: [6, 2], 4: [4, 4]})
    view.step(STEP.replace(iteration=4, skipped=True, tokens_per_expert={}, expert_load=None))
    view.evaluation(EvalRecord(4, "valid", 2.75, 4096, 1.0))
    view.event("saved iter_0000004\nand more")
    shown = drawn(view)
    for words in ("cpu, TP 1, EP 2, bfloat16", "4/400", "left 1m12s", "valid 2.7500", "SKIPPED 1", "0.500", "2,000"):
        assert words in shown, words
    assert "0.25 TFLOP/s, MFU 12.5%" in shown and "saved iter_0000004" in shown and "and more" not in shown
    # Of the last step that counted.
    rows = {row.split()[2]: row for row in shown.splitlines() if "\u2502 layer " in row}
    assert rows["2"].split()[-2] == "1.50" and rows["4"].split()[-2] == "1.00"
    assert [rows[layer].count("\u2588") for layer in "24"] == [22, 15]  # of 60, which a load of 4 fills
    # A model without experts has no rows of them.
    shown = drawn(watched(tokens_per_expert={}, expert_load=None, grad_norm=None))
    assert "load" not in shown and "grad" not in shown and "loss" in shown


@pytest.mark.parametrize("columns", [SMALLEST[0], 100, 200])
def test_a_panel_of_any_model_fits_the_terminal(columns):
    """58 layers of 256 experts, with long messages: the rows are those of the most uneven layers."""
    counts = {layer: [1] * 255 + [1 + layer] for layer in range(3, 61)}
    view = watched(5, tokens_per_expert=counts, memory_bytes=1, grad_norm=1e9)
    for iteration in range(6, 400):  # curves as long as there is room for
        view.step(STEP.replace(iteration=iteration, skipped=iteration == 100, tokens_per_expert={}, grad_norm=1e9))
    view.evaluation(EvalRecord(4, "valid", 2.75, 4096, 1.0))
    for _ in range(9):
        view.event("checkpoint " * 40)
    lines = drawn(view, columns, SMALLEST[1]).splitlines()
    assert len(lines) < SMALLEST[1] and max(map(len, lines)) <= columns
    assert [line.split()[2] for line in lines if "\u2502 layer " in line] == [str(layer) for layer in range(55, 61)]
    for words in ("worst 6 of 58 layers", "SKIPPED 1", "valid 2.7500"):
        assert any(words in line for line in lines), words


@pytest.mark.parametrize(("columns", "rows"), [(SMALLEST[0] - 1, 40), (100, SMALLEST[1] - 1)])
def test_a_small_terminal_gets_one_line(columns, rows):
    assert len(drawn(watched(), columns, rows).splitlines()) == 1


def test_a_curve_of_any_number_of_steps_stays_small_and_keeps_its_shape():
    curve = Curve(room=16)
    for step in range(10_000):
        curve.add(10_000 - step)
        curve.add(float("nan"))
    shape = curve.drawn(20)
    assert len(curve._means) < 32 and 10 <= len(shape) <= 20
    assert list(shape) == sorted(shape, reverse=True) and (shape[0], shape[-1]) == ("\u2588", "\u2581")
    # One that is empty or flat can be drawn.
    curve = Curve()
    assert curve.drawn(10) == ""
    curve.add(2.0)
    curve.add(2.0)
    assert (curve.drawn(10), curve.drawn(10, from_zero=True)) == ("\u2581\u2581", "\u2588\u2588")


def test_every_word_of_a_line_is_in_the_legend_in_its_order():
    record = STEP.replace(
        skipped=True, mtp_losses=[1.0], params_norm=1.0, num_zeros=3, dropped_per_expert={2: [1, 1]}, health=HEALTH
    ).replace(max_attention_logit=120.0, clipped_heads=2, sources={"web": SourceStep(2.0, 9, 0.5)})
    stream = io.StringIO()
    sink = ConsoleSink(stream, train_iters=10, log_interval=1)
    sink.step(record.replace(health=HEALTH.__class__(**{**vars(HEALTH), "gradient_swallowed": 25})))
    words = [word for word, _ in LEGEND]
    found = []
    for part in stream.getvalue()[len("2026-01-01 00:00:00 ") :].strip().split(" | "):
        found.append(max((word for word in words if part.startswith(word) or part.endswith(f" {word}")), key=len))
    assert set(found) == set(words)
    assert {metric.name for metric in metrics() if metric.console} <= set(record.values())
    order = [words.index(word) for word in found if word != "LOST"]
    assert order == sorted(order)
