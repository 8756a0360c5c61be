"""Files of Megatron-LM's: names by the engine's source, harmful and damaged ones, models that are not here."""

import argparse
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_moe.checkpoint.folder import find_step
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build
from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.megatron_lm import dialect
from tests.checkpoint.payloads import Bomb
from tests.helpers.conversions import unequal, words
from tests.helpers.trained_steps import tensors

ARGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4,
    "group_query_attention": False, "num_query_groups": 1, "seq_length": 8, "max_position_embeddings": 8,
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "normalization": "RMSNorm",
    "norm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True, "vocab_size": 15, "padded_vocab_size": 16, "num_experts": 2,
    "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 8, "moe_router_topk": 1, "moe_router_pre_softmax": True,
    "moe_router_score_function": "softmax", "moe_router_dtype": None, "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1, "consumed_train_samples": 12,
    "transformer_impl": "transformer_engine",
}  # fmt: skip
"""Arguments as a checkpoint keeps them."""
BLOCK = {"self_attention.linear_qkv.layer_norm_weight": (8,), "self_attention.linear_qkv.weight": (24, 8),
         "self_attention.linear_proj.weight": (8, 8)}  # fmt: skip
DENSE = {"mlp.linear_fc1.layer_norm_weight": (8,), "mlp.linear_fc1.weight": (32, 8), "mlp.linear_fc2.weight": (8, 16)}
EXPERTS = {"pre_mlp_layernorm.weight": (8,), "mlp.router.weight": (2, 8),
           "mlp.experts.experts.linear_fc1.weight": (2, 16, 8),
           "mlp.experts.experts.linear_fc2.weight": (2, 8, 8)}  # fmt: skip
KEYS: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (16, 8),
    **{f"decoder.layers.0.{key}": shape for key, shape in (BLOCK | DENSE).items()},
    **{f"decoder.layers.1.{key}": shape for key, shape in (BLOCK | EXPERTS).items()},
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (16, 8),
}
"""Keys of the engine's model in `torch_dist` with Transformer Engine's layers, and their shapes."""

Capture = pytest.CaptureFixture[str]


def values_of(keys: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in keys.items()}


