"""Weights & Biases and MLflow get the run, once, over restarts, and whatever they do the run goes on."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import struct
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
from megatron_moe.report import tracker, tracker_process
from megatron_moe.report.jsonl import read_events
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe.report.tracker import require_trackers
from megatron_moe.training.plan import plan_run
from tests.helpers import wandb_stand_in

pytestmark = pytest.mark.one_engine

SECRET = "0123456789abcdef"


def step(iteration: int, loss: float) -> StepRecord:
    required = {"learning_rate": 1e-3, "grad_norm": 0.5, "loss_scale": 1.0, "skipped": False}
    return StepRecord(
        iteration=iteration, consumed_samples=8 * iteration, loss=loss, tokens=64, seconds=0.5, **required
    )


def run_of(folder: Path, **flags: Any) -> Run:
    return schema.replace(schema.Run(), metrics_file=str(folder / "metrics.jsonl"), train_iters=6, **flags)


def of_wandb(folder: Path, **flags: Any) -> Run:
    return run_of(folder, wandb_project="moe", wandb_save_dir=str(folder / "w"), **flags)


def of_mlflow(folder: Path, **flags: Any) -> Run:
    uri = f"file:{folder / 'runs'}"
    return run_of(folder, mlflow_experiment="moe", mlflow_tracking_uri=uri, mlflow_run_name="first", **flags)


def report(run: Run, start: int, last: int, ending: str = "finished", changed: int = 99) -> str:
    """Report steps after `start`; the losses of those from `changed` on are other ones than a repeated step's."""
    stream = io.StringIO()
    with Reporter(run, is_writer=True, start_iteration=start, stream=stream) as reporter:
        reporter.start({"device": "cpu"})
        for iteration in range(start + 1, last + 1):
            reporter.step(step(iteration, 9.0 - iteration + (0.5 if iteration >= changed else 0.0)))
        reporter.evaluation(EvalRecord(last, "valid", 3.0, 100, 0.1))
        reporter.close({}, ending)
    return stream.getvalue()


def events(folder: Path, kind: str) -> list[str]:
    return [event.text for event in read_events(folder / "metrics.jsonl") if event.kind == kind]


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.run.json").read_text())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a process as long as a slow machine takes."""
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE", 300.0)
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE_INTERRUPTED", 300.0)


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


# ---- Weights & Biases, by a stand-in


@pytest.mark.claim("A restarted run goes on in the same run of W&B and of MLflow, without repeated or lost steps.")
def test_a_restart_goes_on_in_the_same_run_of_wandb_and_repeats_what_differs_alone(server: Path, tmp_path: Path):
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
    assert first["exit_code"] == 0 and first["summary"]["ending"] == "finished"

    report(run, 2, 6, changed=5)  # 3 and 4 come out as they did, 5 does not
    second = state(server)
    assert second["opened"]["id"] == first["opened"]["id"] and second["dropped"] == 0
    written = [(row["iteration"], row["attempt"], row["loss/train"]) for row in wandb_stand_in.rows(server).values()]
    assert written == [(i, 1, 9.0 - i) for i in range(1, 6)] + [(5, 2, 4.5), (6, 2, 3.5)]


def test_wandb_gets_megatrons_tags_and_the_steps_of_the_interval(server: Path, tmp_path: Path):
    run = of_wandb(
        tmp_path, tensorboard_names="megatron", tensorboard_log_interval=2, log_validation_ppl_to_tensorboard=True
    )
    report(run, 0, 5)
    rows = wandb_stand_in.rows(server)
    assert rows[2]["lm loss"] == 7.0 and rows[4]["grad-norm"] == 0.5 and 3 not in rows
    assert rows[5]["lm loss validation"] == 3.0 and rows[5]["lm loss validation ppl"] == pytest.approx(math.exp(3.0))


@pytest.mark.parametrize(
    ("ending", "exit_code", "preempting"),
    [("finished", 0, False), ("stopped by SIGTERM", 1, True), ("failed: iteration 1: a NaN", 1, False)],
)
def test_how_a_run_ends_is_its_state_in_wandb(
    server: Path, tmp_path: Path, ending: str, exit_code: int, preempting: bool
):
    report(of_wandb(tmp_path), 0, 1, ending)
    found = state(server)
    assert (found["summary"]["ending"], found["exit_code"], found["preempting"]) == (ending, exit_code, preempting)


def test_a_fault_is_an_alert(server: Path, tmp_path: Path):
    with (
        pytest.raises(RunFault),
        Reporter(of_wandb(tmp_path), is_writer=True, start_iteration=0, stream=io.StringIO()) as reporter,
    ):
        reporter.start({})
        reporter.step(step(1, 3.0))
        raise RunFault("iteration 2: a NaN")
    found = state(server)
    assert found["alerts"] == [["fault at iteration 1", "iteration 2: a NaN", "ERROR"]]
    assert found["summary"]["ending"] == "failed: iteration 2: a NaN"


