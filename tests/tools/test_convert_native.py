"""Native to native: a step in another cut, its weights alone, the mean of several steps, averages of --ema-decay."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe_tools.convert.cli import main
from tests.helpers.conversions import convert, held, words
from tests.helpers.trained_steps import SMALL, differing, tensors, trained
from tests.hf import imported_cases

HALF = "decoder.layers.1.mlp.experts.weight1"
BIAS = "decoder.layers.1.mlp.router.expert_bias"
FROZEN = "decoder.layers.1.input_layernorm.weight"
MAIN, EMA = "optimizer.state.param.", "optimizer.state.ema."
RUN: dict[str, Any] = {**SMALL, "bf16": True, "use_distributed_optimizer": True, "vocab_size": 257, "lr": 1e-2}
RUN["keep_fp32"] = ("norms",)  # in fp32 a sum of three has other bits than in fp64
TWO_RANKS = {**RUN, "expert_model_parallel_size": 2, "hidden_dropout": 0.1, "freeze": (FROZEN,), "ema_decay": 0.5}


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory):
    """Three steps of a run of two ranks with averages; beside it `other`, a step of another model without them."""
    root = tmp_path_factory.mktemp("averaged")
    gloo.run(2, trained, flags={**TWO_RANKS, "save_interval": 1, "async_save": True, "save": str(root / "run")})
    other = {**RUN, "ffn_hidden_size": 96, "train_iters": 1, "save": str(root / "other")}
    gloo.run(1, trained, flags=other)
    return root / "run"


@pytest.fixture(scope="module")
def mean(run):
    """The step of the run's averages."""
    convert("native", "native", run, run.parent / "mean", "--ema")
    return run.parent / "mean"


