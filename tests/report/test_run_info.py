"""What is kept about a run: its id, attempts and endings, its events, and the page that documents the keys."""

import json
import os
import re
import signal
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.config.schema import Run
from megatron_moe.report.jsonl import events_path, read_events, read_steps
from megatron_moe.report.records import EVENTS
from megatron_moe.report.run_info import info_path
from tests.report.steps import STEP, reporter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def run_of(folder: Path) -> Run:
    return schema.replace(
        Run(), metrics_file=str(folder / "metrics.jsonl"), summary_file=str(folder / "summary.json"), train_iters=6
    )


def report(folder: Path, start: int, last: int, ending: str | None = "finished") -> None:
    """Report the steps after `start`; without an ending, stop as a process does that is killed."""
    running = reporter(run_of(folder), start)
    running.start({"device": "cpu"})
    for iteration in range(start + 1, last + 1):
        running.step(STEP.replace(iteration=iteration))
    if ending is not None:
        running.close({}, ending)


def info(folder: Path) -> dict[str, Any]:
    return json.loads(info_path(folder / "metrics.jsonl").read_text())


def test_the_attempts_of_a_run_share_its_id_and_the_killed_one_has_no_ending(tmp_path: Path) -> None:
    before = datetime.now(timezone.utc)
    report(tmp_path, 0, 4, ending=None)
    first = info(tmp_path)
    report(tmp_path, 2, 3, ending="stopped by SIGTERM")
    report(tmp_path, 3, 5)
    last = info(tmp_path)
    assert last["run_id"] == first["run_id"] and len(last["run_id"]) == 16
    assert [one["attempt"] for one in last["attempts"]] == [1, 2, 3] and last["attempt"] == 3
    assert [one["start_iteration"] for one in last["attempts"]] == [0, 2, 3]
    assert [one.get("ending") for one in last["attempts"]] == [None, "stopped by SIGTERM", "finished"]
    assert [one.get("end_iteration") for one in last["attempts"]] == [None, 3, 5]
    assert last["start_time"] == first["start_time"]
    steps = list(read_steps(tmp_path / "metrics.jsonl"))
    assert [(one.iteration, one.attempt) for one in steps] == [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3)]
    assert {one.run_id for one in steps} == {last["run_id"]}
    times = [datetime.fromisoformat(one.time) for one in steps]
    assert before.replace(microsecond=0) <= times[0] and times == sorted(times)
    assert json.loads((tmp_path / "summary.json").read_text())["attempts"] == last["attempts"]


def test_a_start_from_zero_is_another_run_and_keeps_the_files_of_the_one_before(tmp_path: Path) -> None:
    report(tmp_path, 0, 2)
    first = info(tmp_path)
    report(tmp_path, 0, 1)
    assert info(tmp_path)["run_id"] != first["run_id"] and info(tmp_path)["attempt"] == 1
    assert json.loads((tmp_path / "metrics.run.json.previous").read_text()) == first
    assert {event.run_id for event in read_events(tmp_path / "metrics.jsonl")} == {info(tmp_path)["run_id"]}


def test_events_of_a_killed_attempt_stay(tmp_path: Path) -> None:
    metrics, running = tmp_path / "metrics.jsonl", reporter(run_of(tmp_path))
    for iteration in range(1, 4):
        running.step(STEP.replace(iteration=iteration))
    running.event("fault", "iteration 3: a NaN", path="faults/3")
    with open(events_path(metrics), "a") as torn:
        torn.write('{"time": "20')
    report(tmp_path, 2, 3)
    events = list(read_events(metrics))
    kinds = [(event.attempt, event.kind) for event in events if event.kind != "message"]
    assert kinds == [(1, "start"), (1, "fault"), (2, "start"), (2, "end")]
    fault = next(event for event in events if event.kind == "fault")
    assert (fault.iteration, fault.text, fault.facts) == (3, "iteration 3: a NaN", {"path": "faults/3"})


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (RunFault("iteration 3: a NaN\nmore"), "failed: iteration 3: a NaN"),
        (ValueError("odd"), "failed: ValueError: odd"),
        (KeyboardInterrupt(), "stopped by SIGINT"),
    ],
)
def test_an_attempt_that_an_error_ends_says_so(tmp_path: Path, error: BaseException, ending: str) -> None:
    with pytest.raises(type(error)), reporter(run_of(tmp_path)) as running:
        running.step(STEP.replace(iteration=1))
        raise error
    assert info(tmp_path)["attempts"][-1]["ending"] == ending
    events = list(read_events(tmp_path / "metrics.jsonl"))
    assert events[-1].kind == "end" and events[-1].text == ending
    assert ("fault" in {event.kind for event in events}) == isinstance(error, Exception)


def test_last_words_are_kept_where_the_process_ends_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        running = reporter(schema.replace(run_of(tmp_path), report_file=str(tmp_path / "report.html")))
        running.start({"device": "cpu"})
        running.step(STEP.replace(iteration=1))
        running.on_abort("failed: rank 1 is gone", "rank 1 is gone")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert info(tmp_path)["attempts"][-1]["ending"] == "failed: rank 1 is gone"
    assert [event.kind for event in read_events(tmp_path / "metrics.jsonl")][-2:] == ["fault", "end"]
    (data,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)
    (run,) = json.loads(data)["runs"]
    assert run["status"]["state"] == "failed" and run["steps"] == 1


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    report(tmp_path, 0, 2)
    info_path(tmp_path / "metrics.jsonl").write_text("[]")
    with pytest.raises(ConfigError, match="--metrics-file"):
        report(tmp_path, 2, 3)
    assert info_path(tmp_path / "metrics.jsonl").read_text() == "[]"


def test_what_the_run_is_has_the_documented_keys_and_the_page_has_every_kind_of_event(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    keys, keys_of_an_attempt = (
        re.findall(r"^\| (\w+) \|", table.partition("\n\n")[0], re.MULTILINE)
        for table in page.split("| key | type | meaning |\n|---|---|---|\n")[1:]
    )
    report(tmp_path, 0, 1)
    found = info(tmp_path)
    assert list(found) == keys and list(found["attempts"][0]) == keys_of_an_attempt
    assert found["flags"]["metrics_file"] == str(tmp_path / "metrics.jsonl") and found["ranks"] == 1
    assert set(keys) < set(json.loads((tmp_path / "summary.json").read_text()))
    assert [kind for kind in EVENTS if f"| {kind} |" not in page] == []
