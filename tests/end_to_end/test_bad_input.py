"""Each mistake gets one message that names it, exit status 2, and no file is made or changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_moe
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, flatten, replace
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
    assert told.err.startswith("pretrain_moe.py: error: ") and told.err.count("error:") == 1
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


@pytest.mark.claim("Bad input ends with one message and exit status 2, and leaves files as they were.")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--preset", "tiny", "--moe-router-top"], ["--moe-router-top"]),
        ([*MOCK, "--num-experts", "8", "--moe-router-topk", "9"], ["--moe-router-topk 9", "8"]),
        ([*MOCK, "--keep-last-k", "2"], ["--keep-last-k 2", "--save"]),
        ([*MOCK, "--bf16", "--fp16"], ["--bf16", "--fp16"]),
        (["--preset", "tiny", "--mock-data"], ["--vocab-size"]),
        ([*MOCK, "--rampup-batch-size", "2", "3", "100"], ["--rampup-batch-size 2 3 100"]),
        ([*MOCK, "--padded-vocab-size", "100"], ["--padded-vocab-size 100"]),  # fewer rows than bytes
    ],
)
def test_flags_that_do_not_go_together(argv, words, capsys, tmp_path):
    message = refused(argv, capsys, tmp_path)
    for word in words:
        assert word in message


def test_a_world_that_the_layout_does_not_divide(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    message = refused([*MOCK, "--expert-model-parallel-size", "2"], capsys, tmp_path)
    assert "3" in message and "--expert-model-parallel-size 2" in message


@pytest.mark.claim("Bad input ends with one message and exit status 2, and leaves files as they were.")
def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert pretrain_moe.main([*MOCK, "--expert-model-parallel-size", "2"]) == 2
    assert capsys.readouterr() == ("", "")


def test_data_that_is_missing_empty_or_of_another_tokenizer(capsys, tmp_path, data):
    tiny = ["--preset", "tiny", "--split", "90,10,0"]
    prefix = str(data / "all_text_document")
    argv = [*tiny, "--tokenizer-type", "ByteTokenizer", "--data-path", "nowhere"]
    assert "nowhere" in refused(argv, capsys, tmp_path)
    for suffix in ("bin", "idx"):
        (tmp_path / f"empty.{suffix}").touch()
    argv = [*tiny, "--tokenizer-type", "ByteTokenizer", "--data-path", str(tmp_path / "empty")]
    assert "empty" in refused(argv, capsys, tmp_path)
    argv = [*tiny, "--tokenizer-type", "NullTokenizer", "--vocab-size", "300", "--data-path", prefix]
    assert "ByteTokenizer" in refused(argv, capsys, data)


def test_a_token_id_at_the_vocabularys_end(capsys, tmp_path, data):
    for suffix in ("bin", "idx"):  # without its sidecar the ids are scanned
        (tmp_path / f"bare.{suffix}").write_bytes((data / f"all_text_document.{suffix}").read_bytes())
    argv = ["--preset", "tiny", "--split", "90,10,0", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
    message = refused([*argv, "--data-path", str(tmp_path / "bare")], capsys, tmp_path)
    assert "256" in message and "bare" in message


def saved(root: Path, run: Run) -> None:
    write_step(root, 5, config=flatten(run), state={"iteration": 5, "has_optimizer": True})


@pytest.mark.claim("Bad input ends with one message and exit status 2, and leaves files as they were.")
def test_folders_that_are_no_checkpoints_or_belong_to_another_run(capsys, tmp_path):
    other, used = tmp_path / "other", tmp_path / "used"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    saved(used, replace(Run(), **{**PRESETS["tiny"], "hidden_size": 512}))
    assert "is not a checkpoint folder" in refused([*MOCK, "--load", str(other)], capsys, tmp_path)
    assert "--exit-on-missing-checkpoint" in refused(
        [*MOCK, "--load", str(tmp_path / "none"), "--exit-on-missing-checkpoint"], capsys, tmp_path
    )
    assert "--hidden-size: checkpoint 512, this run 64" in refused([*MOCK, "--load", str(used)], capsys, tmp_path)
    assert f"continue it with --load {used}" in refused([*MOCK, "--save", str(used)], capsys, tmp_path)
    assert "complete steps: 5" in refused([*MOCK, "--load", str(used), "--ckpt-step", "6"], capsys, tmp_path)


@pytest.mark.claim("Bad input ends with one message and exit status 2, and leaves files as they were.")
def test_a_dry_run_checks_and_makes_nothing(capsys, tmp_path):
    argv = [*MOCK, "--dry-run", "--save", str(tmp_path / "new"), "--metrics-file", str(tmp_path / "m.jsonl")]
    assert pretrain_moe.main(argv) == 0
    assert "the configuration is sound" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.claim("A mistake is printed once, also where rank 0 finds it later than the others.")
def test_a_mistake_is_printed_where_rank_0_is_slow(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, time\nos.environ.get('RANK') == '0' and time.sleep(2)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_moe.py", "--preset", "tiny", "--mock-data", "--train-iters", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and done.stderr.count("pretrain_moe.py: error: --train-iters 0") == 1, done.stderr
