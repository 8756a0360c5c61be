"""`make gpu DRY=1`: every stage on a pretended device, and what a stage that fails, hangs or crashes does."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import runner, stages, wheels
from tests.gpu.stage import STATUSES, Stage
from tests.helpers.ranks import ROOT, Child, RankParent, rank_environment


def run_stages(argv: list[str]) -> int:
    """Run the stages with these flags, after the function of this file that the first one names."""
    change, *flags = argv
    globals()[change]()
    from tests.gpu.__main__ import main

    return main(["--dry", *flags])


def leave_the_smallest() -> None:
    """Let stages 3 to 6 do only so much that each of their functions runs."""
    from tests.gpu import layouts, operators, training

    @contextlib.contextmanager
    def this_process(_ranks: int, _seconds: float) -> Iterator[Any]:
        yield SimpleNamespace(measure=lambda request, _ranks: [layouts.measure(request)])

    operators.DTYPES = (torch.bfloat16,)
    layouts.MeasuringRanks = this_process
    few = "--global-batch-size 2 --num-layers 2 --moe-layer-freq [0]+[1]*1"
    training.FLAGS = training.FLAGS.replace("--global-batch-size 8", few)
    training.PRECISIONS = {name: training.PRECISIONS[name] for name in ("bf16", "bf16, activations on the host")}
    layouts.LAYOUTS = {"EP2": layouts.LAYOUTS["EP2"]}
    layouts.LEFT_OUT_DRY = ()


def plant_errors() -> None:
    """Leave of stages 3 and 4 an activation that is wrong, and a layer with a gradient of NaN behind right ones."""
    from megatron_moe.moe import experts
    from tests.gpu import layouts, operators

    swiglu, error, asked = experts.weighted_swiglu, layouts.relative_error, list[Any]()

    def last_is_nan(result: Any, truth: Any) -> float:
        asked.append(result)
        return float("nan") if len(asked) % 3 == 0 else error(result, truth)

    def activation_alone(stage: Stage) -> None:
        experts.weighted_swiglu = lambda gate_up, probs: swiglu(gate_up, probs * 1.02)
        for dtype in operators.DTYPES:
            operators.activation(stage, dtype, 1)

    def layer_alone(stage: Stage) -> None:
        layouts.relative_error = last_is_nan
        for dtype in (torch.float32, torch.bfloat16):
            layouts._layer(stage, dtype, 1e-2)

    operators.operators, layouts.on_device = activation_alone, layer_alone


def plan_stages_that_break() -> None:
    from tests.gpu import machine

    def dies(stage: Stage) -> None:
        stage.figure("before")
        os._exit(9)

    def hangs(stage: Stage) -> None:
        stage.doing("the long part")
        time.sleep(600)

    def ends(stage: Stage) -> None:
        stage.figure("done", value=1.0)

    stages.STAGES = tuple(
        stages.Plan(number, function.__name__, 5, f"machine:{function.__name__}", "all")
        for number, function in enumerate((dies, hangs, ends), 1)
    )
    for function in (dies, hangs, ends):
        setattr(machine, function.__name__, function)
    runner.DRY_SECONDS = 15


@pytest.fixture(scope="module")
def cuda() -> Iterator[RankParent]:
    parent = RankParent(("-m", "tests.helpers.cuda_on_cpu", str(ROOT / "tests" / "helpers" / "ranks.py")))
    yield parent
    parent.close()


def dry_run(parent: RankParent, out: Path, change: str, *flags: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the stages after a change; return the exit status, what was printed, and the stages of report.json."""
    log = out / "log"
    child = Child("tests.gpu.test_stages:run_stages", [change, "--out", str(out), *flags], str(log))
    (status,) = parent.statuses(parent.fork([child]), 600.0)
    assert status is not None, log.read_text()
    return status, log.read_text(), json.loads((out / "report.json").read_text())["stages"]


