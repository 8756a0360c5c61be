"""From a Hugging Face folder to a trained one: two ways in, restarts with the same command, and out again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint.origin import FOLDER
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, held, unequal
from tests.helpers.launchers import Forked
from tests.hf import imported_cases as cases

TRAINING = [
    "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--eval-iters", "0",
    "--lr", "1e-3", "--moe-router-bias-update-rate", "1e-3",
]  # fmt: skip
EP2 = ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--bf16"]
PP2 = ["--pipeline-model-parallel-size", "2", "--bf16"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A bf16 model with a layer of multi-token prediction and a file that stands for its tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "model"
    tiny_models.make("deepseek-v3", 6, folder, torch.bfloat16)
    tiny_models.add_prediction_layers(folder, 7)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2560, "eos_token": "a"}')
    return folder


def kept(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (step / FOLDER).iterdir()}


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines() if "loss" in json.loads(line)]


def test_a_folder_is_trained_restarted_with_the_same_command_and_exported(gloo, rank_parent, source, tmp_path):
    root, there = tmp_path / "run", tmp_path / "there"
    shutil.copytree(source, there)
    argv = [
        "--load-hf", str(there), "--load", str(root), "--save", str(root), *TRAINING, *EP2, "--train-iters", "2",
        "--exit-interval", "1", "--metrics-file", str(tmp_path / "metrics.jsonl"), "--max-position-embeddings", "4096",
    ]  # fmt: skip
    job = Forked(rank_parent)
    job.start(argv, 2, tmp_path, tmp_path / "log")
    ended, told = job.wait(600), (tmp_path / "log").read_text()
    assert ended == 0, told[-3000:]
    for text in ("holds no checkpoint yet: starting from", "weights from", "every one used", "saved"):
        assert text in told
    shutil.rmtree(there)  # steps hold all that is needed from here on
    gloo.run(2, cases.trained, argv=argv)
    assert len(losses(tmp_path / "metrics.jsonl")) == 2
    for step in ("iter_0000001", "iter_0000002"):
        state = json.loads((root / step / "state.json").read_text())
        assert state["hf"]["family"] == "deepseek-v3" and len(state["hf"]["copies"]) == 2
        files = kept(root / step)
        assert files["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
        assert files["config.json"] == (source / "config.json").read_bytes()

    convert("native", "hf", root, tmp_path / "out")
    before, after = held(source), held(tmp_path / "out")
    assert after.keys() == before.keys()
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    # Two steps change every matrix, but those of experts that no token came to.
    still = [name for name in before if torch.equal(before[name], after[name]) and "norm" not in name]
    assert all(".mlp.experts." in name for name in still) and len(still) < len(before) / 4
    loads_and_generates(tmp_path / "out")
    # The context is that of the run, the rest of both files as it came.
    for file, key in {"config.json": "max_position_embeddings", "tokenizer_config.json": "model_max_length"}.items():
        came, left = (json.loads((folder / file).read_text()) for folder in (source, tmp_path / "out"))
        assert (came[key], left) == (2560, {**came, key: 4096})


def loads_and_generates(folder: Path) -> None:
    import transformers

    model, about = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"] and not about["mismatched_keys"]
    assert all(name.startswith("model.layers.4.") for name in about["unexpected_keys"])  # multi-token prediction
    prompt = torch.arange(5).unsqueeze(0)
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 8)


def test_a_converted_checkpoint_trains_as_the_folder_does_and_keeps_what_it_came_with(gloo, source, tmp_path):
    native = tmp_path / "native"
    convert("hf", "native", source, native)
    ways = {
        "folder": ["--load-hf", str(source), "--save", str(tmp_path / "other")],
        "native": ["--load", str(native), "--save", str(native), "--use-checkpoint-args"],
    }
    seen: dict[str, Any] = {}
    for name, way in ways.items():
        metrics = tmp_path / f"{name}.jsonl"
        gloo.run(2, cases.trained, argv=[*way, *TRAINING, *PP2, "--train-iters", "2", "--metrics-file", str(metrics)])
        seen[name] = losses(metrics)
    assert seen["folder"] == seen["native"] and len(seen["native"]) == 2
    one, other = native / "iter_0000002", tmp_path / "other" / "iter_0000002"
    assert kept(one) == kept(other) and "tokenizer.json" in kept(one)
    states = [json.loads((step / "state.json").read_text()) for step in (one, other)]
    assert states[0]["hf"] == states[1]["hf"]
    # The untouched step is still there, and goes back as it came.
    convert("native", "hf", native, tmp_path / "back", "--ckpt-step", "0")
    assert unequal(held(tmp_path / "back"), held(source)) == []
