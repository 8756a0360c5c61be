"""The packages of W&B and MLflow: what they keep of a run on this machine, and a server that fails for a while."""

import io
import json
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.report import tracker
from tests.report.tracked_runs import SECRET, about, events, of_wandb, patience, report, run_of  # noqa: F401 (autouse)


class Away:
    """An MLflow server that does not take the first values."""

    failures = 1
    found: tuple[Any, ...] = ()
    failed: int
    logged: list[Any]
    kept: dict[str, str]

    def __init__(self, uri: str) -> None:
        self.failed, self.logged, self.kept = 0, [], {}
        Away.last = self

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            self.failed += name == "log_batch"
            if name == "log_batch" and self.failed <= self.failures:
                raise ConnectionError(f"{name}: http://me:{SECRET}@host does not answer")
            self.logged += named.get("metrics", [])
            self.kept.update(pair for kind in ("params", "tags") if name == "log_batch" for pair in named.get(kind, ()))
            if name == "set_terminated":
                self.kept["status"] = words[1]
            info = types.SimpleNamespace(run_id="r", experiment_id="1")
            return self.found if name == "search_runs" else types.SimpleNamespace(info=info, experiment_id="1")

        return call


Away.last = Away("")


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of, RunTag=lambda *of: of)
    for name, module in (("mlflow", None), ("mlflow.entities", entities), ("mlflow.tracking", None)):
        monkeypatch.setitem(sys.modules, name, module or types.SimpleNamespace(MlflowClient=Away))
    monkeypatch.setattr(tracker, "RETRY_SECONDS", (0.0, 0.0, 0.0, 0.0))
    for name in ("ALLOW_FILE_STORE", "HTTP_REQUEST_TIMEOUT", "HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(f"MLFLOW_{name}", "1")


def tracked(*messages: dict[str, Any], **about: Any) -> list[dict[str, str]]:
    """Return what the process of MLflow answers."""
    asked = {"mlflow_experiment": "e", "mlflow_run_name": None, "mlflow_tracking_uri": "http://host"}
    what = {"run_id": "1", "attempt": 1, "command": "", "git": None, "flags": {}, "layout": {}, "versions": {}}
    opened = {"about": {**what, "all_flags": asked, **about}, "start_iteration": 0}
    replies = io.StringIO()
    lines = [json.dumps(message) + "\n" for message in (opened, *messages)]
    tracker.track("MLflow", lines, replies, lambda: None)
    return [reply for reply in map(json.loads, replies.getvalue().splitlines()) if reply["kind"] != "message"]


VALUES = {"iteration": 1, "time": "2026-01-01T00:00:00+00:00", "values": {"loss/train": 2.0}, "again": False}


@pytest.mark.parametrize("failures", [1, 99])
def test_mlflow_is_tried_again_at_the_end_of_a_run(away: None, monkeypatch: pytest.MonkeyPatch, failures: int):
    monkeypatch.setattr(Away, "failures", failures)
    replies = tracked(VALUES, {"ending": "finished"})
    assert replies[0]["kind"] == "warning" and "does not answer" in replies[0]["text"]
    assert not any(SECRET in reply["text"] for reply in replies)
    assert (replies[-1]["kind"] == "failed") == (failures == 99)
    assert [name for name, *_ in Away.last.logged] == (["loss/train", "iteration"] if failures == 1 else [])


def test_mlflow_gets_flags_layout_and_how_a_run_ends(away: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Away, "failures", 0)
    for ending, status in (("finished", "FINISHED"), ("failed: x", "FAILED"), ("killed", "KILLED")):
        replies = tracked(VALUES, {"ending": ending}, flags={"lr": 1}, layout={"TP": 2})
        assert [reply["kind"] for reply in replies] == ["done"]
        assert Away.last.kept == {"lr": "1", "layout.TP": "2", "megatron_moe.ending": ending, "status": status}


def test_mlflow_goes_on_in_the_run_that_is_there_after_its_last_step(away: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Away, "failures", 0)
    data = types.SimpleNamespace(metrics={"iteration": 2.0}, params={"lr": "1"})
    monkeypatch.setattr(Away, "found", (types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"), data=data),))
    again = [{**VALUES, "iteration": iteration, "again": iteration < 3} for iteration in (1, 2, 3)]
    assert [reply["kind"] for reply in tracked(*again, {"ending": "finished"}, flags={"lr": 1})] == ["done"]
    assert [(name, value, step) for name, value, _, step in Away.last.logged] == [
        ("loss/train", 2.0, 3), ("iteration", 3.0, 3),
    ]  # fmt: skip
    assert "lr" not in Away.last.kept and Away.last.kept["megatron_moe.attempt"] == "1"


@pytest.mark.parametrize("failures", [3, 99])
def test_a_server_that_fails_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch, failures: int):
    monkeypatch.setattr(tracker, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    calls, said = [], []

    def act() -> None:
        calls.append(1)
        if len(calls) <= failures:
            raise ConnectionError("no answer")

    with pytest.raises(ConnectionError) if failures == 99 else nullcontext():
        tracker._patiently(act, lambda *words: said.append(words), threading.Event())
    assert len(calls) == 4 and len(said) == 1


@pytest.mark.test_all(
    instead="tests/report/test_tracker_process.py::test_mlflow_goes_on_in_the_run_that_is_there_after_its_last_step"
)
@pytest.mark.parametrize("place", ["file", "sqlite"])
def test_mlflow_has_each_step_once_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'runs'}" if place == "file" else f"sqlite:///{tmp_path / 'runs.db'}"
    run = run_of(tmp_path, mlflow_experiment="moe", mlflow_tracking_uri=uri, mlflow_run_name="first")
    for start, last, ending, status in ((0, 4, "stopped by SIGTERM", "KILLED"), (2, 6, "finished", "FINISHED")):
        report(run, start, last, ending, opened="MLflow run: ")
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("moe")
        assert experiment is not None
        (found,) = client.search_runs([experiment.experiment_id])
        assert found.info.status == status and found.data.tags["megatron_moe.ending"] == ending
    assert found.info.run_name == "first"
    assert found.data.tags["megatron_moe.run_id"] == about(tmp_path)["run_id"]
    assert found.data.tags["megatron_moe.attempt"] == "2"
    assert found.data.params["train_iters"] == "6" and found.data.params["layout.TP"] == "1"
    losses = client.get_metric_history(found.info.run_id, "loss/train")
    assert [(value.step, value.value) for value in losses] == [(i, 9.0 - i) for i in range(1, 7)]
    evaluations = client.get_metric_history(found.info.run_id, "loss/valid")
    assert [value.step for value in evaluations] == [4, 6]
    assert events(tmp_path, "warning") == []


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process and those it starts find W&B's package, which megatron-core would import each time."""
    folder = Path(sys.prefix) / "trackers"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        del sys.modules[name]


@pytest.mark.test_all(instead="tests/report/test_tracker.py::test_a_run_whose_server_is_away_is_recorded_offline")
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: None):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET * 3)
    run = of_wandb(tmp_path, wandb_exp_name="first")
    report(run, 0, 4, "stopped by SIGTERM", opened="wandb sync")
    report(run, 2, 6, opened="wandb sync")
    assert len(list(tmp_path.glob("w/wandb/offline-run-*/*.wandb"))) == 2
    assert events(tmp_path, "warning") == []
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
