"""Settings that no released model has, and transformers computes: read from the hub's spelling, ours gives the same."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_moe.hf.opened import opened
from megatron_moe.hf.source import locate
from tests.helpers import tiny_models

pytestmark = pytest.mark.engine

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
KIMI = {**YARN, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
VARIANTS = {
    "yarn without scales": ("deepseek-v3", {"rope_parameters": YARN}),
    "yarn with one of two scales": ("deepseek-v3", {"rope_parameters": {**YARN, "mscale_all_dim": 0.8}}),
    "yarn with a factor of its own": (
        "deepseek-v2-grouped",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "mscale_all_dim": 0.5}},
    ),
    "yarn's ramp a step": ("deepseek-v3", {"rope_parameters": KIMI}),
    "sigmoid weights as they are": ("deepseek-v3", {"norm_topk_prob": False}),
    "one expert, its weight made one": ("deepseek-v3", {"num_experts_per_tok": 1, "topk_group": 1}),
    "one expert, its weight as it is": (
        "deepseek-v3",
        {"num_experts_per_tok": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "one table": ("deepseek-v3", {"tie_word_embeddings": True}),
    "no dense layer": (
        "deepseek-v2",
        {"routed_scaling_factor": 3.0, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "one group of many": ("deepseek-v2-grouped", {"topk_group": 1, "num_experts_per_tok": 2}),
    "Mixtral with one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "heads wider than the model": ("mixtral", {"head_dim": 24, "num_experts_per_tok": 3}),
    "a key for every head, no biases": (
        "qwen2-moe",
        {"norm_topk_prob": True, "num_key_value_heads": 4, "qkv_bias": False},
    ),
    "dense layers first and last": (
        "qwen3-moe",
        {"norm_topk_prob": False, "mlp_only_layers": [0, 3], "num_experts_per_tok": 1},
    ),
    "GLM with groups": (
        "glm4-moe",
        {"attention_bias": False, "use_qk_norm": False, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    ),
    "GLM with whole heads rotated": (
        "glm4-moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
}


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
        with opened(locate(tmp_path)) as found:
            logits = found.model(tokens, positions, None)[..., : tiny_models.VOCABULARY]
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)
