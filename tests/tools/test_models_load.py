"""A checkpoint opened in one process: which folders are ones, dtypes, layers, tensors written once, other settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.parallel import groups
from megatron_moe_tools.models.load_model import fill, load_model
from megatron_moe_tools.models.load_model import one_process as one_process_of
from megatron_moe_tools.models.source import BlockValues as Values
from megatron_moe_tools.models.source import locate
from tests.helpers import tiny_models

BIAS = "decoder.layers.2.mlp.router.expert_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moonlight") / "hf"
    tiny_models.make("moonlight", 4, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_get_the_dtype_asked_for_and_the_routers_bias_stays_fp32(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    with load_model(locate(folder), dtype=dtype) as found:
        tensors = found.tensors
        assert {value.dtype for key, value in tensors.items() if not key.endswith("expert_bias")} == {dtype}
        assert torch.equal(tensors[BIAS], stored["model.layers.2.mlp.gate.e_score_correction_bias"])
        rounded = stored["model.layers.0.self_attn.o_proj.weight"].to(dtype)
        assert torch.equal(tensors["decoder.layers.0.self_attention.linear_proj.weight"], rounded)
        assert not any(module.training for module in found.model.modules())
        tokens = torch.arange(6).view(1, 6)
        with torch.no_grad():
            assert torch.isfinite(found.model(tokens, tokens, None)[..., : found.vocab_size]).all()
        assert tensors.keys() == found.mapping.shapes.keys()
        assert "tokenizer.json" in found.source.companions
    assert not dist.is_initialized()


def test_the_first_layers_are_those_of_the_whole_model(folder: Path) -> None:
    with load_model(locate(folder)) as found:
        whole = {key: value.detach().clone() for key, value in found.tensors.items()}
    with load_model(locate(folder), layers=2) as found:
        assert {key.split(".")[2] for key in found.tensors if key.startswith("decoder.layers.")} == {"0", "1"}
        assert all(torch.equal(value, whole[key]) for key, value in found.tensors.items())


def test_groups_are_left_after_an_error_and_a_process_that_has_some_is_refused(folder, monkeypatch, one_process):
    with pytest.raises(KeyError), load_model(locate(folder)):
        raise KeyError
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE 2: this needs one process"), load_model(locate(folder)):
        pass
    monkeypatch.undo()
    groups.initialize(Run())
    with pytest.raises(RuntimeError, match="in no process group"), load_model(locate(folder)):
        pass


def test_a_run_becomes_one_process_that_evaluates(folder: Path) -> None:
    changed: dict[str, Any] = {
        "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4,
        "hidden_dropout": 0.1, "attention_dropout": 0.1, "recompute_granularity": "full", "bf16": True,
        "keep_fp32": ("router",), "moe_expert_capacity_factor": 1.0, "cross_entropy_loss_fusion": True,
        "transformer_impl": "transformer_engine", "moe_router_load_balancing_type": ("sinkhorn",), "seq_length": 17,
    }  # fmt: skip
    kept = {"moe_router_dtype": "fp64", "max_position_embeddings": 99, "num_layers": 4}
    alone = one_process_of(replace(locate(folder).run, **changed, **kept))
    assert alone.derived.model_ranks == 1 and alone.derived.params_dtype_name == "float32"
    flat = flatten(alone)
    assert {name: flat[name] for name in kept} == kept
    defaults = ["expert_model_parallel_size", "recompute_granularity", "moe_expert_capacity_factor", "transformer_impl"]
    for name in (*defaults, "cross_entropy_loss_fusion"):
        assert flat[name] == flatten(Run())[name], name
    assert (flat["hidden_dropout"], flat["attention_dropout"]) == (0.0, 0.0)
    # widths that the grouped product does not take are computed one by one
    assert alone.moe.moe_expert_backend == "grouped_mm"
    assert one_process_of(replace(alone, moe_ffn_hidden_size=27)).moe.moe_expert_backend == "loop"


# ---- a model's tensors are written in full, once, with finite numbers


def held() -> dict[str, torch.Tensor]:
    return {"table": torch.ones(8, 2), "experts": torch.ones(3, 2, 2), "bias": torch.ones(4)}


def blocks() -> list[Values]:
    return [
        Values("table", (0, 0), torch.full((6, 2), 1.5), "embed"),
        *(Values("experts", (e, 0, 0), torch.full((1, 2, 2), float(e)), f"expert {e}") for e in range(3)),
        Values("bias", (0,), torch.arange(4, dtype=torch.bfloat16), "bias"),
    ]


def filled(found: list[Values]) -> dict[str, torch.Tensor]:
    tensors = held()
    fill(tensors, found, "FOLDER", {"table": 5})
    return tensors


def refused(found: list[Values]) -> str:
    with pytest.raises(ConfigError, match="^FOLDER: ") as error:
        filled(found)
    return str(error.value)


def test_blocks_go_to_their_places_and_what_pads_a_table_is_zero() -> None:
    tensors = filled(blocks())
    assert tensors["table"][:, 0].tolist() == [1.5] * 5 + [0.0] * 3
    assert tensors["experts"][:, 0, 0].tolist() == [0, 1, 2]
    assert tensors["bias"].dtype == torch.float32
    assert tensors["bias"].tolist() == [0, 1, 2, 3]


def test_a_table_may_come_in_parts_of_which_one_is_padding_alone() -> None:
    found = [block for block in blocks() if block.key != "table"]
    parts = [Values("table", (row, 0), torch.full((4, 2), float(row)), f"rows {row}") for row in (0, 4, 8)]
    assert filled([*found, *parts])["table"][:, 1].tolist() == [0.0] * 4 + [4.0] + [0.0] * 3


def test_a_block_that_is_left_out_or_comes_twice_is_told() -> None:
    for left_out in range(5):
        found = blocks()
        gone = found.pop(left_out)
        assert f"not written once: {gone.key} (" in refused(found)
    assert "not written once: experts (16 of 12 elements)" in refused([*blocks(), blocks()[2]])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Values("other", (0,), torch.ones(4), "thing"), "thing: the model has no tensor other"),
        (Values("bias", (1,), torch.ones(4), "thing"), "thing: [4] at [1] is not within bias, which has the shape [4]"),
        (Values("bias", (0, 0), torch.ones(2, 2), "thing"), "thing: [2, 2] at [0, 0] is not within bias"),
        (Values("bias", (0,), torch.tensor([0, 1, 2, torch.nan]), "thing"), "thing contains NaN or infinity"),
    ],
)
def test_a_block_that_cannot_be_one_is_told(block: Values, message: str) -> None:
    assert message in refused([*blocks()[:-1], block])


# ---- settings that no released model has, and transformers computes, in the hub's spelling

YARN = tiny_models.YARN
KIMI = {**YARN, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
VARIANTS = {
    "yarn with one of two scales": ("deepseek-v3", {"rope_parameters": {**YARN, "mscale_all_dim": 0.8}}),
    "yarn's ramp a step": ("deepseek-v3", {"rope_parameters": KIMI}),
    "sigmoid weights as they are": ("deepseek-v3", {"norm_topk_prob": False}),
    "one expert, its weight made one": ("deepseek-v3", {"num_experts_per_tok": 1, "topk_group": 1}),
    "one expert, its weight as it is": ("deepseek-v3", {
        "num_experts_per_tok": 1, "topk_group": 1, "norm_topk_prob": False,
    }),
    "one table": ("deepseek-v3", {"tie_word_embeddings": True}),
    "no dense layer": ("deepseek-v2", {
        "routed_scaling_factor": 3.0, "n_shared_experts": 1, "first_k_dense_replace": 0,
    }),
    "Mixtral with one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "heads wider than the model": ("mixtral", {"head_dim": 24, "num_experts_per_tok": 3}),
    "a key for every head, no biases": ("qwen2-moe", {
        "norm_topk_prob": True, "num_key_value_heads": 4, "qkv_bias": False,
    }),
    "dense layers first and last": ("qwen3-moe", {
        "norm_topk_prob": False, "mlp_only_layers": [0, 3], "num_experts_per_tok": 1,
    }),
    "GLM with groups": ("glm4-moe", {
        "attention_bias": False, "use_qk_norm": False, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2,
    }),
    "GLM with whole heads rotated": ("glm4-moe", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_gives_the_logits_of_transformers(tmp_path, monkeypatch, variant):
    case, changes = VARIANTS[variant]
    name, settings = tiny_models.CASES[case]
    monkeypatch.setitem(tiny_models.CASES, case, (name, {**settings, **changes}))
    model = tiny_models.make(case, 1, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.hub_spelling(json.loads(path.read_text()))))
    # long enough for the slow frequencies of yarn to matter
    tokens = torch.randint(0, tiny_models.VOCABULARY, (2, 120), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        expected = model(tokens).logits
        with load_model(locate(tmp_path)) as found:
            logits = found.model(tokens, positions, None)[..., : tiny_models.VOCABULARY]
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)