@pytest.mark.parametrize("says", [True, False])
def test_the_last_steps_of_a_killed_run_arrive(server: Path, tmp_path: Path, says: bool):
    child = os.fork()
    if child == 0:
        reporter = Reporter(of_wandb(tmp_path), is_writer=True, start_iteration=0, stream=io.StringIO())
        reporter.start({})
        reporter.step(step(1, 3.0))
        if says:
            reporter.last_words("failed: rank 1 is gone", "rank 1 is gone")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    await_file(server)
    found = state(server)
    assert found["rows"]["1"]["loss/train"] == 3.0 and found["exit_code"] == 1
    assert found["summary"]["ending"] == ("failed: rank 1 is gone" if says else "killed")
    assert found["summary"].get("last_fault") == ("rank 1 is gone" if says else None)


def await_file(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path}: nothing has written it")


def test_a_signal_for_the_training_does_not_end_the_process_that_hands_it_over(server: Path, tmp_path: Path):
    stream = io.StringIO()
    with Reporter(of_wandb(tmp_path), is_writer=True, start_iteration=0, stream=stream) as reporter:
        reporter.start({})
        pid = Path(f"{server}.pid")
        await_file(pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # as Slurm sends it to every process
            os.kill(int(pid.read_text()), number)
        reporter.step(step(1, 3.0))
        reporter.close({}, "stopped by SIGTERM")
    assert state(server)["summary"]["ending"] == "stopped by SIGTERM"


@pytest.mark.claim("A run goes on where W&B or MLflow raises, hangs, dies or is away: one warning says so.")
@pytest.mark.parametrize(
    ("misbehaves", "says"),
    [("raises", "no room for key"), ("hangs", "had not taken"), ("dies", "its process has ended")],
)
def test_whatever_wandb_does_the_run_goes_on_with_one_warning(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misbehaves: str, says: str
):
    pid = Path(f"{server}.pid")
    monkeypatch.setenv("WANDB_STAND_IN", misbehaves)
    monkeypatch.setattr(tracker, "SECONDS_TO_CLOSE", 0.2 if misbehaves == "hangs" else 60.0)
    report(of_wandb(tmp_path), 0, 4)
    (warning,) = events(tmp_path, "warning")
    assert "W&B" in warning and says in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert events(tmp_path, "end") == ["finished"]
    if misbehaves == "hangs":
        await_file(pid)
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_values_that_nobody_takes_are_dropped_before_they_fill_the_memory(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracker, "MOST_BYTES", 2**20)
    pid = Path(f"{server}.pid")
    with Reporter(of_wandb(tmp_path), is_writer=True, start_iteration=0, stream=io.StringIO()) as reporter:
        reporter.start({})
        await_file(pid)
        os.kill(int(pid.read_text()), signal.SIGSTOP)
        for iteration in range(1, 13):
            reporter.step(step(iteration, 3.0))
            reporter.event("fault", "x" * 2**17, shown=False)
        reporter.close({})
    os.kill(int(pid.read_text()), signal.SIGKILL)
    (warning,) = events(tmp_path, "warning")
    assert "MiB" in warning and events(tmp_path, "end") == ["finished"]


def test_a_run_whose_server_is_away_is_recorded_offline(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_STAND_IN", "away")
    report(of_wandb(tmp_path), 0, 2)
    (warning,) = events(tmp_path, "warning")
    assert "no server" in warning and f"wandb sync {tmp_path / 'w' / 'run'}" in warning
    assert state(server)["mode"] == "offline" and list(wandb_stand_in.rows(server)) == [1, 2]


def test_a_process_that_cannot_be_started_is_one_warning(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    report(of_wandb(tmp_path), 0, 2)
    (warning,) = events(tmp_path, "warning")
    assert "W&B" in warning and "gone" in warning


@pytest.mark.claim("A key of W&B or a password of MLflow in the environment is in no file of a run.")
def test_a_secret_of_the_environment_is_in_no_file(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report(of_wandb(tmp_path), 0, 2)
    monkeypatch.setenv("WANDB_STAND_IN", "raises")  # with the key in its text
    shown = report(of_wandb(tmp_path), 2, 4)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("$WANDB_API_KEY" in text for text in files)
    assert not any(SECRET in text for text in [*files, shown])


def test_a_rank_that_does_not_write_starts_nothing(server: Path, tmp_path: Path):
    with Reporter(of_wandb(tmp_path), is_writer=False, start_iteration=0) as reporter:
        reporter.start({})
        reporter.step(step(1, 3.0))
    assert not server.exists() and not Path(f"{server}.pid").exists()


# ---- what is refused


@pytest.mark.claim("A sink whose package is not installed is refused before anything is allocated.")
@pytest.mark.parametrize(
    ("flags", "missing", "says"),
    [
        ("--wandb-project p", "wandb", ["--wandb-project p", "pip install wandb"]),
        ("--mlflow-experiment e --mlflow-tracking-uri file:x", "mlflow", ["--mlflow-experiment e", "mlflow-skinny"]),
        ("--mlflow-experiment e", "", ["--mlflow-experiment e", "--mlflow-tracking-uri", "MLFLOW_TRACKING_URI"]),
        ("--mlflow-experiment e --mlflow-tracking-uri sqlite:///x.db", "sqlalchemy", ["sqlalchemy", "file:"]),
    ],
)
def test_what_a_sink_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, missing: str, says: list[str]
):
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


def test_nothing_is_asked_of_a_run_without_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    require_trackers(schema.Run())


# ---- MLflow whose server fails for a while


class Away:
    """An MLflow server that does not take the first values."""

    failures = 1
    failed: int
    logged: list[Any]

    def __init__(self, uri: str) -> None:
        self.failed, self.logged = 0, []
        Away.last = self

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            self.failed += name == "log_batch"
            if name == "log_batch" and self.failed <= self.failures:
                raise ConnectionError(f"{name}: http://me:{SECRET}@host does not answer")
            self.logged += named.get("metrics", [])
            info = types.SimpleNamespace(run_id="r", experiment_id="1")
            return [] if name == "search_runs" else types.SimpleNamespace(info=info, experiment_id="1")

        return call


Away.last = Away("")


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of, RunTag=lambda *of: of)
    for name, module in (("mlflow", None), ("mlflow.entities", entities), ("mlflow.tracking", None)):
        monkeypatch.setitem(sys.modules, name, module or types.SimpleNamespace(MlflowClient=Away))
    monkeypatch.setattr(tracker_process, "RETRY_SECONDS", (0.0, 0.0, 0.0, 0.0))
    with pytest.MonkeyPatch.context() as environment:
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
            environment.setenv(name, "1")
        yield


def tracked(*messages: dict[str, Any]) -> list[dict[str, str]]:
    """Return what the process of MLflow answers."""
    flags = {"mlflow_experiment": "e", "mlflow_run_name": None, "mlflow_tracking_uri": "http://host"}
    what = {"run_id": "1", "attempt": 1, "command": "", "git": None, "flags": {}, "layout": {}, "versions": {}}
    opened = {"flags": flags, "about": what, "start_iteration": 0, "folder": None}
    replies = io.StringIO()
    lines = [json.dumps(message) + "\n" for message in (opened, *messages)]
    tracker_process.track("MLflow", lines, replies, lambda: None)
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


@pytest.mark.parametrize("failures", [3, 99])
def test_a_server_that_fails_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch, failures: int):
    monkeypatch.setattr(tracker_process, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    calls, said = [], []

    def act() -> None:
        calls.append(1)
        if len(calls) <= failures:
            raise ConnectionError("no answer")

    with pytest.raises(ConnectionError) if failures == 99 else nullcontext():
        tracker_process._patiently(act, lambda *words: said.append(words), threading.Event())
    assert len(calls) == 4 and len(said) == 1


# ---- the packages themselves


@pytest.mark.claim("A restarted run goes on in the same run of W&B and of MLflow, without repeated or lost steps.")
@pytest.mark.parametrize("place", ["file", "sqlite"])
def test_mlflow_has_each_step_once_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    pytest.importorskip("mlflow", reason="the mlflow package is not installed")
    if place == "sqlite":
        pytest.importorskip("sqlalchemy", reason="the sqlalchemy package is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'runs'}" if place == "file" else f"sqlite:///{tmp_path / 'runs.db'}"
    run = schema.replace(of_mlflow(tmp_path), mlflow_tracking_uri=uri)
    for start, last, ending, status in ((0, 4, "stopped by SIGTERM", "KILLED"), (2, 6, "finished", "FINISHED")):
        report(run, start, last, ending)
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


@pytest.mark.claim("W&B's offline mode keeps the run on this machine.")
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="the wandb package is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET * 3)
    run = of_wandb(tmp_path, wandb_exp_name="first")
    assert "wandb sync" in report(run, 0, 4, "stopped by SIGTERM")
    report(run, 2, 6)
    first, second = (list(recorded(path)) for path in sorted(tmp_path.glob("w/wandb/offline-run-*/*.wandb")))
    opened = [record.run for record in (*first, *second) if record.WhichOneof("record_type") == "run"]
    assert {one.run_id for one in opened} == {about(tmp_path)["run_id"]}
    assert {one.display_name for one in opened} == {"first"} and {one.project for one in opened} == {"moe"}
    assert losses_of(first) == {i: 9.0 - i for i in range(1, 5)}
    assert losses_of(second) == {i: 9.0 - i for i in range(3, 7)}  # nothing here knows the steps of the other
    kinds = {record.WhichOneof("record_type") for record in first}
    assert "preempting" in kinds and "preempting" not in {record.WhichOneof("record_type") for record in second}
    assert [r.exit.exit_code for r in (*first, *second) if r.WhichOneof("record_type") == "exit"] == [1, 0]
    assert events(tmp_path, "warning") == []
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def losses_of(records: list[Any]) -> dict[int, float]:
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert record.history.step.num == row["iteration"]
            found[row["iteration"]] = row["loss/train"]
    return found


def recorded(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: a log of LevelDB's format after 7 bytes of W&B's."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no header fits into the rest of a block
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
