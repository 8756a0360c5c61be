"""The doctor on layouts that agree: its exit codes, report and progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.apps.doctor import cli, examine, measure
from megatron_moe.apps.doctor.compare import rounding_error
from megatron_moe.apps.doctor.default_layouts import model
from tests.helpers.forked_doctor import ForkedRanks
from tests.helpers.ranks import RankParent


@pytest.fixture(autouse=True)
def forked(rank_parent: RankParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's ranks are forked."""
    monkeypatch.setattr(measure, "LocalRanks", lambda *_, seconds, **__: ForkedRanks(rank_parent, seconds, tmp_path))


def test_layouts_that_agree_are_told_one_by_one_and_end_in_zero(tmp_path: Path, capsys: Any) -> None:
    model = "--preset tiny --mtp-num-layers 1 --num-attention-heads 8"
    flags = f"{model} --tensor-model-parallel-size 8 --sequence-parallel --layouts tp2 dp2 --steps 2 --json"
    code, out = cli.main([*flags.split(), str(tmp_path / "report.json")]), capsys.readouterr().out
    assert code == 0, out
    assert "the layout in use (TP 8), at size 2" in out
    assert "[1/2] tp2" in out and "[2/2] dp2" in out
    assert out.count("agrees: loss") == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] is False
    assert [layout["agrees"] for layout in report["layouts"]] == [True, True]
    assert report["layouts"][0]["largest_errors"]["loss of multi-token prediction"] < 1e-5
    assert report["layouts"][0]["largest_errors"]["gradient"] < 1e-4
    assert report["shrunk"]["hidden_size"] == [64, 32]
    assert report["oracles"][0]["smallest_margin"] > 0


def test_an_overflow_of_fp16_is_skipped_as_the_oracle_skips_it_and_samples_are_picked_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(examine, "_CANDIDATES", 128)
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
