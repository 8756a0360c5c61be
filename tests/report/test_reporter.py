"""The reporter passes a run on to what the flags ask for, on one rank only, and again after a resume."""

import io
import json
import math
import sys

import numpy as np
import pytest

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.report import plot
from megatron_moe.report.jsonl import read_steps
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.reporter import Reporter
from tests.report import steps
from tests.report.steps import reporter, scalars

STEP = steps.STEP.replace(
    tokens_per_expert={2: [4, 0, 2, 2], 3: [2, 2, 2, 2]},
    expert_load=2.0,
    empty_experts=1,
    expert_bias_max=0.1,
    aux_losses={"aux_loss": 1.5},
)


FILES = {
    "metrics_file": "metrics.jsonl",
    "summary_file": "summary.json",
    "plot_file": "plot.png",
    "tensorboard_dir": "tensorboard",
}


def run_with(folder, *flags, train_iters=6):
    wanted = {flag: str(folder / FILES[flag]) for flag in flags}
    return schema.replace(schema.Run(), train_iters=train_iters, log_interval=2, **wanted)


def tell(run, start, stop, summary=None):
    stream = io.StringIO()
    with reporter(run, start, stream) as running:
        running.start({"device": "cpu", "unigram_entropy": 5.0})
        for iteration in range(start + 1, stop + 1):
            running.step(STEP.replace(iteration=iteration, loss=3.0 - 0.1 * iteration))
            if iteration % 2 == 0:
                running.evaluation(EvalRecord(iteration, "valid", 3.1 - 0.1 * iteration, 100, 0.1))
        running.close(summary)
    return stream.getvalue()


@pytest.fixture
def figures(monkeypatch):
    """The pictures that are drawn, which no file is made of."""
    found = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: found.append(self))
    return found


