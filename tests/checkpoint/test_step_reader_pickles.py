"""A checkpoint that was made to run code runs none: loaded for its weights, resumed, or inspected."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_moe_tools.inspect import main as inspect
from tests.checkpoint.payloads import NOT_READ_BY_LOAD, PAYLOADS, plant, read_without_protection
from tests.helpers.rows import rows
from tests.helpers.trained_steps import SMALL, trained

ONE_LAYER = {**SMALL, "num_layers": 1, "moe_layer_freq": "[1]", "train_iters": 1}


def outcome(flags: dict[str, Any]) -> str:
    """What came of a run: "loaded", or its error."""
    try:
        trained({**ONE_LAYER, **flags})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.fixture(scope="module")
def sound(gloo: Any, folder: Path) -> Path:
    """A folder with one step of one rank, which loads."""
    root = str(folder / "sound")
    gloo.run(1, trained, flags={**ONE_LAYER, "save": root})
    assert gloo.run(1, outcome, flags={"load": root, "train_iters": 2}) == ["loaded"]
    return Path(root)


@pytest.fixture
def harmful(sound: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    """A payload's name, the folder that holds it, and the file that it makes where it runs."""
    root, sentinel = tmp_path / "checkpoints", tmp_path / "sentinel"
    shutil.copytree(sound, root)
    plant(request.param, root / "iter_0000001", sentinel)
    return request.param, root, sentinel


@pytest.mark.parametrize("harmful", PAYLOADS, indirect=True)
def test_nothing_runs_when_a_run_or_a_tool_reads_it(gloo, harmful):
    _, root, sentinel = harmful
    for argv in (["list"], ["config"], ["verify"], ["stats"], ["stats", "--no-verify"], ["diff", str(root)]):
        inspect([*argv, str(root)])
    (result,) = gloo.run(1, outcome, flags={"load": str(root), "train_iters": 2})
    assert not sentinel.exists()
    assert result.startswith("ConfigError") and ("refused" in result or "is damaged" in result), result
    read_without_protection(root / "iter_0000001")
    assert sentinel.exists(), "the payload is none"


@pytest.mark.parametrize(
    "harmful", rows(PAYLOADS, test=["common.pt", ".metadata", *sorted(NOT_READ_BY_LOAD)]), indirect=True
)
def test_nothing_runs_when_it_is_read_for_its_weights(gloo, harmful):
    name, root, sentinel = harmful
    (result,) = gloo.run(1, outcome, flags={"load": str(root), "finetune": True})
    assert not sentinel.exists()
    assert (result == "loaded") == (name in NOT_READ_BY_LOAD), result
