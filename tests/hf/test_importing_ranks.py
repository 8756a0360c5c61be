"""A Hugging Face folder into a model: dtypes, what is lost and told, what is refused, and by all ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.config.schema import build
from megatron_moe.hf.config import plan_import
from tests.config.refused import refused
from tests.helpers import tiny_models
from tests.helpers.conversions import unequal
from tests.helpers.rows import rows
from tests.hf import imported_cases as cases
from tests.hf.test_mapping_ranks import assembled, by_hf_name

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("importing")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        tiny_models.make("deepseek-v3", 4, root / name, dtype)
    shutil.copytree(root / "fp32", root / "with predictions")
    tiny_models.add_prediction_layers(root / "with predictions", 5)
    return {name: root / name for name in (*dtypes, "with predictions")}


def changed(folder: Path, to: Path, **tensors: torch.Tensor | None) -> str:
    """A copy of a folder with other tensors; None takes one away. `__` stands for a dot."""
    shutil.copytree(folder, to)
    held = {**load_file(folder / "model.safetensors"), **{key.replace("__", "."): v for key, v in tensors.items()}}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def weights(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Our key -> this rank's part, of rank 0."""
    return {key: part[1] for key, part in ranks[0]["tensors"].items()}


ROUTER = "decoder.layers.1.mlp.router.weight"
BIAS = "model__layers__1__mlp__gate__e_score_correction_bias"
GATE = "model__layers__1__mlp__gate__weight"