def assert_complete(found: list[dict[str, Any]]) -> None:
    """Every stage found something to check, and says what a dry run does not show."""
    for stage in found:
        assert stage["status"] in STATUSES and stage["checks"] and stage["unseen"] and not stage["cut"]
        assert all({"name", "status", "figures", "bound", "reason"} == check.keys() for check in stage["checks"])
        assert all(check["reason"] for check in stage["checks"] if check["status"] == "not possible here")
        # Transformer Engine is on no CPU: tests/platform/test_hardware_te.py runs its stage over a stub.
        assert stage["number"] == 9 or any(check["status"] == "pass" for check in stage["checks"]), stage["name"]


def test_a_dry_run_of_the_smallest_stages_is_green_and_says_what_it_does_not_show(cuda, tmp_path):
    status, said, found = dry_run(cuda, tmp_path, "leave_the_smallest")
    assert status == 0, said
    assert_complete(found)
    whole = json.loads((tmp_path / "report.json").read_text())
    assert whole["dry"] and whole["schema"] == runner.SCHEMA and "torch" in whole["versions"]


@pytest.mark.test_all(
    instead="tests/gpu/test_stages.py::test_a_dry_run_of_the_smallest_stages_is_green_and_says_what_it_does_not_show"
)
def test_make_gpu_dry_is_green(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu", "--dry", "--out", str(tmp_path)],
        cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert [one["number"] for one in found] == list(range(1, 11))
    assert_complete(found)
    passed = {one["number"]: sum(check["status"] == "pass" for check in one["checks"]) for one in found}
    assert passed[3] > 40 and passed[2] > 15 and passed[6] >= 6


def test_a_wrong_operator_and_a_gradient_of_nan_fail_their_stages_and_the_run(cuda, tmp_path):
    status, said, found = dry_run(cuda, tmp_path, "plant_errors", "--only", "3,4")
    assert status == 1 and [stage["status"] for stage in found] == ["fail", "fail"], said
    operators, layers = ([c for c in stage["checks"] if c["status"] == "fail"] for stage in found)
    assert {check["name"] for check in operators} == {f"weighted SwiGLU, {dtype}" for dtype in ("fp32", "bf16", "fp16")}
    measured = [(check["name"].partition(",")[0], check["figures"]["measured"]) for check in layers]
    assert measured == [("MoE layer", "nan")] * 2


def test_a_stage_that_dies_or_hangs_is_failed_and_the_next_one_runs(cuda, tmp_path):
    status, said, (dies, hangs, ends) = dry_run(cuda, tmp_path, "plan_stages_that_break")
    assert status == 1 and [one["status"] for one in (dies, hangs, ends)] == ["fail", "fail", "pass"], said
    assert dies["checks"][0]["name"] == "before" and "status 9" in dies["checks"][-1]["reason"]
    assert hangs["cut"] and "the long part" in hangs["checks"][-1]["reason"]


def test_the_stages_take_less_than_ten_minutes_together_and_one_that_is_not_there_is_refused(capsys):
    assert sum(plan.seconds for plan in stages.STAGES) < 600
    from tests.gpu.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(["--dry", "--only", "3,11"])
    assert "--only 3,11" in capsys.readouterr().err


@pytest.mark.engine
def test_the_wheels_are_those_that_are_tested_and_never_torch():
    for python in wheels.PYTHONS:
        pinned = wheels.pinned(python)
        assert pinned.keys() <= set(wheels.NEEDED) and "torch" not in wheels.NEEDED
        assert pinned["megatron-core"] == ("0.16.1" if python in ("3.10", "3.11") else "0.19.2")
    assert wheels.missing() == []


def test_what_is_missing_and_has_no_wheel_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "NEEDED", [*wheels.NEEDED, "not-there-at-all"])
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command: asked.append(command) or SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"not-there-at-all.*gpu-wheels"):
        wheels.place(tmp_path / "site", tmp_path / "wheels")
    assert asked[0][-1] == "not-there-at-all" and "--no-index" in asked[0]