def state_of(step: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((step / folder.STATE).read_text())
    return state


@pytest.mark.engine
def test_a_run_goes_on_from_a_step_in_another_cut_as_if_nothing_had_happened(gloo, run, tmp_path):
    convert("native", "native", run, tmp_path / "again", "--ckpt-step", "2")
    step, old = tmp_path / "again" / "iter_0000002", run / "iter_0000002"
    assert manifest.structure_defect(step) is None and differing(tensors(old), tensors(step)) == []
    files = sorted(path.name for path in step.glob("*.distcp"))
    assert files == [f"__0_{number}.distcp" for number in range(6)]  # weights, optimizer: what is no layer, two
    assert [part.shape[0] for part in StepReader(step).index.tensors[HALF].parts] == [1] * 8
    gloo.run(2, trained, flags={**TWO_RANKS, "load": str(tmp_path / "again"), "save": str(tmp_path / "on")})
    one, other = run / "iter_0000003", tmp_path / "on" / "iter_0000003"
    assert differing(tensors(one), tensors(other)) == []
    records = [state_of(path)["records"] for path in (one, other)]
    assert records[0] == records[1] and len(records[0]) == 3


def test_weights_alone_can_be_kept_and_cast(run, tmp_path, capsys):
    line = words("native", "native", run, tmp_path / "cast", "--dtype", "fp32")
    assert main(line) == 2
    assert "add --no-optim to cast the weights" in capsys.readouterr().err
    assert main([*line, "--no-optim"]) == 0
    step = tmp_path / "cast" / "iter_0000003"
    was, now = tensors(run / "iter_0000003"), tensors(step)
    assert now.keys() == {key for key in was if not key.startswith("optimizer.")}
    assert all(value.dtype == torch.float32 and torch.equal(value, was[key].float()) for key, value in now.items())
    config = json.loads((step / folder.CONFIG).read_text())
    assert (config["bf16"], config["fp16"], state_of(step)["has_optimizer"]) == (False, False, False)


@pytest.mark.engine
def test_the_mean_is_that_of_main_weights_in_fp64(run, tmp_path):
    convert(
        "native", "native", run, tmp_path / "mean", "--average-steps", "3", "1", "2"
    )  # of two fp32 has the same bits
    step = tmp_path / "mean" / "iter_0000003"
    assert manifest.structure_defect(step) is None
    found, sources = tensors(step), [tensors(run / f"iter_000000{number}") for number in (1, 2, 3)]
    assert found.keys() == {key for key in sources[0] if not key.startswith("optimizer.")}
    assert MAIN + HALF in sources[0] and found[HALF].dtype == torch.bfloat16 and found[BIAS].dtype == torch.float32
    for key, value in found.items():
        of = MAIN + key if MAIN + key in sources[0] else key
        exact = sum(one[of].double() for one in sources) / 3
        assert value.dtype == sources[0][key].dtype and torch.equal(value, exact.to(value.dtype)), key
    of_rounded = (sum(one[HALF].double() for one in sources) / 3).bfloat16()
    assert not torch.equal(found[HALF], of_rounded) and not torch.equal(found[BIAS], sources[2][BIAS])
    state = state_of(step)
    assert (state["iteration"], state["has_optimizer"], state["average_of_steps"]) == (3, False, [1, 2, 3])


def test_a_damaged_step_is_not_averaged(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    file, there = next((tmp_path / "run" / "iter_0000001").glob("*.distcp")), tmp_path / "mean"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(words("native", "native", tmp_path / "run", there, "--average-steps", "1", "3")) == 2
    assert not there.exists() and f"iter_0000001/{file.name}" in capsys.readouterr().err


def test_the_averages_take_the_place_of_the_weights(run, mean, tmp_path):
    step = mean / "iter_0000003"
    assert manifest.structure_defect(step) is None
    source, found = tensors(run / "iter_0000003"), tensors(step)
    assert found.keys() == {key for key in source if not key.startswith("optimizer.")}
    averaged = [key for key in found if EMA + key in source]
    assert set(found) - set(averaged) == {key for key in found if key.endswith("expert_bias")} | {FROZEN}
    for key, value in found.items():
        wanted = source[EMA + key].to(source[key].dtype) if key in averaged else source[key]
        assert value.dtype == source[key].dtype and torch.equal(value, wanted), key
    assert sum(not torch.equal(found[key], source[key]) for key in averaged) > len(averaged) / 2
    state = state_of(step)
    facts = [state[name] for name in ("iteration", "has_optimizer", "has_average", "averaged")]
    assert facts == [3, False, False, True]
    convert("native", "native", run, tmp_path / "fp32", "--ema", "--dtype", "fp32")
    exact = tensors(tmp_path / "fp32" / "iter_0000003")
    assert all(torch.equal(exact[key], source[EMA + key]) for key in averaged)


def test_an_export_of_the_averages_is_that_of_the_converted_step(run, mean, tmp_path):
    convert("native", "hf", mean, tmp_path / "by way of a step")
    convert("native", "hf", run, tmp_path / "at once", "--ema")
    certificate = convert("native", "hf", run, tmp_path / "weights")
    assert any(key.startswith("optimizer.") for key in certificate["ignored"])
    found, wanted, weights = (held(tmp_path / name) for name in ("at once", "by way of a step", "weights"))
    assert found.keys() == wanted.keys() == weights.keys() and all(found[name].equal(wanted[name]) for name in found)
    assert sum(not found[name].equal(weights[name]) for name in found) > len(found) / 2


def test_averages_are_left_out_for_megatron(gloo, tmp_path, capsys):
    # which knows no layers that are frozen or kept in fp32, and no groups of experts
    groups = {
        "keep_fp32": (),
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_group_score": "top2",
    }
    flags = {**RUN, **groups, "ema_decay": 0.5, "train_iters": 1, "save": str(tmp_path / "run")}
    gloo.run(1, trained, flags=flags)
    convert("native", "megatron", tmp_path / "run", tmp_path / "there", "--expert-model-parallel-size", "1")
    assert "the average of the weights is left out" in capsys.readouterr().err
    assert not [key for key in tensors(tmp_path / "there" / "iter_0000001") if ".ema" in key]


def test_an_average_begins_with_imported_weights(gloo, run, tmp_path):
    convert("native", "hf", run, tmp_path / "hf")
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


def test_what_has_no_average_is_refused(run, tmp_path, capsys):
    there, other, both = tmp_path / "mean", run.parent / "other", tmp_path / "both"
    shutil.copytree(run, both)
    shutil.copytree(other / "iter_0000001", both / "iter_0000009")
    average = "--average-steps"
    for target, load, flags, parts in (
        ("native", run, [average, "1"], ["--average-steps 1: name two steps or more"]),
        ("native", run, [average, "1", "1"], ["each once"]),
        ("native", run, [average, "1", "25"], ["has no step 25; it has 1, 2, 3"]),
        ("native", run / "iter_0000001", [average, "1", "2"], ["has no steps; name the folder that a run saved its"]),
        ("native", both, [average, "1", "9"], ["another model", "linear_fc"]),
        ("native", other, ["--ema"], ["--ema: "]),
        ("hf", other, ["--ema"], ["--ema-decay"]),
    ):
        assert main(words("native", target, load, there, *flags)) == 2 and not there.exists()
        message = capsys.readouterr().err
        assert all(part in message for part in parts), message
