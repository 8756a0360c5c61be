"""A checkpoint that was made to run code runs none: loaded for its weights, resumed, or inspected."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.apps.inspect.cli import main as inspect
from tests.checkpoint.payloads import CARRIES_NO_CODE, NOT_READ_BY_LOAD, PAYLOADS, plant, read_without_protection
from tests.helpers.trained_steps import trained

SMALL = {"num_layers": 1, "moe_layer_freq": "[1]", "seq_length": 16, "max_position_embeddings": 16, "train_iters": 1}


def outcome(flags: dict[str, Any]) -> str:
    """What came of a run: "loaded", or its error."""
    try:
        trained(flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.fixture(scope="module")
def sound(gloo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one step of one rank."""
    root = tmp_path_factory.mktemp("sound")
    gloo.run(1, trained, flags={**SMALL, "save": str(root)})
    return root


@pytest.fixture
def harmful(sound: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    """A payload's name, the folder that holds it, and the file that it makes where it runs."""
    root, sentinel = tmp_path / "checkpoints", tmp_path / "sentinel"
    shutil.copytree(sound, root)
    plant(request.param, root / "iter_0000001", sentinel)
    return request.param, root, sentinel


every_payload = pytest.mark.parametrize("harmful", PAYLOADS, indirect=True)


@every_payload
@pytest.mark.parametrize("mode", ["load", "resume"])
def test_nothing_runs_when_a_run_reads_it(gloo, harmful, mode):
    name, root, sentinel = harmful
    more = {"finetune": True} if mode == "load" else {"train_iters": 2}
    (result,) = gloo.run(1, outcome, flags={**SMALL, "load": str(root), **more})
    assert not sentinel.exists()
    if mode == "load" and name in NOT_READ_BY_LOAD:
        assert result == "loaded"
    else:
        assert result.startswith("ConfigError") and ("refused" in result or "is damaged" in result), result


def outcome_of_a_swap(flags: dict[str, Any]) -> str:
    """What came of a run whose step was exchanged right after the check, which saw another."""
    from megatron_moe.checkpoint import dist

    check, dist.check_trusted = dist.check_trusted, lambda folder: None
    try:
        return outcome(flags)
    finally:
        dist.check_trusted = check


@pytest.mark.parametrize("harmful", ["common.pt", ".metadata", "tensor in a .distcp file"], indirect=True)
def test_nothing_runs_either_when_the_files_are_exchanged_behind_the_check(gloo, harmful):
    _, root, sentinel = harmful
    (result,) = gloo.run(1, outcome_of_a_swap, flags={**SMALL, "load": str(root), "train_iters": 2})
    assert not sentinel.exists() and result != "loaded"


@every_payload
def test_nothing_runs_when_it_is_inspected(harmful, capsys):
    _, root, sentinel = harmful
    for argv in (["list"], ["config"], ["verify"], ["stats"], ["stats", "--no-verify"], ["diff", str(root)]):
        inspect([*argv, str(root)])
    assert not sentinel.exists()


@pytest.mark.parametrize("harmful", sorted(set(PAYLOADS) - CARRIES_NO_CODE), indirect=True)
def test_the_payloads_do_run_where_files_are_trusted(harmful):
    _, root, sentinel = harmful
    read_without_protection(root / "iter_0000001")
    assert sentinel.exists()


def test_without_a_payload_the_step_loads(gloo, sound):
    assert gloo.run(1, outcome, flags={**SMALL, "load": str(sound), "train_iters": 2}) == ["loaded"]
    assert gloo.run(1, outcome, flags={**SMALL, "load": str(sound), "finetune": True}) == ["loaded"]
