"""The averages of weights, of --ema-decay, in the place of the weights: in a step, and in a folder of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_moe.apps.convert.cli import main
from megatron_moe.checkpoint import folder, manifest
from tests.helpers import imported_cases
from tests.helpers.trained_steps import differing, tensors, trained

pytestmark = pytest.mark.engine

EMA = "optimizer.state.ema."
BIAS = "decoder.layers.1.mlp.router.expert_bias"
FROZEN = "decoder.layers.1.input_layernorm.weight"
RUN = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "vocab_size": 257,
    "lr": 1e-2,
    "save_interval": 1,
    "async_save": True,
    "freeze": (FROZEN,),
}


@pytest.fixture(scope="module")
def run(gloo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with averages, and one without next to it."""
    root = tmp_path_factory.mktemp("averaged")
    gloo.run(2, trained, flags={**RUN, "ema_decay": 0.5, "save": str(root / "run")})
    gloo.run(1, trained, flags={**RUN, "train_iters": 1, "save": str(root / "without")})
    return root / "run"


def words(target: str, load: Path, save: Path, *more: str) -> list[str]:
    return ["--from", "native", "--to", target, "--load", str(load), "--save", str(save), *more]


def folder_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def test_the_averages_take_the_place_of_the_weights(run: Path, tmp_path: Path) -> None:
    assert main(words("native", run, tmp_path / "mean", "--ema")) == 0
    step = tmp_path / "mean" / "iter_0000003"
    assert manifest.structure_defect(step) is None
    source, found = tensors(run / "iter_0000003"), tensors(step)
    assert found.keys() == {key for key in source if not key.startswith("optimizer.")}
    averaged = [key for key in found if EMA + key in source]
    assert set(found) - set(averaged) == {key for key in found if key.endswith("expert_bias")} | {FROZEN}
    for key, value in found.items():
        wanted = source[EMA + key].to(source[key].dtype) if key in averaged else source[key]
        assert value.dtype == source[key].dtype and torch.equal(value, wanted), key
    assert sum(not torch.equal(found[key], source[key]) for key in averaged) > len(averaged) / 2
    state = json.loads((step / folder.STATE).read_text())
    assert (state["iteration"], state["has_optimizer"], state["has_average"], state["averaged"]) == (
        3,
        False,
        False,
        True,
    )


def test_an_export_of_the_averages_is_that_of_the_converted_step(run: Path, tmp_path: Path) -> None:
    assert main(words("native", run, tmp_path / "mean", "--ema")) == 0
    assert main(words("hf", tmp_path / "mean", tmp_path / "by way of a step")) == 0
    assert main(words("hf", run, tmp_path / "at once", "--ema")) == 0
    assert main(words("hf", run, tmp_path / "weights")) == 0
    found, wanted, weights = (folder_of(tmp_path / name) for name in ("at once", "by way of a step", "weights"))
    assert found.keys() == wanted.keys() == weights.keys() and all(found[name].equal(wanted[name]) for name in found)
    assert sum(not found[name].equal(weights[name]) for name in found) > len(found) / 2


def test_an_export_in_fp32_does_not_round(run: Path, tmp_path: Path) -> None:
    assert main(words("native", run, tmp_path / "mean", "--ema", "--dtype", "fp32")) == 0
    source, found = tensors(run / "iter_0000003"), tensors(tmp_path / "mean" / "iter_0000003")
    for key in (key for key in found if EMA + key in source):
        assert torch.equal(found[key], source[EMA + key]), key


def test_averages_stay_with_the_optimizer_here_and_are_left_out_there(gloo: Any, tmp_path: Path, capsys: Any) -> None:
    known_there = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score": "top2"}
    flags = {**RUN, **known_there, "freeze": None, "ema_decay": 0.5, "train_iters": 1, "save": str(tmp_path / "run")}
    gloo.run(1, trained, flags=flags)
    source = tmp_path / "run" / "iter_0000001"
    assert main(words("native", tmp_path / "run", tmp_path / "whole")) == 0
    assert differing(tensors(tmp_path / "whole" / "iter_0000001"), tensors(source)) == []
    there = tmp_path / "there"
    assert main(words("megatron", tmp_path / "run", there, "--expert-model-parallel-size", "1")) == 0
    assert "the average of the weights is left out" in capsys.readouterr().err
    assert not [key for key in tensors(there / "iter_0000001") if ".ema" in key]


def test_a_run_starts_from_averages(gloo: Any, run: Path, tmp_path: Path) -> None:
    assert main(words("native", run, tmp_path / "mean", "--ema")) == 0
    on = {"finetune": True, "load": str(tmp_path / "mean"), "train_iters": 1, "save": str(tmp_path / "on")}
    (told,) = gloo.run(1, trained, flags={**RUN, "ema_decay": 0.9, **on})
    assert Path(told["checkpoint"]).is_dir()


def test_an_average_begins_with_imported_weights(gloo: Any, run: Path, tmp_path: Path) -> None:
    assert main(words("hf", run, tmp_path / "hf")) == 0
    argv = [
        "--load-hf", str(tmp_path / "hf"), "--save", str(tmp_path / "run"), "--mock-data", "--seq-length", "16",
        "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "1", "--eval-iters", "0",
        "--lr", "1e-30", "--bf16", "--ema-decay", "0.5",
    ]  # fmt: skip
    gloo.run(1, imported_cases.trained, argv=argv)
    step = tensors(tmp_path / "run" / "iter_0000001")
    averaged = [key.removeprefix(EMA) for key in step if key.startswith(EMA)]
    # The rate moves no weight, so that the mean of the first weights and the last ones is either.
    assert len(averaged) > 20 and all(step[EMA + key].equal(step[f"optimizer.state.param.{key}"]) for key in averaged)


def test_what_has_no_average_is_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    there = tmp_path / "mean"
    for line, part in (
        (words("native", run.parent / "without", there, "--ema"), "--ema: "),
        (words("hf", run.parent / "without", there, "--ema"), "--ema-decay"),
        (words("native", run, there, "--ema", "--average-steps", "1", "2"), "--ema"),
        (words("hf", run, there, "--ema", "--verify"), "--verify"),
        (words("megatron", run, there, "--ema"), "--from native --to native"),
    ):
        assert main(line) == 2 and not there.exists()
        assert part in capsys.readouterr().err