def save(root: Path, state: dict[str, Any], args: dict[str, Any] | None = None, **common: Any) -> Path:
    """Write a step in the form of `torch_dist` with torch alone; the folder of its checkpoints."""
    step = root / "iter_0000003"
    extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1": [None]}
    dcp.save({**state, **extra}, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    (step / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    plain = {"args": argparse.Namespace(**(ARGS | (args or {}))), "checkpoint_version": 3.0, "iteration": 3, **common}
    torch.save(plain, step / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def convert(load: Path, save_to: Path, *flags: str) -> int:
    return main(words("megatron", "native", load, save_to, *flags))


def exported(ours: Path, target: Path, *flags: str) -> int:
    return main(words("native", "megatron", ours, target, *flags))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return save(tmp_path / "theirs", values_of(KEYS))


def refused(load: Path, capsys: Capture, *flags: str) -> str:
    """The message of a conversion that is refused; nothing is left of it."""
    target = load.parent / "ours"
    capsys.readouterr()
    assert convert(load, target, *flags) == 2
    assert not target.exists() and not list(target.parent.glob(".*.converting"))
    return capsys.readouterr().err


# ---- names


def test_keys_of_transformer_engines_layers_are_ours_and_back(theirs: Path) -> None:
    values, target = values_of(KEYS), theirs.parent / "ours"
    assert convert(theirs, target) == 0
    step = tensors(target / "iter_0000000")
    norm, expert = step["decoder.layers.0.pre_mlp_layernorm.weight"], step["decoder.layers.1.mlp.experts.weight1"]
    assert torch.equal(norm, values["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"])
    assert torch.equal(expert.flatten(1, 2), values["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"])
    back = theirs.parent / "back"
    assert exported(target, back) == 0
    found = tensors(back / "release")
    assert unequal(found, values) == []
    about = json.loads((back / "conversion_certificate.json").read_text())
    about["output"]["files"]["release/.metadata"]["sha256"] = "of another file"
    (back / "conversion_certificate.json").write_text(json.dumps(about))
    assert convert(back, theirs.parent / "again") == 2


def test_defaults_that_stand_in_for_missing_arguments_are_said() -> None:
    latent = {"multi_latent_attention": True, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "qk_layernorm": True}
    widths = {"kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4, "beta_fast": 32}
    scales = {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    (note,) = (one for one in dialect.run_of(ARGS | latent | widths | scales, {}, 16, "x")[1] if "DEFAULTS" in one)
    assert note.startswith("x: its arguments do not have --original-max-position-embeddings 4096: ")
    assert not [one for one in dialect.run_of(ARGS, {}, 16, "x")[1] if "DEFAULTS" in one]


# ---- the optimizer, there and back


SETTINGS = {"lr": 3e-4, "min_lr": 3e-5, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-7}


def with_optimizer(root: Path, settings: dict[str, Any] = SETTINGS, main_weights: str = "fp32_param") -> Path:
    """A bf16 step with main weights, moments and five updates, in the form of an optimizer that is not distributed."""
    state: dict[str, Any] = values_of(KEYS)
    for number, kind in enumerate((main_weights, "exp_avg", "exp_avg_sq")):
        state |= {f"optimizer.state.{kind}.{key}": torch.randn(shape) + number for key, shape in KEYS.items()}
    return save(root, state, settings, optimizer={"optimizer": {"param_groups": [{"step": 5}]}})


@pytest.mark.parametrize(("main_weights", "ranks"), [("fp32_param", 1), ("param", 2)])
def test_an_optimizer_of_bf16_goes_both_ways_to_the_bit(tmp_path: Path, main_weights: str, ranks: int) -> None:
    """Main weights named as the engine's optimizer for half precision does, and as its distributed one."""
    theirs = with_optimizer(tmp_path / "theirs", main_weights=main_weights)
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert convert(theirs, ours) == 0
    there, step = tensors(theirs / "iter_0000003"), ours / "iter_0000003"
    for kind, named in (("param", main_weights), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        mine = tensors(step)[f"optimizer.state.{kind}.decoder.layers.1.mlp.experts.weight2"]
        key = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
        assert torch.equal(mine, there[f"optimizer.state.{named}.{key}"])
    common = torch.load(step / "common.pt", weights_only=True)
    groups = [group for part in common["optimizer"].values() for group in part["optimizer"]["param_groups"]]
    assert [group["step"] for group in groups] == [5] * 3
    about = json.loads((step / "state.json").read_text())
    assert (about["iteration"], about["consumed_samples"], about["scheduler"]["num_steps"]) == (3, 12, 3)

    assert exported(ours, back, "--expert-model-parallel-size", str(ranks)) == 0
    wanted = {key.replace("fp32_param", "param"): value for key, value in there.items()}
    assert unequal(tensors(back / "iter_0000003"), wanted) == []
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "3"
    common = torch.load(back / "iter_0000003" / "common.pt", weights_only=False)
    assert (common["iteration"], common["args"].consumed_train_samples, common["args"].no_save_optim) == (3, 12, False)
    parts = [common["optimizer"]] if ranks == 1 else [common["optimizer"][number] for number in (0, 1)]
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    assert {part["param_state_sharding_type"] for part in parts} == {"fully_reshardable"}
    assert {(group["step"], group["betas"], group["eps"]) for group in groups} == {(5, (0.9, 0.95), 1e-7)}
    assert {group["is_expert_parallel"] for group in groups} == ({False} if ranks == 1 else {False, True})


def test_an_optimizer_that_cannot_be_exported_is_refused(tmp_path: Path, capsys: Capture) -> None:
    def said(ours: Path, *flags: str) -> str:
        capsys.readouterr()
        assert exported(ours, tmp_path / "back", *flags) == 2 and not (tmp_path / "back").exists()
        return capsys.readouterr().err

    ranks = ("--expert-model-parallel-size", "2")
    assert convert(with_optimizer(tmp_path / "theirs"), tmp_path / "ours") == 0
    assert "--expert-model-parallel-size N, or add --no-optim" in said(tmp_path / "ours")
    assert "--expert-model-parallel-size 0: must be at least 1" in said(tmp_path / "ours", *ranks[:1], "0")
    assert "weights alone fit any number" in said(tmp_path / "ours", *ranks, "--no-optim")
    assert "--dtype: the optimizer's main weights" in said(tmp_path / "ours", *ranks, "--dtype", "fp32")
    without = {**SETTINGS, "adam_beta2": None, "adam_eps": None}
    assert convert(with_optimizer(tmp_path / "fewer theirs", without), tmp_path / "fewer") == 0
    assert "config.json has no adam_beta2 and no adam_eps" in said(tmp_path / "fewer", *ranks)
    assert exported(tmp_path / "fewer", tmp_path / "back", "--no-optim") == 0


LATENT = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.expert_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.linear_fc1.weight",
}


@pytest.mark.parametrize("prefix", ["decoder.layers.7.", "mtp.layers.0.transformer_layer."])
def test_names_of_latent_attention_and_of_predictions_go_both_ways(prefix: str) -> None:
    for there, here in LATENT.items():
        assert dialect.ours(prefix + there).key == prefix + here
        assert dialect.theirs(prefix + here, transformer_engine=True, latent=True, moe=True) == prefix + there
    newer = prefix.replace("transformer_layer", "mtp_model_layer")
    assert dialect.ours(f"{newer}mlp.linear_fc1.weight").key == f"{prefix}mlp.linear_fc1.weight"
    assert dialect.ours("mtp.layers.0.eh_proj.weight").key == "mtp.layers.0.eh_proj.weight"
    assert dialect.ours("optimizer.state.fp32_param.decoder.layers.self_attention.linear_proj.weight") == dialect.Name(
        "decoder.layers.{}.self_attention.linear_proj.weight", stacked=True, state="param"
    )


def test_experts_gates_and_layers_with_names_of_their_own_are_put_together(theirs: Path) -> None:
    """As `singleton_local_shards` writes them, and in an order of its own."""
    values, target = values_of(KEYS), theirs.parent / "ours"
    split: dict[str, Tensor] = {}
    for key, value in values.items():
        experts = {key.replace("experts.experts.", f"experts.experts.{e}."): value[e] for e in range(2)}
        for name, one in (experts if ".experts.experts." in key else {key: value}).items():
            halves = zip("wv", one.chunk(2)) if name.endswith("linear_fc1.weight") else ()
            split |= {f"{name}_{letter}": half.clone() for letter, half in halves} or {name: one.clone()}
    assert len(split) > len(values)
    other = save(theirs.parent / "split", dict(sorted(split.items(), reverse=True)))
    assert convert(theirs, target) == 0 and convert(other, theirs.parent / "again") == 0
    first, second = (tensors(root / "iter_0000000") for root in (target, theirs.parent / "again"))
    assert unequal(first, second) == []


# ---- settings


def test_flags_go_before_the_arguments_of_a_checkpoint(theirs: Path, capsys: Capture) -> None:
    assert "--lr" in refused(theirs, capsys, "--lr", "1")
    assert convert(theirs, theirs.parent / "ours", "--vocab-size", "13", "--norm-epsilon", "1e-6") == 0
    config = json.loads((theirs.parent / "ours/iter_0000000/config.json").read_text())
    assert (config["vocab_size"], config["norm_epsilon"], config["padded_vocab_size"]) == (13, 1e-6, 16)
    assert config["bf16"] and config["moe_layer_freq"] == "[0,1]" and config["moe_router_pre_softmax"]


OTHER_MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "LayerNorm": ({"normalization": "LayerNorm"}, ["--normalization LayerNorm"]),
    "biases": ({"add_bias_linear": True}, ["--add-bias-linear"]),
    "learned positions": ({"position_embedding_type": "learned_absolute"}, ["--position-embedding-type"]),
    "an activation": ({"swiglu": False}, ["swiglu"]),
    "two at once": ({"squared_relu": True, "window_size": (4, 0)}, ["--squared-relu", "--window-size"]),
    "weights around zero": ({"apply_layernorm_1p": True}, ["--apply-layernorm-1p"]),
    "a router": ({"moe_router_score_function": "sqrtsoftplus"}, ["--moe-router-score-function", "sqrtsoftplus"]),
    "more layers": ({"num_layers": 3, "moe_layer_freq": [0, 1, 1]}, ["missing", "decoder.layers.2."]),
    "other experts": ({"num_experts": 4}, ["mlp.experts.experts.linear_fc1.weight", "[4,"]),
    "too many tokens": ({"vocab_size": 17}, ["--vocab-size 17", "16 rows"]),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_model_that_is_not_here_is_refused_by_its_flag(case: str, tmp_path: Path, capsys: Capture) -> None:
    args, parts = OTHER_MODELS[case]
    message = refused(save(tmp_path / "theirs", values_of(KEYS), args), capsys)
    assert all(part in message for part in parts), message


# ---- the optimizer


def test_an_optimizer_that_is_not_converted_has_to_be_left_out_by_a_flag(tmp_path: Path, capsys: Capture) -> None:
    buckets = {
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).param": torch.zeros(8),
        "optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1": [8],
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(1, 1, 128),  # flattened, as older releases have it
    }
    theirs = save(tmp_path / "theirs", values_of(KEYS) | buckets)
    assert "--no-optim" in refused(theirs, capsys)
    assert convert(theirs, tmp_path / "ours", "--no-optim") == 0
    certificate = json.loads((tmp_path / "ours/conversion_certificate.json").read_text())
    assert set(buckets) <= certificate["dropped"].keys()


# ---- harm and damage


@pytest.mark.parametrize("where", ["common.pt", "legacy"])
def test_code_in_a_checkpoint_is_refused_and_does_not_run(where: str, theirs: Path, capsys: Capture) -> None:
    sentinel = theirs.parent / "ran"
    content = {"args": argparse.Namespace(**ARGS), "model": {}, "checkpoint_version": 3.0, "rng": Bomb(sentinel)}
    file = theirs / "iter_0000003" / where
    if where == "legacy":
        file = theirs / "iter_0000003/mp_rank_00/model_optim_rng.pt"
        file.parent.mkdir()
    torch.save(content, file)
    message = refused(theirs, capsys)
    assert "system" in message and file.name in message and not sentinel.exists()


def _flip(step: Path) -> None:
    file = step / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(values_of(KEYS)["output_layer.weight"].view(torch.uint8).numpy().tobytes()) + 9] ^= 4
    file.write_bytes(data)


def _cut(step: Path) -> None:
    data = (step / "__0_0.distcp").read_bytes()
    (step / "__0_0.distcp").write_bytes(data[: len(data) // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (_flip, "output_layer.weight in __0_0.distcp"),
    "a file cut short": (_cut, "__0_0.distcp"),
    "a missing file": (lambda step: (step / "__0_0.distcp").unlink(), "__0_0.distcp"),
    "no plain values": (lambda step: (step / "common.pt").unlink(), "common.pt"),
    "an index cut short": (lambda step: os.truncate(step / ".metadata", 99), ".metadata"),
    "another format": (lambda step: (step / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "zarr"),
    "an empty step": (lambda step: [file.unlink() for file in step.iterdir()], "mp_rank_"),
    "no step": (shutil.rmtree, "iter_0000003"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_step_gets_one_clear_error(case: str, theirs: Path, capsys: Capture) -> None:
    damage, word = DAMAGE[case]
    damage(theirs / "iter_0000003")
    message = refused(theirs, capsys)
    assert word in message and "Traceback" not in message, message


def test_a_damaged_or_missing_file_of_a_rank_gets_one_clear_error(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "theirs/iter_0000003/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    args = argparse.Namespace(**{**ARGS, "tensor_model_parallel_size": 2})
    content = {"args": args, "checkpoint_version": 3.0, "model": {"output_layer.weight": torch.ones(8, 8)}}
    torch.save(content, file)
    assert "TP rank 1, PP rank 0" in refused(file.parents[1], capsys)
    with zipfile.ZipFile(file) as archive:
        (place,) = (one.header_offset for one in archive.infolist() if one.filename.endswith("data/0"))
    data = bytearray(file.read_bytes())
    data[place + 140] ^= 1
    file.write_bytes(data)
    assert "mp_rank_00/model_optim_rng.pt" in refused(file.parents[1], capsys)


def test_a_run_that_loads_it_is_told_the_command_that_converts_it(theirs: Path) -> None:
    for folder in (theirs, theirs / "iter_0000003"):
        with pytest.raises(ConfigError) as error:
            find_step(folder, None)
        assert f"megatron-moe convert --from megatron --to native --load {folder}" in str(error.value)


def test_a_schedule_that_began_within_the_run_has_its_own_position_there():
    lengths = dict.fromkeys(("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps"), 8)
    schedule = {**lengths, "num_steps": 2, "in_samples": False, "begun": {"iteration": 4, "steps": 3, "samples": 16}}
    continued = dialect.Continued(6, 24, 5, schedule, 4, False)
    found = dialect.common(build({}), transformer_impl="local", half=None, continued=continued)
    assert found["opt_param_scheduler"] == {**dict.fromkeys(lengths, 32), "num_steps": 8}