def test_a_rank_that_is_not_the_writer_writes_and_prints_nothing(tmp_path, capsys):
    run = schema.replace(run_with(tmp_path, *FILES), wandb_project="p", wandb_save_dir=str(tmp_path))
    silent = Reporter(run, is_writer=False, start_iteration=0)
    assert silent._sinks == []
    silent.start({"device": "cpu"})
    silent.step(STEP)
    silent.message("hello")
    silent.close({"valid_loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_run_that_is_killed_and_resumed_leaves_the_same_files_as_one_that_was_not(tmp_path):
    run = run_with(tmp_path, *FILES)
    tell(run, 0, 5)
    metrics = {f"metrics.{kind}" for kind in ("jsonl", "eval.jsonl", "events.jsonl", "run.json")}
    assert {path.name for path in tmp_path.iterdir()} == metrics | {"tensorboard"}, "no summary and no picture yet"
    output = tell(run, 4, 6, {"valid_loss": 2.5})
    assert [record.iteration for record in read_steps(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert "took back 1 lines after iteration 4" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["iterations"], summary["train_seconds"], summary["tokens_per_second"]) == (6, 3.0, 2000.0)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["loss/train"]] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for name in FILES.values():
        assert f"wrote {tmp_path / name}" in output


def test_tensorboard_gets_the_loss_the_load_of_each_layer_and_the_auxiliary_losses(tmp_path):
    tell(run_with(tmp_path, "tensorboard_dir"), 0, 2, {})
    seen = scalars(tmp_path / "tensorboard")
    assert seen["experts_by_layer/load_max_over_mean_2"][0] == (1, 2.0)
    assert seen["experts_by_layer/load_max_over_mean_3"][0] == (1, 1.0)
    assert seen["loss/aux_loss"][0] == (1, 1.5)
    assert seen["loss/valid"][0][0] == 2
    assert "speed/mfu" not in seen


def test_megatrons_names_are_over_iterations_and_samples_and_one_line_after_a_restart(tmp_path):
    run = schema.replace(run_with(tmp_path, "tensorboard_dir"), tensorboard_names="megatron")
    for start, stop in ((0, 5), (4, 6)):
        with reporter(run, start) as running:
            for iteration in range(start + 1, stop + 1):
                running.step(STEP.replace(iteration=iteration, consumed_samples=8 * iteration, skipped=iteration == 2))
            running.evaluation(EvalRecord(stop, "valid", 3.0, 100, 0.1))
    found, over = scalars(tmp_path / "tensorboard"), scalars(tmp_path / "tensorboard" / "vs_samples")
    assert [step for step, _ in found["lm loss"]] == [1, 3, 4, 5, 6], "of a skipped step there is no loss"
    assert [step for step, _ in over["lm loss vs samples"]] == [8, 24, 32, 40, 48]
    assert [step for step, _ in over["grad-norm vs samples"]] == [8, 16, 24, 32, 40, 48]
    assert found["lm loss validation"] == [(6, 3.0)] and over["lm loss validation vs samples"] == [(48, 3.0)]
    assert found["load_balancing_loss"][0] == (1, 1.5)
    assert {"loss/train", "loss/valid", "optimizer/learning_rate", "loss/aux_loss"}.isdisjoint(found)
    assert "experts/load_max_over_mean" in found and "load_balancing_loss vs samples" not in over


def test_a_run_that_had_nothing_left_to_do_still_tells_its_totals_once(tmp_path):
    run, stream = run_with(tmp_path, "metrics_file", "summary_file"), io.StringIO()
    tell(run, 0, 6)
    running = reporter(run, 6, stream)
    running.close({"valid_loss": 1.0})
    running.close({"valid_loss": 2.0})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["iterations"], summary["train_seconds"], summary["valid_loss"]) == (6, 3.0, 1.0)
    assert stream.getvalue().count("summary.json") == 1


def test_a_page_without_its_sink_is_refused():
    with pytest.raises(ConfigError, match="--report-file page.html needs .* page_sink"):
        Reporter(schema.replace(schema.Run(), report_file="page.html"), is_writer=False, start_iteration=0)


@pytest.mark.parametrize(
    ("flag", "package"), [("tensorboard_dir", "torch.utils.tensorboard"), ("plot_file", "matplotlib")]
)
def test_a_missing_package_is_told_at_the_start(tmp_path, monkeypatch, flag, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install"):
        reporter(run_with(tmp_path, "metrics_file", flag))


def test_the_picture_shows_the_losses_the_entropy_and_the_load_of_every_expert(tmp_path, monkeypatch, figures):
    tell(run_with(tmp_path, "metrics_file"), 0, 6)
    plot.draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png", unigram_entropy=5.0)
    loss, balance, load = figures[0].axes[:3]
    labels = [text.get_text() for text in loss.get_legend().get_texts()]
    assert labels == ["train", "valid (last 2.500)", "unigram entropy 5.000"]
    assert loss.lines[0].get_ydata()[-1] == pytest.approx(2.4)
    assert [line.get_ydata()[0] for line in balance.lines[:2]] == [2.0, 1.0]
    image = load.images[0].get_array()
    assert image.shape == (8, 6)
    assert list(image[:, 0]) == [2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    # Of many experts and steps it has a row per layer and bounded columns.
    monkeypatch.setattr(plot, "MAX_ROWS", 4)
    monkeypatch.setattr(plot, "MAX_COLUMNS", 3)
    plot.draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    image = figures[1].axes[2].images[0].get_array()
    assert image.tolist() == [[2.0] * 3, [1.0] * 3]


def test_a_picture_of_a_run_that_counts_every_second_step_shows_those(tmp_path, figures):
    with reporter(run_with(tmp_path, "metrics_file")) as running:
        for iteration in range(1, 7):
            counts = STEP.tokens_per_expert if iteration % 2 == 0 else {}
            running.step(STEP.replace(iteration=iteration, tokens_per_expert=counts))
    plot.draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    _, balance, load = figures[0].axes[:3]
    assert list(balance.lines[0].get_xdata()) == [2, 4, 6]
    assert load.images[0].get_array().shape == (8, 3)
    assert load.images[0].get_extent()[:2] == [1.0, 7.0]
    assert load.get_xlim() == (0.5, 6.5), "steps that were not counted belong to the picture too"


def test_a_dense_run_with_a_skipped_step_is_drawn_too(tmp_path):
    with reporter(run_with(tmp_path, "metrics_file")) as running:
        for iteration in range(1, 41):
            odd = {"loss": 99.0, "skipped": True} if iteration == 5 else {}
            running.step(STEP.replace(iteration=iteration, tokens_per_expert={}, **odd))
    history = plot.History(tmp_path / "metrics.jsonl")
    assert math.isnan(history.losses[4]) and history.losses[5] == 3.0
    plot.draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_running_mean_follows_a_straight_line_without_lag_and_passes_over_gaps():
    line = np.arange(50.0)
    assert np.allclose(plot.running_mean(line, 5), line)
    gap = np.ones(9)
    gap[4] = np.nan
    assert np.allclose(plot.running_mean(gap, 2), 1.0)
    assert np.isnan(plot.running_mean(np.array([np.nan]), 2)).all()
