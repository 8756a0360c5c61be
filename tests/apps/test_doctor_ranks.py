"""The doctor as a person starts it: exit codes, report, progress; and ranks that die or hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.apps.doctor import cli, examine
from megatron_moe.apps.doctor.compare import rounding_error
from megatron_moe.apps.doctor.default_layouts import model
from megatron_moe.apps.doctor.measure import MeasuringRanks, Request
from megatron_moe.apps.doctor.small_copy import PADDED_VOCABULARY, small_copy
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.io import local_ranks
from megatron_moe.io.local_ranks import RankFailure
from tests.helpers.forked_doctor import ForkedRanks
from tests.helpers.ranks import RankParent

ROOT = Path(__file__).resolve().parents[2]


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "doctor.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_layouts_that_agree_are_told_one_by_one_and_end_in_zero(tmp_path: Path) -> None:
    flags = (
        "--preset tiny --mtp-num-layers 1 --tensor-model-parallel-size 8 --sequence-parallel --num-attention-heads 8"
    )
    done = doctor(*flags.split(), "--layouts", "tp2", "dp2", "--steps", "2", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the layout in use (TP 8), at size 2" in done.stdout
    assert "[1/2] tp2" in done.stdout and "[2/2] dp2" in done.stdout
    assert done.stdout.count("agrees: loss") == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] is False
    assert [layout["agrees"] for layout in report["layouts"]] == [True, True]
    assert report["layouts"][0]["largest_errors"]["loss of multi-token prediction"] < 1e-5
    assert report["layouts"][0]["largest_errors"]["gradient"] < 1e-4
    assert report["shrunk"]["hidden_size"] == [64, 32]
    assert report["oracles"][0]["smallest_margin"] > 0


def test_an_overflow_of_fp16_is_skipped_as_the_oracle_skips_it_and_samples_are_picked_clear(
    rank_parent: RankParent, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(examine, "MeasuringRanks", lambda number, seconds: ForkedRanks(rank_parent, seconds))
    code = cli.main(["--layouts", "dp2-ep2+fp16", "--steps", "3", "--json", str(tmp_path / "report.json")])
    assert code == 0, capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    (layout,), (oracle,) = report["layouts"], report["oracles"]
    assert (oracle["dtype"], layout["agrees"]) == ("float16", True)
    applied, scales = oracle["steps_applied"], [16384, *oracle["loss_scales"]]
    assert applied[0] is False and True in applied
    assert all(after == before / 2 for before, after, good in zip(scales, scales[1:], applied) if not good)
    assert oracle["smallest_margin"] > rounding_error(model("fp16")[1])
    assert {"fp16", "grouped-query attention"} <= set(layout["features"])
    assert 1e-7 < layout["largest_errors"]["gradient"] < layout["tolerances"]["gradient"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--preset", "tiny", "--layouts", "tp3"], "--layouts tp3"),
        (["--preset", "tinny"], "--preset tinny"),
        (["--preset", "tiny", "--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3"),
        (["--preset", "tiny", "--json", "/no/such/folder/report.json"], "--json"),
    ],
)
def test_a_mistake_in_the_flags_ends_in_two(words: list[str], named: str, capsys: Any) -> None:
    assert cli.main(words) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "told"),
    [("os._exit(3)", "rank 1 ended with status 3"), ("__import__('time').sleep(600)", "rank 1 did not end")],
    ids=["dies", "hangs"],
)
def test_a_rank_that_dies_or_hangs_is_named_and_nothing_is_left(
    what: str, told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    shutil.copytree(ROOT / "megatron_moe", tmp_path / "megatron_moe")
    file = tmp_path / "megatron_moe" / "apps" / "doctor" / "measure.py"
    start = "    run, chunks = request.run, []\n"
    assert file.read_text().count(start) == 1
    file.write_text(file.read_text().replace(start, f'{start}    if os.environ["RANK"] == "1":\n        {what}\n'))
    monkeypatch.setattr(local_ranks, "PACKAGE_ROOT", tmp_path)
    asked = Request(small_copy(replace(Run(), **PRESETS["tiny"])), PADDED_VOCABULARY, steps=1)
    with MeasuringRanks(2, seconds=6.0) as measuring:
        measuring.ranks._start()
        pids = [process.process.pid for process in measuring.ranks._processes]
        with pytest.raises(RankFailure) as failure:
            measuring.measure(asked, 2)
        folder = measuring.ranks.folder
    assert told in str(failure.value)
    assert "measure.py" in str(failure.value)  # where the hanging one stands, or what its peer was at
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not folder.exists()
