"""Converted checkpoints among the rest: the engine loads them, runs go on from them, transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_moe.apps.convert.cli import main
from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint.step_reader import StepReader
from tests.helpers import imported_cases, tiny_models
from tests.helpers.trained_steps import differing, tensors, trained

pytestmark = pytest.mark.engine

TRAINING = [
    "--use-checkpoint-args", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2",
    "--train-iters", "1", "--eval-iters", "0", "--lr", "1e-30", "--moe-router-bias-update-rate", "0",
    "--moe-expert-backend", "loop", "--expert-tensor-parallel-size", "1",
]  # fmt: skip


def convert(origin: str, target: str, load: Path | str, save: Path, *flags: str) -> None:
    assert main(["--from", origin, "--to", target, "--load", str(load), "--save", str(save), *flags]) == 0


def test_the_engine_loads_a_converted_checkpoint_at_any_layout_and_what_it_trains_is_exported(gloo, tmp_path):
    hf, native, run = tmp_path / "hf", tmp_path / "native", tmp_path / "run"
    tiny_models.make("deepseek-v3", 1, hf, torch.bfloat16)
    convert("hf", "native", hf, native)
    layout = ["--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    argv = ["--load", str(native), "--save", str(run), *TRAINING, *layout, "--bf16", "--use-distributed-optimizer"]
    gloo.run(2, imported_cases.trained, argv=argv)
    before, after = tensors(native / "iter_0000000"), tensors(run / "iter_0000001")
    weights = {key: value for key, value in after.items() if not key.startswith("optimizer.")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):  # padded for TP 2
        assert weights[key].shape[0] == 256
        weights[key], before[key] = weights[key][:131], before[key][:131]
    assert differing(before, weights) == []
    convert("native", "hf", run, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    reference = transformers.AutoModelForCausalLM.from_pretrained(hf)
    prompt = torch.tensor([[3, 5, 7]])
    made = model.generate(prompt, min_new_tokens=4, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 7)
    assert torch.equal(made, reference.generate(prompt, min_new_tokens=4, max_new_tokens=4, do_sample=False))


def test_a_model_trained_here_from_scratch_is_loaded_by_transformers(gloo, tmp_path):
    import transformers

    flags = {"save": str(tmp_path / "run"), "train_iters": 1}  # the vocabulary is the tokenizer's, padded to 320
    gloo.run(1, trained, flags=flags)
    convert("native", "hf", tmp_path / "run", tmp_path / "hf")
    model, found = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 257
    assert model.generate(torch.tensor([[1, 2]]), min_new_tokens=2, max_new_tokens=2, do_sample=False).shape == (1, 4)
    step = tensors(tmp_path / "run" / "iter_0000001")
    assert len(step["output_layer.weight"]) == 320
    assert torch.equal(model.lm_head.weight, step["output_layer.weight"][:257])
    certificate = json.loads((tmp_path / "hf" / "conversion_certificate.json").read_text())
    assert any(key.startswith("optimizer.") for key in certificate["ignored"])


# ---- native to native


def test_a_run_goes_on_from_a_step_in_another_cut_as_if_nothing_had_happened(gloo, tmp_path):
    layout = {"bf16": True, "use_distributed_optimizer": True, "expert_model_parallel_size": 2, "hidden_dropout": 0.1}
    first = gloo.run(2, trained, flags={**layout, "train_iters": 2, "save": str(tmp_path / "first")})
    convert("native", "native", tmp_path / "first", tmp_path / "again")
    step, old = tmp_path / "again" / "iter_0000002", Path(first[0]["checkpoint"])
    assert manifest.structure_defect(step) is None and differing(tensors(old), tensors(step)) == []
    files = sorted(path.name for path in step.glob("*.distcp"))
    assert files == sorted(f"__0_{number}.distcp" for number in range(10))  # weights, optimizer: what is no layer, four
    parts = StepReader(step).index.tensors["decoder.layers.1.mlp.experts.weight1"].parts
    assert [part.shape[0] for part in parts] == [1] * 8
    for source, target in (("first", "a"), ("again", "b")):
        flags = {**layout, "train_iters": 4, "load": str(tmp_path / source), "save": str(tmp_path / target)}
        gloo.run(2, trained, flags=flags)
    one, other = (tmp_path / name / "iter_0000004" for name in ("a", "b"))
    assert differing(tensors(one), tensors(other)) == []
    records = [json.loads((path / folder.STATE).read_text())["records"] for path in (one, other)]
    assert records[0] == records[1] and len(records[0]) == 4


def test_weights_alone_can_be_kept_and_cast(gloo, tmp_path, capsys):
    saved = gloo.run(1, trained, flags={"bf16": True, "train_iters": 1, "save": str(tmp_path / "run")})[0]["checkpoint"]
    line = ["--from", "native", "--to", "native", "--load", saved, "--save", str(tmp_path / "cast"), "--dtype", "fp32"]
    assert main(line) == 2
    assert "add --no-optim to cast the weights" in capsys.readouterr().err
    assert main([*line, "--no-optim"]) == 0
    step = tmp_path / "cast" / "iter_0000001"
    was, now = tensors(saved), tensors(step)
    assert now.keys() == {key for key in was if not key.startswith("optimizer.")}
    assert all(value.dtype == torch.float32 and torch.equal(value, was[key].float()) for key, value in now.items())
    config, state = (json.loads((step / name).read_text()) for name in (folder.CONFIG, folder.STATE))
    assert (config["bf16"], config["fp16"], state["has_optimizer"]) == (False, False, False)
    flags = {"load": str(tmp_path / "cast"), "no_load_optim": True, "train_iters": 2, "save": str(tmp_path / "on")}
    gloo.run(1, trained, flags=flags)