@pytest.mark.engine
def test_a_narrower_run_rounds_and_says_so_and_the_routers_bias_keeps_every_bit(gloo, folders):
    flags = {**TP2, **SHARDED, "bf16": True, "moe_expert_backend": "loop"}
    (step,) = zip(*gloo.run(2, cases.imported, folders=[str(folders["fp32"])], layout=flags))
    held = load_file(folders["fp32"] / "model.safetensors")
    matrices = sum("correction_bias" not in name for name in held)
    (warning,) = step[0]["warnings"]
    assert f"PRECISION WARNING: {matrices} tensors of {folders['fp32']} of float32 were rounded to bfloat16" in warning
    assert f"of which {matrices} were changed" in warning and warning in step[0]["notes"]
    assert torch.equal(weights(step)[ROUTER], held["model.layers.1.mlp.gate.weight"].bfloat16())
    for layer in (1, 2, 3):
        bias = step[0]["biases"][f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert bias.dtype == torch.float32
        assert torch.equal(bias, held[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
    assert all(rank["masters_follow"] for rank in step)


def test_what_stays_in_fp32_keeps_every_digit(gloo, folders):
    flags = {"expert_model_parallel_size": 2, **SHARDED, "bf16": True, "keep_fp32": ("router",)}
    (step,) = zip(*gloo.run(2, cases.imported, folders=[str(folders["fp32"])], layout=flags))
    held = load_file(folders["fp32"] / "model.safetensors")
    assert torch.equal(weights(step)[ROUTER], held["model.layers.1.mlp.gate.weight"])
    assert all(rank["masters_follow"] for rank in step)


def test_a_wider_run_takes_the_numbers_as_they_are(gloo, folders):
    (step,) = zip(*gloo.run(2, cases.imported, folders=[str(folders["bf16"])], layout=PP2))
    held = load_file(folders["bf16"] / "model.safetensors")
    assert step[0]["warnings"] == []
    assert any(" of bfloat16 are in a wider dtype here, exactly" in note for note in step[0]["notes"])
    assert torch.equal(weights(step)[ROUTER], held["model.layers.1.mlp.gate.weight"].float())


def test_weights_in_fp8_are_rounded_into_a_half_run_and_not_into_fp32(gloo, folders, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    values = load_file(folders["bf16"] / "model.safetensors")[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.12345678]])
    key = name.replace(".", "__")
    folder = Path(changed(folders["bf16"], tmp_path / "m", **{key: values, f"{key}_scale_inv": scale}))
    said = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": fp8}))
    for flags, dtype in (({}, torch.float32), ({"bf16": True}, torch.bfloat16)):
        (step,) = zip(*gloo.run(2, cases.imported, folders=[str(folder)], layout={**PP2, **flags}))
        assert step[0]["warnings"] == []
        assert torch.equal(weights(step)["decoder.layers.0.mlp.linear_fc2.weight"], (values.float() * scale).to(dtype))


def test_weights_of_the_runs_dtype_are_not_touched_and_a_bias_that_was_rounded_is_told(gloo, folders, tmp_path):
    held = load_file(folders["bf16"] / "model.safetensors")
    rounded = changed(folders["bf16"], tmp_path / "m", **{BIAS: held[BIAS.replace("__", ".")].bfloat16()})
    steps = gloo.run(2, cases.imported, folders=[str(folders["bf16"]), rounded], layout={**PP2, "bf16": True})
    assert [rank[0]["warnings"] for rank in steps] == [[], []]
    for rank in steps:
        (warning,) = rank[1]["warnings"]
        assert BIAS.replace("__", ".") in warning and "bfloat16: rounded before it was saved" in warning
    bias = steps[0][1]["biases"]["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32 and torch.equal(bias, held[BIAS.replace("__", ".")].bfloat16().float())


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows([TP2, PP2], test=[PP2]))
def test_layers_of_multi_token_prediction_come_and_go_back(gloo, folders, layout):
    folder = folders["with predictions"]
    (step,) = zip(*gloo.run(2, cases.imported, folders=[str(folder)], layout=layout))
    native = assembled(list(step), "tensors")
    for rank in step:
        native.update(rank["biases"])
    back, saved = by_hf_name(str(folder), layout, native), load_file(folder / "model.safetensors")
    copies = {name for name in saved if name.endswith(("4.embed_tokens.weight", "4.shared_head.head.weight"))}
    assert len(copies) == 2
    assert unequal(back, {name: value for name, value in saved.items() if name not in copies}) == []


def test_a_copy_that_is_another_table_is_refused(gloo, folders, tmp_path):
    name, source = "model.layers.4.shared_head.head.weight", folders["with predictions"]
    other = load_file(source / "model.safetensors")[name] + 1
    folder = changed(source, tmp_path / "other", **{name.replace(".", "__"): other})
    for mistake, says in ((None, "differs from lm_head.weight"), ("skips the copies", "was not used")):
        messages = gloo.run(2, cases.refused, folder=folder, layout=PP2, mistake=mistake)
        assert len(set(messages)) == 1 and f"{name} {says}" in messages[0]


@pytest.mark.parametrize(
    ("mistake", "on", "says"),
    [
        ("cannot read", 1, ["Input/output error"]),
        ("has a bug", 1, ["KeyError"]),
        ("leaves one out", 0, ["embedding.word_embeddings.weight was not filled"]),
        ("leaves a bias out", 0, ["decoder.layers.1.mlp.router.expert_bias was not filled"]),
        ("forgets a box", None, [f"{ROUTER} was not filled", f"the ranks have 0 elements of {ROUTER}, which has 1024"]),
        ("writes one twice", None, ["would be written twice"]),
    ],
)
def test_what_goes_wrong_on_one_rank_is_told_by_all(gloo, folders, mistake, on, says):
    messages = gloo.run(2, cases.refused, folder=str(folders["fp32"]), layout=TP2, mistake=mistake, on=on)
    assert messages[0] == messages[1] and all(text in messages[0] for text in says)


def test_a_folder_that_does_not_hold_the_model_is_refused_before_anything_is_built(folders, tmp_path):
    folder = changed(folders["fp32"], tmp_path / "m", **{GATE: None})
    run = build(cases.flags_of(folder, {}))
    refused(lambda: plan_import(run), f"--load-hf {folder}", "missing: model.layers.1.mlp.gate.weight", lines=2)
    fused = {"model__layers__1__mlp__experts__gate_up_proj": torch.ones(16, 32, 64)}
    run = build(cases.flags_of(changed(folders["fp32"], tmp_path / "fused", **fused), {}))
    refused(lambda: plan_import(run), "layers.1.mlp.experts.gate_up_proj holds", "save_original_format=True")


@pytest.mark.parametrize(
    ("value", "flags", "says"),
    [
        (torch.nan, {}, ["mlp.gate.weight", "NaN or infinite"]),
        (1e5, {"fp16": True}, ["mlp.gate.weight contains 1e+05", "torch.float16", "--bf16"]),
    ],
    ids=["NaN", "too large for fp16"],
)
def test_a_number_that_cannot_be_trained_is_refused_by_its_tensors_name(gloo, folders, tmp_path, value, flags, says):
    folder = changed(folders["fp32"], tmp_path / "m", **{GATE: torch.full((16, 64), value)})
    messages = gloo.run(2, cases.refused, folder=folder, layout={**PP2, **flags})
    assert messages[0] == messages[1]
    for text in says:
        assert text in messages[0]


def test_the_state_that_steps_keep_names_the_family_and_the_copies(folders, tmp_path):
    frequencies = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    held = changed(folders["with predictions"], tmp_path / "other", **frequencies)
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    source = plan_import(build(cases.flags_of(held, {})))
    assert source.state == {
        "family": "deepseek-v3",
        "copies": ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"],
        "dropped": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        "carried": [],
    }
    origin, notes = source.origin()
    assert notes == [] and set(origin.files) == {"config.json", "generation_config.json", "tokenizer.json"}
    assert json.loads(origin.files["config.json"])["model_type"] == "deepseek_v3"


def test_a_folders_settings_of_training_are_named_beside_the_runs(folders, tmp_path):
    folder = Path(shutil.copytree(folders["fp32"], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    said = {"aux_loss_alpha": 0.001, "seq_aux": True, "router_jitter_noise": 0.0, "attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    (note,) = plan_import(build(cases.flags_of(str(folder), {}))).notes
    assert "aux_loss_alpha 0.001, seq_aux True, attention_dropout 0.1" in note and "jitter" not in note
    used = "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.0 --attention-dropout 0.0"
    assert note.endswith(f"this run has {used}")
    assert plan_import(build(cases.flags_of(str(folders["fp32"]), {}))).notes == []
