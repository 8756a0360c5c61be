"""Weights & Biases and MLflow get the run, once, over restarts, and whatever they do the run goes on."""

import io
import json
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config import cli, rules, schema
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.schema import Run
from megatron_moe.report import tracker
from megatron_moe.report.jsonl import read_events
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe.training.plan import plan_run
from tests.helpers import beside
from tests.report import wandb_stand_in
from tests.report.steps import STEP, reporter

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a process as long as a slow machine takes."""
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE", 300.0)
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE_INTERRUPTED", 300.0)


def step(iteration: int, loss: float) -> StepRecord:
    return STEP.replace(iteration=iteration, consumed_samples=8 * iteration, loss=loss)


def run_of(folder: Path, **flags: Any) -> Run:
    return schema.replace(schema.Run(), metrics_file=str(folder / "metrics.jsonl"), train_iters=6, **flags)


def of_wandb(folder: Path, **flags: Any) -> Run:
    return run_of(folder, wandb_project="moe", save=str(folder / "w"), **flags)


def report(run: Run, start: int, last: int, ending: str = "finished", changed: int = 99, opened: str = "") -> str:
    """Report steps after `start`; the losses of those from `changed` on are other ones than a repeated step's.

    The run goes on until `opened` is said: a service's process has a minute to finish, which may import for longer.
    """
    stream = io.StringIO()
    with reporter(run, start, stream) as running:
        running.start({"device": "cpu"})
        for iteration in range(start + 1, last + 1):
            running.step(step(iteration, 9.0 - iteration + (0.5 if iteration >= changed else 0.0)))
        running.evaluation(EvalRecord(last, "valid", 3.0, 100, 0.1))
        while opened not in stream.getvalue():
            assert " gets no more of this run" not in stream.getvalue(), stream.getvalue()
            time.sleep(0.05)
            running.flush()
        running.close({}, ending)
    return stream.getvalue()


def events(folder: Path, kind: str) -> list[str]:
    return [event.text for event in read_events(folder / "metrics.jsonl") if event.kind == kind]


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.run.json").read_text())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a stand-in for W&B and its server, which this process and those it starts import."""
    path = wandb_stand_in.install(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(path.parent))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return path


def state(server: Path) -> dict[str, Any]:
    return json.loads(server.read_text())


def started(folder: Path) -> Reporter:
    running = reporter(of_wandb(folder))
    running.start({})
    return running


def test_a_restart_goes_on_in_the_same_run_of_wandb_and_repeats_what_differs_alone(server, tmp_path):
    run = of_wandb(tmp_path, wandb_entity="team", wandb_exp_name="first")
    assert "https://wandb.invalid/run" in report(run, 0, 5)
    first = state(server)
    assert first["opened"]["id"] == about(tmp_path)["run_id"]
    assert {"project": "moe", "entity": "team", "name": "first", "resume": "allow"}.items() <= first["opened"].items()
    config = first["opened"]["config"]
    assert config["train_iters"] == 6 and config["lr"] == run.optimizer.lr  # defaults, too
    assert config["layout"]["TP"] == 1 and "python" in config["versions"] and config["facts"] == {"device": "cpu"}
    assert first["metrics"] == {"iteration": None, "*": "iteration"}
    assert first["rows"]["2"]["loss/train"] == 7.0 and first["rows"]["5"]["loss/valid"] == 3.0
    assert first["exit_code"] == 0 and first["summary"]["ending"] == "finished" and not first["preempting"]

    report(run, 2, 6, changed=5)  # 3 and 4 come out as they did, 5 does not
    second = state(server)
    assert second["opened"]["id"] == first["opened"]["id"] and second["dropped"] == 0
    written = [(row["iteration"], row["attempt"], row["loss/train"]) for row in wandb_stand_in.rows(server).values()]
    assert written == [(i, 1, 9.0 - i) for i in range(1, 6)] + [(5, 2, 4.5), (6, 2, 3.5)]


def test_wandb_gets_megatrons_tags_and_the_steps_of_the_interval(server, tmp_path):
    run = of_wandb(
        tmp_path, tensorboard_names="megatron", tensorboard_log_interval=2, log_validation_ppl_to_tensorboard=True
    )
    report(run, 0, 5)
    rows = wandb_stand_in.rows(server)
    assert rows[2]["lm loss"] == 7.0 and rows[4]["grad-norm"] == 0.5 and 3 not in rows
    assert rows[5]["lm loss validation"] == 3.0 and rows[5]["lm loss validation ppl"] == pytest.approx(math.exp(3.0))


def test_a_fault_is_an_alert(server, tmp_path):
    with pytest.raises(RunFault), started(tmp_path) as running:
        running.step(step(1, 3.0))
        raise RunFault("iteration 2: a NaN")
    found = state(server)
    assert found["alerts"] == [["fault at iteration 1", "iteration 2: a NaN", "ERROR"]]
    assert found["summary"]["ending"] == "failed: iteration 2: a NaN"
    assert (found["exit_code"], found["preempting"]) == (1, False)


@pytest.mark.parametrize("says", [True, False])
def test_the_last_steps_of_a_killed_run_arrive(server, tmp_path, says):
    child = os.fork()
    if child == 0:
        running = started(tmp_path)
        running.step(step(1, 3.0))
        if says:
            running.on_abort("failed: rank 1 is gone", "rank 1 is gone")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    await_file(server)
    found = state(server)
    assert found["rows"]["1"]["loss/train"] == 3.0 and found["exit_code"] == 1
    assert found["summary"]["ending"] == ("failed: rank 1 is gone" if says else "killed")
    assert found["summary"].get("last_fault") == ("rank 1 is gone" if says else None)


