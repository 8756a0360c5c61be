"""Mistakes that the table of test_errors.py cannot hold: those of one rank of several, and of contents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_moe
from megatron_moe.config.schema import Run, flatten
from megatron_moe.data.preprocess import PreprocessOptions, preprocess
from tests.helpers.plain_steps import write_step

ROOT = Path(__file__).resolve().parents[2]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], root: Path) -> str:
    """The message of a refused command line."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert pretrain_moe.main(argv) == 2
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    told = capsys.readouterr()
    assert told.out == ""
    *stages, line = told.err.splitlines()  # what needs whole files read is found when torch is loaded
    assert line.startswith("pretrain_moe.py: error: ") and told.err.count("error:") == 1
    assert all(stage.startswith("pretrain_moe.py: ") and stage.endswith(" ...") for stage in stages)
    assert "Traceback" not in told.err
    return told.err


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"line {n} " * 20}) + "\n" for n in range(40)))
    preprocess(
        PreprocessOptions((str(root / "text.jsonl"),), str(root / "all"), "ByteTokenizer", append_eod=True, workers=1),
        show_progress=False,
    )
    return root


MOCK = ["--preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer"]


@pytest.mark.engine
def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert pretrain_moe.main([*MOCK, "--expert-model-parallel-size", "2"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.engine
def test_a_token_id_at_the_vocabularys_end(capsys, tmp_path, data):
    for suffix in ("bin", "idx"):  # without its sidecar the ids are scanned
        (tmp_path / f"bare.{suffix}").write_bytes((data / f"all_text_document.{suffix}").read_bytes())
    argv = ["--preset", "tiny", "--split", "90,10,0", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
    message = refused([*argv, "--data-path", str(tmp_path / "bare")], capsys, tmp_path)
    assert "256" in message and "bare" in message


@pytest.mark.engine
def test_a_folder_of_another_run_is_continued_or_left_alone(capsys, tmp_path):
    write_step(tmp_path, 5, config=flatten(Run()), state={"iteration": 5, "has_optimizer": True})
    assert f"continue it with --load {tmp_path}" in refused([*MOCK, "--save", str(tmp_path)], capsys, tmp_path)


@pytest.mark.engine
def test_a_dry_run_checks_and_makes_nothing(capsys, tmp_path):
    argv = [*MOCK, "--dry-run", "--save", str(tmp_path / "new"), "--metrics-file", str(tmp_path / "m.jsonl")]
    assert pretrain_moe.main(argv) == 0
    assert "the configuration is sound" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_printed_where_rank_0_is_slow(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, time\nos.environ.get('RANK') == '0' and time.sleep(2)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_moe.py", "--preset", "tiny", "--mock-data", "--train-iters", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and done.stderr.count("pretrain_moe.py: error: --train-iters 0") == 1, done.stderr
