"""The page of a run in a real browser, and its data without one: what it says is what the metrics say."""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import page_cost
from docs import pictures
from megatron_moe.config import schema
from megatron_moe.data.tokenizers import NullTokenizer
from megatron_moe.report.jsonl import read_events, read_steps
from megatron_moe.report.records import StepRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe_tools.models.experts import Sequences, experts_by_layer, write_picture
from megatron_moe_tools.models.trace import Routing
from megatron_moe_tools.report import cli as report
from megatron_moe_tools.report import page as report_page
from megatron_moe_tools.report import run_state
from megatron_moe_tools.report.run_state import RunState, Series
from tests.report import chromium, steps

EVIL = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>'
LAYERS, EXPERTS = (3, 4, 5), 8


def line(iteration: int, **changes: Any) -> dict[str, Any]:
    loss = 3 + 5 * math.exp(-iteration / 30)
    values = {"iteration": iteration, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0 + 0.01 * iteration}
    counts = {"tokens_per_expert": {str(layer): [10 + layer] * EXPERTS for layer in LAYERS}, "expert_load": 1.0}
    return {**values, "skipped": False, "tokens": 512, "seconds": 0.5, "tokens_per_second": 1024.0, **counts, **changes}


def write(folder: Path, lines: list[dict[str, Any]], **info: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if info:
        (folder / "metrics.run.json").write_text(json.dumps({"run_id": "0123456789abcdef", **info}))
    return folder


def data_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def made(folder: Path, *others: Path | str) -> dict[str, Any]:
    assert report.main([str(folder), *map(str, others), "--output", str(folder / "page.html")]) == 0
    return data_of(folder / "page.html")


FINISHED = {"attempts": [{"attempt": 1, "start_iteration": 0, "ending": "finished"}], "flags": {"lr": EVIL}}


# ---- its data


def test_a_peak_of_one_step_stays_however_long_the_run_is():
    series = Series(10)
    for iteration in range(1, 1001):
        series.add(iteration, {"loss": 9.0 if iteration == 437 else 1.0})
    rows = series.rows()["loss"]
    assert len(rows["mean"]) <= 20 and max(value or 0 for value in rows["high"]) == 9.0
    means = [value or 0 for value in rows["mean"]]
    assert sum(mean * series.width for mean in means[:-1]) + means[-1] * (1000 % series.width) == pytest.approx(1008)


def test_torn_odd_and_repeated_lines_are_read_for_what_they_are(tmp_path):
    abandoned = [line(1), line(2), line(3, loss=None), line(4, loss=None, skipped=True)]
    run = write(tmp_path / "run", [*abandoned, line(2, loss=6.0), line(3, loss=7.0), line(4), line(5)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('[]\n{"iteration": 6, "lo')
    state = RunState(run / "metrics.jsonl")
    state.update()
    assert state.series.rows()["iteration"]["mean"] == [1, 2, 3, 4, 5]
    assert state.series.rows()["loss"]["mean"][1:3] == [6.0, 7.0]
    assert (state.repeated, state.bad_lines, state.watch.not_finite, state.watch.skipped) == (1, 1, 2, 1)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('ss": 1.0}\n')
    state.update()
    assert state.series.rows()["iteration"]["mean"][-1] == 6


@pytest.mark.parametrize(
    ("year", "ending", "state"),
    [
        (2999, {"ending": "finished"}, "finished"),
        (2999, {"ending": "stopped by SIGTERM"}, "stopped"),
        (2999, {"ending": "failed: out"}, "failed"),
        (2999, {}, "running"),
        (2001, {}, "killed"),  # it has been silent for long
    ],
)
def test_the_status_says_how_a_run_ended(tmp_path, year, ending, state):
    lines = [line(1, time=f"{year}-01-01T00:00:00.000+00:00")]
    run = write(tmp_path / "run", lines, attempts=[{"attempt": 1, **ending}])
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    assert made(run)["runs"][0]["status"]["state"] == state


def test_runs_of_every_shape_have_a_page(tmp_path):
    dense = write(tmp_path / "a" / "run", [line(1, tokens_per_expert={}, expert_load=None)])
    one_layer = write(tmp_path / "b" / "run", [line(1, tokens_per_expert={"1": [3, 0, 9]})])
    empty = write(tmp_path / "c" / "run", [])
    runs = made(dense, one_layer, empty)["runs"]
    assert [run["name"] for run in runs] == ["run", "run (2)", "run (3)"]
    assert [run["experts"] is None for run in runs] == [True, False, True]
    assert any("got no token" in finding["text"] for finding in runs[1]["findings"])
    assert runs[2]["status"]["state"] == "empty"


@pytest.mark.parametrize(
    ("skipped", "steps", "fp16", "level"),
    [
        (range(1, 13), 40, True, "attention"),
        (range(1, 13), 2000, True, "good"),
        (range(1, 13), 12, True, "attention"),
        (range(1, 51), 50, True, "bad"),
        (range(2, 31), 30, False, "bad"),
        (range(100, 101), 2000, False, "attention"),
        (range(100, 300), 2000, False, "bad"),
    ],
)
def test_steps_that_fp16_skips_at_first_are_told_from_those_of_a_fault(tmp_path, skipped, steps, fp16, level):
    lines = [line(n, tokens_per_expert={}, skipped=n in skipped, grad_norm=None) for n in range(1, steps + 1)]
    (run,) = made(write(tmp_path / "run", lines, **FINISHED, all_flags={"fp16": fp16}))["runs"]
    (finding,) = [one for one in run["findings"] if "skipped" in one["text"]]
    assert (finding["level"], f"{len(skipped):,} step" in finding["text"]) == (level, True)


def test_the_last_fault_is_among_the_findings(tmp_path):
    run = write(tmp_path / "run", [line(1)], attempts=[{"attempt": 1, "ending": "failed: NaN"}])
    events = [{"iteration": 1, "kind": kind, "text": kind + text} for kind in ("fault", "message") for text in "ab"]
    (run / "metrics.events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    findings = made(run)["runs"][0]["findings"]
    assert findings[0]["level"] == "bad" and "failed" in findings[0]["text"]
    assert any("2 faults" in finding["text"] and "faultb" in finding["text"] for finding in findings)


def test_an_expert_that_died_lately_is_dead_although_it_got_tokens_before(tmp_path):
    lines = [line(n, tokens_per_expert={"3": [5, 5], "4": [0 if n > 10 else 9, 6]}) for n in range(1, 31)]
    (run,) = made(write(tmp_path / "run", lines), "--expert-layer", "4")["runs"]
    assert run["experts"]["dead"] == [[1, 0]]
    over_time = run["expertsOfLayer"]  # of layer 4, each of its experts
    assert over_time["layers"] == [0, 1] and over_time["from"] == over_time["to"] == list(range(1, 31))
    assert over_time["figures"]["load"] == [[1.2, 0.8]] * 10 + [[0, 2]] * 20
    (finding,) = [one for one in run["findings"] if one["chart"] in ("experts", "loads")]  # they are not even
    assert finding["level"] == "bad" and "1 of them in layer 4" in finding["text"]


# ---- written while the run trains


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of pages, which passes where a test says so."""
    shown = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(report_page, "time", SimpleNamespace(monotonic=lambda: shown.now, time=run_state.time.time))
    return shown


def reporter(folder: Path, page: Path) -> Reporter:
    files = {"metrics_file": str(folder / "metrics.jsonl"), "report_file": str(page)}
    return steps.reporter(schema.replace(schema.Run(), train_iters=4, **files))


def record(iteration: int) -> StepRecord:
    return steps.STEP.replace(iteration=iteration, tokens_per_expert={3: [1, 2]})


def test_a_run_writes_its_page_at_its_start_every_30_seconds_and_when_its_ending_is_known(tmp_path, clock):
    page = tmp_path / "new" / "page.html"
    with reporter(tmp_path, page) as running:
        running.start({"device": "cpu"})
        seen = [data_of(page)["runs"][0]]
        for iteration, seconds in ((1, 29.0), (2, 1.5), (3, 1.0)):
            clock.now += seconds
            running.step(record(iteration))
            seen.append(data_of(page)["runs"][0])
        running.close()
    last = data_of(page)["runs"][0]
    assert [run["steps"] for run in [*seen, last]] == [0, 0, 2, 2, 3]
    assert {run["status"]["state"] for run in seen} == {"running"} and last["status"]["state"] == "finished"
    assert data_of(page)["every"] == 30 and last["events"][-1]["kind"] == "end"


def test_a_page_that_took_long_is_written_more_rarely(tmp_path, clock, monkeypatch):
    pages = []

    def slow(*given: Any, every: float) -> None:
        clock.now += 2.0
        pages.append(every)

    monkeypatch.setattr(report_page, "write_page", slow)
    running = reporter(tmp_path, tmp_path / "page.html")
    running.start({})
    for iteration in range(1, 11):
        clock.now += 20.0
        running.step(record(iteration))
    assert pages == [30.0, 100.0, 100.0]


def test_what_a_page_has_read_once_it_does_not_read_again(tmp_path, clock):
    page, metrics = tmp_path / "page.html", tmp_path / "metrics.jsonl"
    running = reporter(tmp_path, page)
    for iteration in (1, 2):
        running.step(record(iteration))
        clock.now += 31.0
    size = metrics.stat().st_size
    with open(metrics, "r+b") as file:
        file.write(b"x" * (size - 1))
    running.step(record(3))
    run = data_of(page)["runs"][0]
    assert run["x"]["iteration"]["mean"] == [1, 2, 3]
    assert not any("could not be read" in finding["text"] for finding in run["findings"])


def test_after_a_restart_the_steps_before_it_are_read_a_second_at_a_time(tmp_path, clock, monkeypatch):
    def slowly() -> float:
        clock.now += 0.4  # of each look at the clock, of which a step takes one
        return clock.now

    page, metrics = tmp_path / "page.html", tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line(iteration)) + "\n" for iteration in range(1, 9)))
    running = report_page.PageSink(page, metrics, pytest.fail)
    monkeypatch.setattr(run_state, "time", SimpleNamespace(monotonic=slowly))
    for number in (None, None, 8):
        running.step(record(9))
        assert (data_of(page)["runs"][0]["steps"] if page.exists() else None) == number
        clock.now += 20.0
        running.step(record(9))  # which is too early
        clock.now += 31.0


def test_a_page_that_cannot_be_written_is_one_warning_and_the_run_goes_on(tmp_path, clock):
    (tmp_path / "taken" / "folder").mkdir(parents=True)
    with reporter(tmp_path, tmp_path / "taken") as running:
        running.start({})
        for iteration in (1, 2, 3):
            clock.now += 60.0
            running.step(record(iteration))
        running.close({})
    events = list(read_events(tmp_path / "metrics.jsonl"))
    assert [event.kind for event in events if event.kind in ("warning", "end")] == ["warning", "end"]
    assert "--report-file" in next(event.text for event in events if event.kind == "warning")
    assert len(list(read_steps(tmp_path / "metrics.jsonl"))) == 3


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if chromium.found() is None:
        pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is installed; the page itself was not opened")
    page = chromium.Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


RANGE = "(() => { const x = document.querySelector('#chart-loss .plot').chart.scales.x; return [x.min, x.max]; })()"


DRAWN = (
    "(() => { const plots = [...document.querySelectorAll('.plot')], drawn = plots.filter((plot) => plot.chart);"
    " return [drawn.length, plots.length, Math.max(...drawn.map((plot) => plot.chart.width))]; })()"
)


def wait_for(browser: chromium.Page, chart: str) -> None:
    """Wait until a chart is drawn: it is once it comes near what is in sight."""
    there = f"(document.querySelector('#chart-{chart} .plot') || {{}}).chart"
    browser.evaluate(
        f"new Promise((then) => {{ (function look() {{ {there} ? then() : setTimeout(look, 20); }})(); }})"
    )


def put_cursor(browser: chromium.Page, chart: str, x: float, y: float) -> tuple[float, float]:
    """Put the cursor on values of a chart's axes and return its place in the window."""
    browser.evaluate(f"document.getElementById('chart-{chart}').scrollIntoView({{ block: 'center' }})")
    wait_for(browser, chart)
    left, top = browser.evaluate(
        f"(() => {{ const u = document.querySelector('#chart-{chart} .plot').chart, b = u.over.getBoundingClientRect();"
        f" return [b.left + u.valToPos({x}, 'x'), b.top + u.valToPos({y}, 'y')]; }})()"
    )
    browser.mouse("mouseMoved", left - 1, top)
    browser.mouse("mouseMoved", left, top)
    return left, top


def test_the_page_is_what_the_metrics_say(browser, tmp_path):
    health = {"layers": {"3": {"load": None, "tokens_per_source": {"web": [1, 2, 3]}}}}
    sources = {"sources": {"web": {"loss": 2.5, "tokens": 9, "epochs": 0.5}}, "health": health}
    lines = [line(iteration, **sources) for iteration in range(1, 61)]
    one = write(tmp_path / "one" / "run", lines, **FINISHED)
    two = write(tmp_path / "two" / "run", [line(iteration, loss=9.0) for iteration in range(1, 31)], **FINISHED)
    made(one)
    browser.size(1200, 900)
    browser.open(one / "page.html")
    assert browser.evaluate("document.title") == "run - megatron_moe"
    assert EVIL in browser.evaluate("document.getElementById('flags').textContent")
    wait_for(browser, "grad_norm")
    put_cursor(browser, "source-0-0", 2, 0)
    text = browser.evaluate("document.querySelector('#chart-source-0-0 .readout').textContent")
    assert text == "layer 3, expert 2: 1.5 of the mean"
    put_cursor(browser, "sources", 20, 2.5)
    # the cursor on one step shows that step's value, in every chart
    x, y = put_cursor(browser, "loss", 20, 5)
    for chart, value in (("loss", lines[19]["loss"]), ("grad_norm", lines[19]["grad_norm"])):
        text = browser.evaluate(f"document.querySelector('#chart-{chart} .readout b').textContent")
        assert float(text) == pytest.approx(value, rel=1e-5)
    # dragging narrows the range of all charts, a double click resets it
    assert browser.evaluate(RANGE) == [1, 60]
    browser.mouse("mousePressed", x, y, clicks=1)
    browser.mouse("mouseMoved", x + 300, y, clicks=1)
    browser.mouse("mouseReleased", x + 300, y, clicks=1)
    low, high = browser.evaluate(RANGE)
    assert low == pytest.approx(20, abs=0.5) and 25 < high < 55
    assert browser.evaluate(RANGE.replace("chart-loss", "chart-grad_norm")) == [low, high]
    for clicks in (1, 2):
        browser.mouse("mousePressed", x, y, clicks=clicks)
        browser.mouse("mouseReleased", x, y, clicks=clicks)
    assert browser.evaluate(RANGE) == [1, 60]
    # two runs
    made(one, two, "--expert-layer", "4")
    browser.open(one / "page.html")
    wait_for(browser, "loss")
    legend = browser.evaluate("document.querySelector('#chart-loss .readout').textContent")
    assert "run train" in legend and "run (2) train" in legend
    # the paper has every chart, in its width and in light colours
    browser.size(1200, 900, dark=True)
    grid = "Charts.css('--grid')"
    dark = browser.evaluate(grid)
    wait_for(browser, "loss")
    assert browser.evaluate(DRAWN)[0] < browser.evaluate(DRAWN)[1]
    browser.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = [...{DRAWN}, {grid}]; }})")
    browser.pdf(tmp_path / "page.pdf")
    drawn, charts, widest, printed = browser.evaluate("window.printed")
    assert drawn == charts > 5 and widest < 700
    assert "Load of each expert of layer 4" in browser.evaluate("document.getElementById('chart-layer').textContent")
    browser.size(1200, 900)
    assert browser.evaluate(grid) == printed != dark
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert browser.errors == [] and {address.partition(":")[0] for address in browser.requests} == {"file"}
    assert {address.partition("#")[0] for address in browser.requests} == {(one / "page.html").as_uri()}


def test_the_page_of_experts_shows_a_chosen_layer_and_expert(browser, tmp_path):
    chosen = torch.tensor([[0, 2], [1, 2], [0, 3], [2, 0]])
    texts = Sequences(["a", "b"], torch.tensor([[5, 6], [5, 7]]), torch.tensor([2, 2]), torch.tensor([0, 1]))
    run = schema.replace(schema.Run(), num_layers=2, num_experts=4)
    routing = {1: Routing(chosen, torch.empty(0)), 2: Routing(chosen.flip(1), torch.empty(0))}
    layers = experts_by_layer(run, {1: torch.eye(4), 2: torch.ones(4, 4)}, routing, texts)
    write_picture(tmp_path / "experts.html", EVIL, layers, texts, NullTokenizer(10))
    browser.errors.clear()
    browser.open(tmp_path / "experts.html")
    assert browser.evaluate("document.title") == EVIL
    told = browser.evaluate("document.getElementById('findings').innerText")
    assert "duplicate experts, cosine > 0.999: 0, 1, 2, 3" in told and "layer 1: " not in told
    assert browser.evaluate("document.getElementById('layer').innerText").split("\n") == ["layer 1", "MTP depth 1"]
    coloured = "[...document.querySelectorAll('#tokens span')].map((one) => Boolean(one.style.background))"
    rows = "[...document.querySelectorAll('#typical tr')].filter((row) => !row.hidden).map((row) => row.innerText)"
    assert browser.evaluate(coloured) == [True] * 4
    assert browser.evaluate("document.getElementById('tokens').textContent") == "5 65 7"
    browser.evaluate("document.querySelector('#typical tr').onclick()")
    assert browser.evaluate(coloured) == [True, False, True, True]
    assert browser.evaluate(rows) == ["0\t1.50\t52/2  71/1"]
    browser.evaluate("const box = document.getElementById('layer'); box.value = 1; box.onchange()")
    browser.evaluate("document.getElementById('all').onclick()")
    assert browser.evaluate(coloured) == [True, False, True, False]  # the last token of a text has no depth
    assert browser.errors == []


@pytest.mark.test_all(instead="tests/report/test_page.py::test_the_page_is_what_the_metrics_say")
def test_a_page_reloads_itself_while_the_run_goes_on_and_keeps_what_was_chosen(browser, tmp_path):
    run = write(tmp_path / "run", [line(1), line(2)], attempts=[{"attempt": 1}])
    page, state = run / "page.html", RunState(run / "metrics.jsonl")
    state.update()
    report_page.write_page(page, [state], ["run"], every=0.3)
    browser.open(page)
    browser.evaluate("Charts.zoom([1.2, 1.9])")
    (run / "metrics.run.json").write_text(json.dumps({"run_id": "0", **FINISHED}))
    state.update()
    report_page.write_page(page, [state], ["run"], every=0.3)
    until = time.monotonic() + chromium.SECONDS
    shown = ""
    while shown != "finished":
        assert time.monotonic() < until
        with contextlib.suppress(chromium.Navigated):  # the page went away while it was asked
            shown = browser.evaluate("(document.querySelector('.pill') || {}).textContent")
        time.sleep(0.1)
    assert browser.evaluate(RANGE) == [1.2, 1.9]
    browser.evaluate("window.same = true")
    time.sleep(1.0)
    assert browser.evaluate("window.same"), "the page of a run that has ended stays"


@pytest.mark.test_all(instead="tests/report/test_page.py::test_the_page_is_what_the_metrics_say")
def test_a_page_of_58_layers_and_256_experts_is_small_and_draws_what_is_in_sight(browser, tmp_path):
    run = page_cost.write_run(tmp_path, 2000, 58, 256, every=7).parent  # as many bins as there can be
    made(run)
    assert (run / "page.html").stat().st_size < 2_500_000, "half of the bound: other metrics need room, too"
    browser.size(1200, 900)
    browser.open(run / "page.html")
    wait_for(browser, "loss")
    drawn, charts, _ = browser.evaluate(DRAWN)
    assert drawn < charts / 2
    put_cursor(browser, "experts", 255, 57)
    said = browser.evaluate("document.querySelector('#chart-experts .readout').textContent")
    assert said == "layer 60, expert 255: 0 of the mean, none in the last 20 counted steps"
    assert browser.errors == []


@pytest.mark.test_all(instead="tests/report/test_page.py::test_the_page_is_what_the_metrics_say")
def test_the_pictures_of_the_docs_are_made_from_a_run_and_small(browser, tmp_path):
    pictures.draw(tmp_path, upto=40)
    for name in ("report.png", "panel.png"):
        for picture in (tmp_path / name, pictures.DOCS / name):
            assert picture.read_bytes().startswith(b"\x89PNG") and 10_000 < picture.stat().st_size < 150_000
