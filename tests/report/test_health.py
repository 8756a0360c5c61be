"""A health measurement as plain values: there and back through JSON, into TensorBoard, and in a log line."""

import dataclasses
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe.report.console import ConsoleSink
from megatron_moe.report.health import Health, LayerHealth, load_health, scalars, summary_line
from megatron_moe.report.jsonl import JsonlSink, read_steps, step_from_json, to_json
from megatron_moe.report.records import SourceStep
from megatron_moe_tools.report import run_state
from megatron_moe_tools.report.run_state import RunState
from tests.report import steps

LAYER = LayerHealth(
    load=load_health([3, 0, 5, 0]),
    sampled_tokens=64,
    margin_mean=0.02,
    margin_p5=0.001,
    flip_rate=0.0,
    max_logit=1.5,
    bias_min=-0.25,
    bias_max=0.5,
    bias_mean=0.0,
    tokens_per_source={"web": [3, 0, 3, 0], "rare": [0, 0, 2, 0]},
)
EVEN = replace(LAYER, load=load_health([2, 2, 2, 2]), flip_rate=0.03125, max_logit=0.5)
HEALTH = Health(
    gradient_additions=1000,
    gradient_swallowed=0,
    other_additions=10,
    other_swallowed=1,
    dense_grad_norm=0.75,
    expert_grad_norm=0.25,
    skipped_iterations=3,
    skip_rate=0.375,
    loss_scale_raised=1,
    loss_scale_lowered=2,
    layers={2: LAYER, 3: EVEN},
    first_moment_rounding=0.0025,
    second_moment_rounding=0.002,
    update_rounding=0.00325,
)
STEP = steps.STEP.replace(
    iteration=8,
    consumed_samples=64,
    tokens_per_expert={2: [3, 0, 5, 0], 3: [2, 2, 2, 2]},
    expert_load=2.5,
    empty_experts=2,
    expert_bias_max=0.5,
    health=HEALTH,
    sources={"web": SourceStep(2.5, 900, 0.5), "rare": SourceStep(None, 0, 0.25)},
)


def test_load_is_described_as_computed_by_hand():
    load = load_health([3, 0, 5, 0])
    assert load is not None
    entropy = -(3 / 8 * math.log(3 / 8) + 5 / 8 * math.log(5 / 8))
    assert load.effective_experts == pytest.approx(math.exp(entropy))
    assert (load.dead_experts, load.hot_experts, load.max_violation) == (2, 1, 1.5)  # 5 > 2 x 2, 3 is not
    even = load_health([2, 2, 2, 2])
    assert even is not None and even.effective_experts == pytest.approx(4.0) and even.max_violation == 0.0
    one = load_health([0, 7])
    assert one is not None and one.effective_experts == 1.0 and one.max_violation == 1.0
    assert load_health([0, 0]) is None and load_health([]) is None


def test_a_step_with_health_comes_back_equal_from_metrics_jsonl_and_the_report_has_every_figure_that_it_charts(
    tmp_path,
):
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    unknown = replace(LAYER, load=None, margin_mean=None, margin_p5=None, max_logit=None)
    odd = replace(HEALTH, dense_grad_norm=None, layers={5: unknown})
    written = [STEP.replace(health=health, iteration=8 + i) for i, health in enumerate((HEALTH, odd, None))]
    for record in written:
        sink.step(record)
    sink.close(None)
    assert list(read_steps(tmp_path / "metrics.jsonl")) == written
    state = RunState(tmp_path / "metrics.jsonl")
    assert state.update()
    charts = (Path(run_state.__file__).parent / "assets" / "report.js").read_text(encoding="utf-8")
    shown = set(re.findall(r'"(health\.\w+)"', charts))
    assert {"health.update_rounding", "health.flip_rate"} <= shown <= set(state.series.rows())
    assert state.series.rows()["sources.web"]["mean"] == [2.5] * 3 and "sources.rare" not in state.series.rows()
    # A line of an earlier version.
    line = json.loads(json.dumps(to_json(STEP)))
    for figure in ("first_moment_rounding", "second_moment_rounding", "update_rounding"):
        del line["health"][figure]
    del line["sources"]
    before = replace(HEALTH, first_moment_rounding=None, second_moment_rounding=None, update_rounding=None)
    assert step_from_json(line) == STEP.replace(health=before, sources={})
    del line["health"]
    assert step_from_json(line) == STEP.replace(health=None, sources={})


def test_tensorboard_gets_every_figure_of_the_job_and_of_each_layer(tmp_path):
    from megatron_moe.report.sink import TensorBoardSink

    sink = TensorBoardSink(tmp_path, 0)
    sink.step(STEP)
    sink.close(None)
    found = steps.scalars(tmp_path)
    assert scalars(HEALTH).keys() <= found.keys()
    plain = {field.name for field in dataclasses.fields(Health)} - {"layers"}
    assert {f"health/{name}" for name in plain} <= found.keys()
    assert {"health_by_layer/flip_rate_2", "health_by_layer/max_violation_3", "health/max_logit"} <= found.keys()
    assert found["health/flip_rate"] == [(8, 0.03125)]
    assert (found["loss/source/web"], found["tokens/source/rare"]) == ([(8, 2.5)], [(8, 0.0)])
    assert "loss/source/rare" not in found


def log_line(health: Health | None) -> str:
    stream = io.StringIO()
    ConsoleSink(stream, train_iters=8, log_interval=1).step(STEP.replace(health=health))
    return stream.getvalue()


def test_a_log_line_shows_health_of_the_worst_layers_at_a_glance_and_stays_one_line():
    worst = HEALTH.worst
    assert worst["max_violation"] == 1.5 and worst["effective_experts"] < 2 and worst["dead_experts"] == 2
    line, without = log_line(HEALTH), log_line(None)
    sources = "web 2.5000 900 tok 0.50 ep | rare - 0 tok 0.25 ep"
    shown = f"s | {sources} | effective 1.9 | flips 3.1% | max logit 1.5 | dense/expert norm 0.75/0.25"
    assert line.endswith(f"{shown} | update rounding 0.33%\n")
    assert log_line(replace(HEALTH, update_rounding=None)).endswith(f"{shown}\n")
    assert line.count("\n") == 1 and "LOST" not in line
    assert line.split(" ", 2)[2].startswith(without.rstrip("\n").split(" ", 2)[2])
    assert "| LOST 2.5% of gradient additions | effective" in log_line(replace(HEALTH, gradient_swallowed=25))
    # Logits that are not finite are not hidden, and a dense model shows nothing about experts.
    assert "max logit inf" in log_line(replace(HEALTH, layers={2: replace(LAYER, max_logit=None), 3: EVEN}))
    assert summary_line(replace(HEALTH, layers={}, expert_grad_norm=None, update_rounding=None)) == ""