def await_file(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path}: nothing has written it")


def test_a_signal_for_the_training_does_not_end_the_process_that_hands_it_over(server, tmp_path):
    with started(tmp_path) as running:
        pid = Path(f"{server}.pid")
        await_file(pid)
        assert os.getpgid(int(pid.read_text())) != os.getpgrp()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # as Slurm sends it to every process
            os.kill(int(pid.read_text()), number)
        running.step(step(1, 3.0))
        running.close({}, "stopped by SIGTERM")
    found = state(server)
    assert (found["summary"]["ending"], found["exit_code"], found["preempting"]) == ("stopped by SIGTERM", 1, True)


def test_a_process_that_the_trainer_has_forked_does_not_hold_up_the_end(server, tmp_path):
    with started(tmp_path) as running:
        running.step(step(1, 3.0))
        worker = os.fork()  # with the pipe, as a worker of the data has it
        if worker == 0:
            signal.pause()
        try:
            running.close({})
        finally:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    assert state(server)["summary"]["ending"] == "finished" and events(tmp_path, "warning") == []


@pytest.mark.parametrize(
    ("misbehaves", "says"),
    [("raises", "no room for key"), ("hangs", "had not taken"), ("dies", "its process has ended")],
)
def test_whatever_wandb_does_the_run_goes_on_with_one_warning(server, tmp_path, monkeypatch, misbehaves, says):
    pid = Path(f"{server}.pid")
    monkeypatch.setenv("WANDB_STAND_IN", misbehaves)
    if misbehaves == "hangs":
        monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE", 0.2)
    shown = report(of_wandb(tmp_path), 0, 4)
    (warning,) = events(tmp_path, "warning")
    assert "W&B" in warning and says in warning
    assert ("$WANDB_API_KEY" in warning) is (misbehaves == "raises")  # which repeats the key
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in [*files, shown.encode()])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert events(tmp_path, "end") == ["finished"]
    if misbehaves == "hangs":
        await_file(pid)
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_values_that_nobody_takes_are_dropped_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "MOST_BYTES", 2**20)
    pid, deaf = tmp_path / "pid", tmp_path / "deaf"
    deaf.write_text(f"#!/bin/sh\necho $$ > {pid}.new && mv {pid}.new {pid}\nexec sleep 600\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    with started(tmp_path) as running:
        for iteration in range(1, 13):
            running.step(step(iteration, 3.0))
            running.event("fault", "x" * 2**17, shown=False)
        running.close({})
    await_file(pid)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    (warning,) = events(tmp_path, "warning")
    assert "MiB" in warning and events(tmp_path, "end") == ["finished"]


def test_a_run_whose_server_is_away_is_recorded_offline(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_STAND_IN", "away")
    report(of_wandb(tmp_path), 0, 2)
    (warning,) = events(tmp_path, "warning")
    assert "no server" in warning and f"wandb sync {tmp_path / 'w' / 'run'}" in warning
    assert state(server)["mode"] == "offline" and list(wandb_stand_in.rows(server)) == [1, 2]


def test_a_process_that_cannot_be_started_is_one_warning(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    report(of_wandb(tmp_path), 0, 2)
    (warning,) = events(tmp_path, "warning")
    assert "W&B" in warning and "gone" in warning


@pytest.mark.parametrize(
    ("flags", "missing", "says"),
    [
        ("--wandb-project p", "wandb", ["--wandb-project p", "pip install wandb"]),
        ("--mlflow-experiment e --mlflow-tracking-uri file:x", "mlflow", ["--mlflow-experiment e", "mlflow-skinny"]),
        ("--mlflow-experiment e", "", ["--mlflow-experiment e", "--mlflow-tracking-uri", "MLFLOW_TRACKING_URI"]),
        ("--mlflow-experiment e --mlflow-tracking-uri sqlite:///x.db", "sqlalchemy", ["sqlalchemy", "file:"]),
    ],
)
def test_what_a_sink_lacks_is_refused(monkeypatch, tmp_path, flags, missing, says):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for module in ("wandb", "mlflow"):
        spec = types.SimpleNamespace(origin="somewhere")
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(__spec__=spec))
    if missing:
        monkeypatch.delitem(sys.modules, missing, raising=False)
        # What W&B leaves in the current folder is a package to Python.
        (tmp_path / missing).mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    run = cli.parse(f"--preset tiny --mock-data --vocab-size 99 {flags}".split())
    rules.check(run, 1)
    with pytest.raises(ConfigError) as caught:
        plan_run(run, 1)
    assert [text for text in says if text not in str(caught.value)] == []


def test_a_uri_with_a_password_is_refused_without_repeating_it():
    for uri in (f"http://me:{SECRET}@host", f"https://{SECRET}@host", f"postgresql+psycopg2://me:{SECRET}@host/runs"):
        run = cli.parse(["--preset", "tiny", "--mock-data", "--vocab-size", "99", "--mlflow-experiment", "e"])
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
            rules.check(schema.replace(run, mlflow_tracking_uri=uri), 1)
        assert SECRET not in str(caught.value)


# ---- the packages themselves, and a server that fails for a while


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
    instead="tests/report/test_tracker.py::test_mlflow_goes_on_in_the_run_that_is_there_after_its_last_step"
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
    monkeypatch.syspath_prepend(beside.FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(beside.FOLDER))
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
