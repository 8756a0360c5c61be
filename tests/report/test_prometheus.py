"""The Prometheus file is valid, always whole, and has what the run reported last."""

import io
import math
import re
from pathlib import Path

import pytest

from megatron_moe.config.schema import build
from megatron_moe.report import prometheus
from megatron_moe.report.metric import Metric, register_metric, unregister_metric
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.reporter import Reporter
from tests.report.steps import STEP, reporter

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NAME, LABEL = "[a-zA-Z_:][a-zA-Z0-9_:]*", "[a-zA-Z_][a-zA-Z0-9_]*"
PAIR = re.compile(rf'({LABEL})="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (NaN|[+-]Inf|[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)")
ESCAPES = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}


def parsed(text: str) -> Samples:
    """Return the samples of a file by a strict reading of the text format, version 0.0.4, without timestamps."""
    assert text.endswith("\n") and "\r" not in text
    found: Samples = {}
    described: dict[str, list[str]] = {}
    for line in text[:-1].split("\n"):
        if comment := re.fullmatch(rf"# (HELP|TYPE) ({NAME}) ((?:[^\\\n]|\\[\\n])*)", line):
            kind, name, words = comment.groups()
            # Each once, HELP first, before the samples of the name, which stand together.
            assert described.setdefault(name, []) == {"HELP": [], "TYPE": ["HELP"]}[kind], line
            assert list(described)[-1] == name and (kind == "HELP" or words in ("gauge", "counter")), line
            described[name].append(kind)
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        name, inside, number = sample.groups()
        assert list(described)[-1] == name and described[name] == ["HELP", "TYPE"], line
        labels, rest = {}, inside or ""
        while rest:
            pair = PAIR.match(rest)
            assert pair is not None and pair[1] not in labels and (pair[3] == "," or pair.end() == len(rest)), line
            labels[pair[1]], rest = re.sub(r'\\[\\n"]', lambda it: ESCAPES[it[0]], pair[2]), rest[pair.end() :]
        key = (name.removeprefix("megatron_moe_"), frozenset(labels.items()))
        assert name.startswith("megatron_moe_") and key not in found, line
        found[key] = float(number)
    return found


def value(path: Path, name: str, **labels: str) -> float | None:
    return parsed(path.read_text()).get((name, frozenset(labels.items())))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "SECONDS_BETWEEN_WRITES", 0.0)
    return tmp_path / "node_exporter" / "moe.prom"


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def started(path, stream):
    return reporter(build({"mock_data": True, "vocab_size": 8, "prometheus_file": str(path)}), stream=stream)


def test_the_file_has_the_last_numbers_of_the_run(started: Reporter, path: Path):
    started.step(STEP.replace(skipped=True, loss=math.nan, grad_norm=math.inf))
    assert math.isnan(value(path, "loss")) and value(path, "grad_norm") == math.inf
    seconds = {"forward": [0.25, 0.5], "waiting": [0.25, 0.0]}
    started.step(STEP.replace(iteration=2, skipped=True, rank_seconds=seconds, grad_norm=None))
    started.evaluation(EvalRecord(2, "valid", 2.5, 10, 0.1))
    started.evaluation(EvalRecord(2, 'valid/odd "\\\nname', 2.75, 10, 0.1))
    wanted = {
        "iteration": 2, "loss": 3.0, "learning_rate": 1e-3, "tokens_per_second": 2000, "seconds": 0.5, "tokens": 1000,
        "consumed_samples": 8, "skipped_steps_total": 2, "global_batch_size": 8, "running": 1, "attempt": 1,
    }  # fmt: skip
    assert {name: value(path, name) for name in wanted} == wanted
    assert value(path, "grad_norm") == math.inf, "the last one that is known"
    assert value(path, "rank_seconds", rank="1", part="forward") == 0.5
    assert value(path, "evaluation_loss", split="valid") == 2.5
    assert value(path, "evaluation_loss", split='valid/odd "\\\nname') == 2.75
    started.close({})
    assert value(path, "running") == 0 and [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_program_s_own_metrics_are_there(started: Reporter, path: Path):
    metric = Metric("top_share", unit="share \\ of\nall", compute=lambda facts: 0.5)
    register_metric(metric)
    try:
        started.step(STEP.replace(extra={"top_share": 0.5, "words": "none", "größe": 1}))
    finally:
        unregister_metric("top_share")
    assert value(path, "top_share") == 0.5 and value(path, "words") is None
    assert "# HELP megatron_moe_top_share share \\\\ of\\nall\n" in path.read_text()


def test_a_slow_rank_is_there_until_it_is_no_longer_slow(started: Reporter, path: Path):
    def event(phase: str, *, experts: bool = False, ended: bool = False) -> list[frozenset[tuple[str, str]]]:
        facts = {"rank": 3, "host": "n1", "phase": phase, "experts": experts, "ended": ended}
        started.event("slow", "rank 3", **facts)
        return [labels for name, labels in parsed(path.read_text()) if name == "slow_rank"]

    def labels(phase: str, cause: str) -> frozenset[tuple[str, str]]:
        return frozenset({"rank": "3", "host": "n1", "phase": phase, "cause": cause}.items())

    assert event("forward") == [labels("forward", "rank")]
    assert event("save") == [labels("forward", "rank"), labels("save", "rank")]
    assert set(event("backward", experts=True)) == {labels("backward", "experts"), labels("save", "rank")}
    assert event("save", ended=True) == [labels("backward", "experts")]
    assert event("backward", experts=True, ended=True) == []


def test_a_file_that_cannot_be_written_is_one_warning_and_tried_again(started: Reporter, path: Path, stream):
    path.parent.write_text("a file where the folder was")
    for iteration in (1, 2):
        started.step(STEP.replace(iteration=iteration))
    assert stream.getvalue().count(f"--prometheus-file {path} cannot be written") == 1
    path.parent.unlink()
    started.step(STEP.replace(iteration=3))
    assert value(path, "iteration") == 3


def test_quick_steps_write_once_a_second(started: Reporter, path: Path, monkeypatch):
    monkeypatch.setattr(prometheus, "SECONDS_BETWEEN_WRITES", 1000.0)
    for iteration in (1, 2):
        started.step(STEP.replace(iteration=iteration))
    assert value(path, "iteration") == 1
    started.close({})
    assert value(path, "iteration") == 2
