"""`make gpu DRY=1`: every stage on a pretended device, and what a stage that fails, hangs or crashes does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import report, stages, wheels
from tests.gpu.stage import STATUSES, Stage
from tests.helpers.ranks import ROOT, rank_environment

PLANTED = """
import sys
from tests.gpu import {module}
{code}
from tests.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def dry_run(out: Path, *flags: str, module: str = "stages", code: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run the stages dry after this code; return the exit status, what was printed, and report.json."""
    program = PLANTED.format(module=module, code=code)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "--dry", "--out", str(out), *flags],
        cwd=ROOT,
        env={**rank_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    path = out / "report.json"
    return ran.returncode, ran.stdout + ran.stderr, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
def test_a_dry_run_of_all_stages_is_green_and_says_what_it_does_not_show(tmp_path):
    status, said, found = dry_run(tmp_path)
    assert status == 0, said
    assert found["dry"] and found["schema"] == report.SCHEMA and "torch" in found["versions"]
    assert [one["number"] for one in found["stages"]] == list(range(1, 11))
    for stage in found["stages"]:
        assert stage["status"] in STATUSES and stage["checks"] and stage["unseen"] and not stage["cut"]
        assert all({"name", "status", "figures", "bound", "reason"} == check.keys() for check in stage["checks"])
        assert all(check["reason"] for check in stage["checks"] if check["status"] == "not possible here")
    # A stage that found nothing to check would be green too.
    passed = {one["number"]: sum(c["status"] == "pass" for c in one["checks"]) for one in found["stages"]}
    assert passed[9] >= 4 and passed[3] > 40 and passed[2] > 15 and passed[6] >= 6
    assert all(number >= 1 for number in passed.values()), passed
    page = (tmp_path / "report.html").read_text()
    assert "What this dry run does not show" in page and "http" not in page.replace("https:", "http:")
    assert page.count("<details") == 10


WRONG_SWIGLU = """
import megatron_moe
from megatron_moe.moe import experts
right = experts.weighted_swiglu
experts.weighted_swiglu = lambda gate_up, probs: right(gate_up, probs * 1.02)
"""


def test_a_wrong_operator_fails_its_stage_and_the_run(tmp_path):
    status, said, found = dry_run(tmp_path, "--only", "3", module="operators", code=WRONG_SWIGLU)
    assert status == 1 and found["stages"][0]["status"] == "fail", said
    failed = {check["name"] for check in found["stages"][0]["checks"] if check["status"] == "fail"}
    assert failed == {f"weighted SwiGLU, {dtype}" for dtype in ("fp32", "bf16", "fp16")}


STAGES_THAT_BREAK = """
import os, time
from tests.gpu import stages, runner
plans = [stages.Plan(n, name, 5, "machine:" + name, "all") for n, name in enumerate(("dies", "hangs", "ends"), 1)]
stages.STAGES = tuple(plans)
runner.DRY_SECONDS = 2
def dies(stage): stage.figure("before"); os._exit(9)
def hangs(stage): stage.doing("the long part"); time.sleep(60)
def ends(stage): stage.figure("done", value=1.0)
machine.dies, machine.hangs, machine.ends = dies, hangs, ends
"""


GRADIENT_OF_NAN = """
import benchmarks.problem as problem
right = problem.relative_error
asked = []
def last_is_nan(result, truth):
    asked.append(result)
    return float("nan") if len(asked) % 3 == 0 else right(result, truth)
problem.relative_error = last_is_nan
"""


def test_a_gradient_of_nan_behind_right_ones_fails_its_stage(tmp_path):
    status, said, found = dry_run(tmp_path, "--only", "4", module="layouts", code=GRADIENT_OF_NAN)
    failed = {check["name"] for check in found["stages"][0]["checks"] if check["status"] == "fail"}
    assert status == 1 and {name.partition(",")[0] for name in failed} == {"MoE layer"} and len(failed) == 2, said


def test_a_stage_that_dies_or_hangs_is_failed_and_the_next_one_runs(tmp_path):
    began = time.monotonic()
    status, said, found = dry_run(tmp_path, module="machine", code=STAGES_THAT_BREAK)
    dies, hangs, ends = found["stages"]
    assert status == 1 and time.monotonic() - began < 60, said
    assert [one["status"] for one in (dies, hangs, ends)] == ["fail", "fail", "pass"]
    assert dies["checks"][0]["name"] == "before" and "status 9" in dies["checks"][-1]["reason"]
    assert hangs["cut"] and "the long part" in hangs["checks"][-1]["reason"]


def test_a_stage_that_is_not_there_is_refused(tmp_path):
    status, said, found = dry_run(tmp_path, "--only", "3,11")
    assert status == 2 and "--only 3,11" in said and not found


@pytest.mark.engine
def test_nan_is_not_within_a_bound(tmp_path):
    stage = Stage(tmp_path / "notes", tmp_path, True, 1.0)
    stage.within("nan", float("nan"), 1.0)
    (line,) = (tmp_path / "notes").read_text().splitlines()
    assert json.loads(line)["status"] == "fail" and json.loads(line)["figures"]["measured"] == "nan"


@pytest.mark.engine
def test_the_stages_take_less_than_ten_minutes_together():
    assert sum(plan.seconds for plan in stages.STAGES) < 600


@pytest.mark.engine
def test_the_wheels_are_those_that_are_tested_and_never_torch():
    for python in wheels.PYTHONS:
        pinned = wheels.pinned(python)
        assert pinned.keys() <= wheels.NEEDED.keys() and "torch" not in wheels.NEEDED
        assert pinned["megatron-core"] == ("0.16.1" if python in ("3.10", "3.11") else "0.19.2")
    assert wheels.missing() == []


def test_what_is_missing_and_has_no_wheel_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(wheels.NEEDED, "not-there-at-all", "not_there_at_all")
    with pytest.raises(SystemExit, match=r"not-there-at-all.*gpu-wheels"):
        wheels.place(tmp_path / "site", tmp_path / "wheels")


@pytest.mark.engine
@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "nonzero", "__bool__"])
def test_a_read_by_the_host_is_seen_in_a_dry_run(read):
    import torch

    from tests.gpu.speed import _no_reading

    with pytest.raises(RuntimeError, match=read), _no_reading():
        getattr(torch.ones(1), read)()
