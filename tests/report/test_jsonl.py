"""metrics.jsonl stays one line a step over kills and resumes; summary.json is whole or not there."""

import dataclasses
import json
import os

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.report.jsonl import JsonlSink, evaluations_path, read_evaluations, read_steps, require_metrics
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.run_info import RunInfo, SummarySink, Totals
from tests.report.steps import STEP


def write(path, start, stop, *, loss=3.0):
    """Steps start+1..stop of one incarnation, an evaluation after every second one; killed, so never closed."""
    sink = JsonlSink(path, start)
    for iteration in range(start + 1, stop + 1):
        sink.step(STEP.replace(iteration=iteration, loss=loss))
        if iteration % 2 == 0:
            sink.evaluation(EvalRecord(iteration, "valid", loss, 10, 0.1))
    return sink


def iterations(path):
    return [record.iteration for record in read_steps(path)]


def test_a_resume_takes_back_the_lines_of_the_abandoned_incarnation(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, 10, loss=3.0)
    sink = write(path, 6, 8, loss=2.0)
    assert sink.cut_lines == 4 + 2  # four steps and two evaluations
    assert iterations(path) == list(range(1, 9))
    assert [record.loss for record in read_steps(path)] == [3.0] * 6 + [2.0] * 2
    assert [record.iteration for record in read_evaluations(path)] == [2, 4, 6, 8]


def test_a_resume_copies_nothing_and_a_bad_file_of_evaluations_leaves_the_steps_as_they_were(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, 6)
    before, inode = path.read_bytes(), path.stat().st_ino
    JsonlSink(path, 4).close(None)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:4])
    assert write(path, 4, 6).cut_lines == 0
    assert path.read_bytes() == before and path.stat().st_ino == inode
    evaluations_path(path).write_text("nonsense\n")
    with pytest.raises(ConfigError):
        JsonlSink(path, 2)
    assert path.read_bytes() == before


def test_a_line_that_a_kill_tore_apart_is_taken_back_and_a_fresh_run_keeps_the_file_of_the_one_before(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, 4)
    with open(path, "a") as file:
        file.write('{"iteration": 5, "lo')
    assert iterations(path) == [1, 2, 3, 4]
    write(path, 4, 6)
    assert iterations(path) == [1, 2, 3, 4, 5, 6]
    write(path, 0, 2)
    assert iterations(path) == [1, 2] and iterations(tmp_path / "m.jsonl.previous") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("content", ["# Notes\n", "[1, 2]\n", '{"step": 1}\n', '{"iteration": "3"}\n'])
@pytest.mark.parametrize("start", [0, 3])
def test_a_file_that_holds_no_metrics_is_refused_and_left_as_it_was(tmp_path, content, start):
    path = tmp_path / "README.md"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"README\.md: line 1"):
        JsonlSink(path, start)
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["README.md"]


@pytest.mark.parametrize("name", ["m.jsonl", "m.eval.jsonl", "m.events.jsonl", "m.run.json"])
def test_a_bad_neighbour_is_refused_before_the_ranks_meet(tmp_path, name):
    write(tmp_path / "m.jsonl", 0, 2)
    require_metrics(tmp_path / "m.jsonl")
    (tmp_path / name).write_text("nonsense\n")
    with pytest.raises(ConfigError, match="--metrics-file"):
        require_metrics(tmp_path / "m.jsonl")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"--metrics-file.*{name} is no file"):
        require_metrics(tmp_path / "m.jsonl")


def test_an_evaluation_that_is_made_again_after_a_kill_is_one_line(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, 4, loss=2.0)
    last = EvalRecord(4, "valid", 2.0, 10, 0.1)
    for loss in (2.0, 2.0, 3.0):  # the last: more of the data was evaluated
        sink = JsonlSink(path, 4)
        sink.evaluation(dataclasses.replace(last, loss=loss, seconds=loss))
        sink.close(None)
    assert [record.loss for record in read_evaluations(path) if record.iteration == 4] == [2.0, 3.0]


def test_what_earlier_attempts_trained_is_added_up_whoever_wrote_their_lines(tmp_path):
    """Lines as this version writes them, as an older one did, and as a program writes JSON that has edited them."""
    path = tmp_path / "m.jsonl"
    write(path, 0, 6)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The steps' own counts, and counts within them that a quick look must not take for those.
    lines[3] = {"tokens_per_expert": {"tokens": 7}, "nested": [{"iteration": 1, "tokens": 5, "seconds": 9}], **lines[3]}
    older = {name: lines[1][name] for name in ("iteration", "loss", "tokens", "seconds")}
    edited = [json.dumps(line, separators=(",", ":")) for line in lines[2:4]]
    path.write_text("\n".join([json.dumps(lines[0]), json.dumps(older), *edited, *map(json.dumps, lines[4:])]) + "\n")
    totals = JsonlSink(path, 5).totals
    assert (totals.iterations, totals.tokens) == (5, 5 * STEP.tokens)
    assert totals.seconds == pytest.approx(5 * STEP.seconds)


def test_steps_after_an_iteration_are_read_without_those_before(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write(path, 0, 5)
    everything, parsed = list(read_steps(path)), []
    right = json.loads
    monkeypatch.setattr(json, "loads", lambda raw: parsed.append(raw) or right(raw))
    assert list(read_steps(path, 3)) == everything[3:]
    assert len(parsed) == 2


def test_a_file_whose_lines_are_out_of_order_is_cut_between_lines(tmp_path):
    """As when two files were joined by hand: what comes after the first later line goes, and is reported."""
    path = tmp_path / "m.jsonl"
    write(path, 0, 9)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[8].replace("0.5", "0.51234"), *lines[2:5]]))
    sink = JsonlSink(path, 5)
    sink.close(None)
    assert path.read_text() == "".join(lines[:2])
    assert (sink.missing, sink.totals.tokens) == (3, 2 * STEP.tokens)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[: line.index('"tokens_per_expert"') + 22] + line,  # torn, and the next one appended to it
        lambda line: line.replace('"seconds": 0.5', '"seconds": 0.5.5'),
    ],
)
def test_a_damaged_line_among_the_others_is_named(tmp_path, spoil):
    path = tmp_path / "m.jsonl"
    write(path, 0, 4)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = spoil(lines[1])
    path.write_text("".join(lines))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 2 "):
        JsonlSink(path, 3)
    assert path.read_bytes() == before


def test_the_summary_tells_all_incarnations_and_the_run_has_the_last_word(tmp_path):
    totals = Totals()
    totals.add(STEP.iteration, STEP.tokens, STEP.seconds)
    sink = SummarySink(tmp_path / "summary.json", totals, RunInfo(Run(), 0))
    sink.step(STEP.replace(iteration=2, seconds=1.5))
    sink.close({"valid_loss": 2.5, "train_seconds": 9.0, "perplexity": float("inf")})
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {"iterations": 2, "tokens_per_second": 1000.0, "train_seconds": 9.0, "valid_loss": 2.5}
    assert summary.items() >= {**expected, "perplexity": None}.items()
    assert "torch" in summary["versions"] and "python" in summary["versions"]


def test_lines_are_on_the_disk_before_a_step_is_published_and_missing_ones_are_counted(tmp_path, monkeypatch):
    sink, synced = write(tmp_path / "m.jsonl", 0, 4), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sink.flush()
    assert synced == [str(tmp_path / "m.jsonl"), str(tmp_path / "m.eval.jsonl")]
    found = [JsonlSink(tmp_path / name, start).missing for name, start in (("m.jsonl", 4), ("m.jsonl", 7), ("o", 7))]
    assert found == [0, 3, 7]
