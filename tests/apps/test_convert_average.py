"""The mean of several steps: in fp64, of main weights, with everything else as in the newest of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.apps.convert.cli import main
from megatron_moe.checkpoint import folder, manifest
from tests.helpers.trained_steps import tensors, trained

pytestmark = pytest.mark.engine

HALF = "decoder.layers.1.mlp.experts.weight1"
BIAS = "decoder.layers.1.mlp.router.expert_bias"
MAIN = "optimizer.state.param."


@pytest.fixture(scope="module")
def run(gloo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a run in bf16."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    gloo.run(1, trained, flags={"bf16": True, "train_iters": 3, "lr": 1e-2, "save": str(folder), "save_interval": 1})
    return folder


def words(load: Path, save: Path, *more: str) -> list[str]:
    return ["--from", "native", "--to", "native", "--load", str(load), "--save", str(save), *more]


def test_the_mean_is_that_of_main_weights_in_fp64(run: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "mean", "--average-steps", "3", "1")) == 0
    step = tmp_path / "mean" / "iter_0000003"
    assert manifest.structure_defect(step) is None
    found, sources = tensors(step), [tensors(run / f"iter_000000{number}") for number in (1, 3)]
    assert found.keys() == {key for key in sources[0] if not key.startswith("optimizer.")}
    assert MAIN + HALF in sources[0] and found[HALF].dtype == torch.bfloat16 and found[BIAS].dtype == torch.float32
    for key, value in found.items():
        of = MAIN + key if MAIN + key in sources[0] else key
        mean = sum(one[of].double() for one in sources) / 2
        assert value.dtype == sources[0][key].dtype and torch.equal(value, mean.to(value.dtype)), key
    of_rounded = (sum(one[HALF].double() for one in sources) / 2).bfloat16()
    assert not torch.equal(found[HALF], of_rounded) and not torch.equal(found[BIAS], sources[1][BIAS])
    state = json.loads((step / folder.STATE).read_text())
    assert (state["iteration"], state["has_optimizer"], state["average_of_steps"]) == (3, False, [1, 3])


def refused(capsys: pytest.CaptureFixture[str], line: list[str], target: Path) -> str:
    assert main(line) == 2
    assert not target.exists()
    return capsys.readouterr().err


def test_what_cannot_be_averaged_is_refused(gloo: Any, run: Path, tmp_path: Path, capsys: Any) -> None:
    there = tmp_path / "mean"
    for numbers, part in (
        (["1"], "--average-steps 1: name two steps or more"),
        (["1", "1"], "each once"),
        (["1", "25"], "has no step 25; it has 1, 2, 3"),
    ):
        assert part in refused(capsys, words(run, there, "--average-steps", *numbers), there)
    one = words(run / "iter_0000001", there, "--average-steps", "1", "2")
    assert "has no steps; name the folder that a run saved its steps in" in refused(capsys, one, there)
    step = ["--average-steps", "1", "2", "--ckpt-step", "2"]
    assert "the place of --ckpt-step" in refused(capsys, words(run, there, *step), there)
    export = ["--from", "native", "--to", "hf", "--load", str(run), "--save", str(there), "--average-steps", "1", "2"]
    assert "--average-steps 1 2: is for --from native --to native" in refused(capsys, export, there)
    gloo.run(1, trained, flags={"bf16": True, "train_iters": 1, "ffn_hidden_size": 96, "save": str(tmp_path / "other")})
    shutil.copytree(run, tmp_path / "both")
    shutil.copytree(tmp_path / "other" / "iter_0000001", tmp_path / "both" / "iter_0000009")
    message = refused(capsys, words(tmp_path / "both", there, "--average-steps", "1", "9"), there)
    assert "another model" in message and "linear_fc" in message


def test_a_damaged_step_is_not_averaged(run: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = next((tmp_path / "run" / "iter_0000001").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    line, there = words(tmp_path / "run", tmp_path / "mean", "--average-steps", "1", "3"), tmp_path / "mean"
    assert main(line) == 2 and not there.exists()
    assert f"iter_0000001/{file.name}" in capsys.readouterr().err


def test_a_run_starts_from_averaged_weights(gloo: Any, run: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "mean", "--average-steps", "1", "2", "3")) == 0
    on = {
        "bf16": True,
        "finetune": True,
        "load": str(tmp_path / "mean"),
        "train_iters": 1,
        "save": str(tmp_path / "on"),
    }
    (told,) = gloo.run(1, trained, flags=on)
    assert Path(told["checkpoint"]).is_dir()
