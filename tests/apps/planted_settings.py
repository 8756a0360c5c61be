"""Planted errors in what config.json comes to: the weights are right, and another model computes with them."""

from __future__ import annotations

from typing import Any

from megatron_moe.model import mla
from tests.apps.planting import (
    COVERAGE,
    EXPERTS,
    LOGITS,
    MISSING,
    SHAPE,
    UNUSED,
    WEIGHTS,
    Plant,
    replaced,
    settings,
)

EITHER = f"{EXPERTS}|{LOGITS}"
OPEN: dict[str, Any] = {"moe_router_pre_softmax": False, "moe_router_norm_topk_prob": None}
NO_GROUPS: dict[str, Any] = {
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score": "top2"
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "rope_type": "rope", "rotary_scaling_factor": 1.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
    "mscale_all_dim": 0.0,
}  # fmt: skip
NO_SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}


def each(name: str, reason: str, *cases: str, caught: str = "parity", **changes: Any) -> list[Plant]:
    return [Plant(name, case, settings(**changes), reason, caught) for case in cases]


CONSTANTS = [
    # too small to be seen in logits of random tokens: told by the numbers themselves
    *each("an epsilon that is hardly another", "epsilon of", "mixtral", "glm4-moe", norm_epsilon=1.0001e-5),
    *each(
        "a factor of yarn that is hardly another",
        "rotary frequencies differ",
        "deepseek-v3",
        rotary_scaling_factor=40.002,
    ),
    *each(
        "a rotary base that is hardly another",
        "rotary frequencies differ",
        "glm4-moe",
        "mixtral",
        rotary_base=1000500.0,
    ),
]

COMPUTED = [
    # routing
    *each("groups by the sum of two", EXPERTS, "deepseek-v2-grouped", moe_router_group_score="top2"),
    *each("groups by their best", EXPERTS, "deepseek-v3", moe_router_group_score="max"),
    *each("no groups", EXPERTS, "deepseek-v3", "deepseek-v2-grouped", **NO_GROUPS),
    *each("a group too few", EXPERTS, "deepseek-v2-grouped", moe_router_group_topk=2),
    *each("a group too few", EXPERTS, "deepseek-v3", moe_router_group_topk=1),
    *each("a group too many", EXPERTS, "deepseek-v2-grouped", moe_router_group_topk=4),
    *each("a group too many", EXPERTS, "deepseek-v3", moe_router_group_topk=3),
    *each("twice as many groups", EXPERTS, "deepseek-v3", moe_router_num_groups=8),
    *each("half as many groups", EXPERTS, "deepseek-v3", moe_router_num_groups=2, moe_router_group_topk=1),
    *each(
        "an expert too few per token", "1 experts per token here, 2 there", "mixtral", moe_router_topk=1,
        **OPEN | {"moe_router_pre_softmax": True},
    ),
    *each(
        "an expert too few per token", "2 experts per token here, 3 there", "deepseek-v2", "qwen2-moe",
        "glm4-moe", moe_router_topk=2,
    ),
    *each("an expert too many per token", "4 experts per token here, 3 there", "qwen3-moe", moe_router_topk=4),
    *each(
        "the scaling factor lost", WEIGHTS, "deepseek-v2-grouped", "deepseek-v3", "moonlight", "glm4-moe",
        moe_router_topk_scaling_factor=None,
    ),
    *each("the scaling factor of another model", WEIGHTS, "moonlight", moe_router_topk_scaling_factor=2.5),
    *each("a scaling factor that is none", WEIGHTS, "deepseek-v2", moe_router_topk_scaling_factor=2.5),
    *each("weights normalised", WEIGHTS, "qwen2-moe", "deepseek-v2", moe_router_norm_topk_prob=True),
    *each(
        "weights not normalised", WEIGHTS, "deepseek-v3", "moonlight", "glm4-moe", "qwen3-moe",
        "qwen2-moe-sparse-step", moe_router_norm_topk_prob=False,
    ),
    *each("softmax over the chosen experts", WEIGHTS, "qwen2-moe", "deepseek-v2", **OPEN),
    *each("softmax over all experts", WEIGHTS, "mixtral", moe_router_pre_softmax=True, moe_router_norm_topk_prob=False),
    *each("sigmoid in place of softmax", WEIGHTS, "deepseek-v2", moe_router_score_function="sigmoid", **OPEN),
    *each(
        "sigmoid in place of softmax", WEIGHTS, "qwen3-moe", moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
    ),
    *each("softmax in place of sigmoid", EXPERTS, "moonlight", moe_router_score_function="softmax"),
    # norms
    *each("the epsilon lost", EITHER, "moonlight", norm_epsilon=1e-6),
    *each("another epsilon", EITHER, "mixtral", "glm4-moe", norm_epsilon=1e-3),
    Plant("the model's epsilon in the latent norms", "moonlight", replaced(mla, "LATENT_NORM_EPSILON", 1e-2), EITHER),
    # positions
    *each(
        "the rotary base lost", EITHER, "mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "moonlight",
        rotary_base=10000.0,
    ),
    *each("a rotary base of a million", EITHER, "deepseek-v3", "qwen3-moe-tied", rotary_base=1e6),
    *each("yarn lost", EITHER, "deepseek-v3", "deepseek-v2-grouped", **PLAIN),
    *each("another factor of yarn", EITHER, "deepseek-v3", "deepseek-v2-grouped", rotary_scaling_factor=4.0),
    *each("mscale_all_dim lost", EITHER, "deepseek-v3", "deepseek-v2-grouped", mscale_all_dim=0.0),
    *each("another mscale", EITHER, "deepseek-v2-grouped", mscale=1.0),
    *each("yarn's first length lost", EITHER, "deepseek-v3", original_max_position_embeddings=4096),
    *each("yarn's slow beta", EITHER, "deepseek-v3", beta_slow=16.0),
    *each("the partial rotary factor lost", EITHER, "glm4-moe", rotary_percent=1.0),
    *each("half of the partial rotary factor", EITHER, "glm4-moe", rotary_percent=0.25),
    *each("rotary by pairs", EITHER, "mixtral", "qwen3-moe", rotary_interleaved=True),
]  # fmt: skip

COVERED = [
    *each(
        "dense and MoE layers swapped", MISSING, "deepseek-v3", "glm4-moe", moe_layer_freq="[1,0,1,1]",
        caught=COVERAGE,
    ),
    *each("no dense layer", MISSING, "deepseek-v2", moe_layer_freq=1, caught=COVERAGE),
    *each("layers counted from zero", MISSING, "qwen2-moe-sparse-step", moe_layer_freq=2, caught=COVERAGE),
    *each("the dense layer of a list forgotten", MISSING, "qwen2-moe", moe_layer_freq=1, caught=COVERAGE),
    *each(
        "no bias of q, k and v", rf"{UNUSED}.*q_proj\.bias", "qwen2-moe", "glm4-moe", add_qkv_bias=False,
        caught=COVERAGE,
    ),
    *each(
        "a bias of q, k and v that is none", rf"{MISSING}.*k_proj\.bias", "mixtral", add_qkv_bias=True,
        caught=COVERAGE,
    ),
    *each("no norm of heads", rf"{UNUSED}.*k_norm", "qwen3-moe", "glm4-moe", qk_layernorm=False, caught=COVERAGE),
    *each(
        "no norm of the latent", rf"{UNUSED}.*kv_a_layernorm", "deepseek-v3", "moonlight", qk_layernorm=False,
        caught=COVERAGE,
    ),
    *each(
        "no shared expert", rf"{UNUSED}.*shared_expert", "deepseek-v2", "glm4-moe", "qwen2-moe", **NO_SHARED,
        caught=COVERAGE,
    ),
    *each(
        "no gate of the shared expert", rf"{UNUSED}.*shared_expert_gate", "qwen2-moe",
        moe_shared_expert_gate=False, caught=COVERAGE,
    ),
    *each(
        "one shared expert of two", rf"shared_experts.*{SHAPE}", "deepseek-v2", "moonlight",
        moe_shared_expert_intermediate_size=24, caught=COVERAGE,
    ),
    *each("the head's size lost", rf"q_norm.*{SHAPE}", "qwen3-moe", kv_channels=None, caught=COVERAGE),
    *each("as many keys as queries", rf"k_proj.*{SHAPE}", "mixtral", num_query_groups=4, caught=COVERAGE),
    *each("no low rank of queries", rf"{UNUSED}.*q_a_proj", "deepseek-v3", q_lora_rank=None, caught=COVERAGE),
    *each(
        "the padded vocabulary taken for the real one", rf"embed_tokens.*{SHAPE}", "deepseek-v3", "mixtral",
        vocab_size=256, caught=COVERAGE,
    ),
    *each("a token too few", rf"lm_head.*{SHAPE}", "qwen2-moe", vocab_size=130, caught=COVERAGE),
    *each("a layer too few", rf"{UNUSED}model\.layers\.3", "mixtral", num_layers=3, caught=COVERAGE),
    *each("a layer too many", rf"{MISSING}model\.layers\.4", "qwen3-moe", num_layers=5, caught=COVERAGE),
    *each("an expert too few", rf"{UNUSED}.*experts\.7", "mixtral", num_experts=7, caught=COVERAGE),
    *each(
        "tied tables taken for two", rf"{MISSING}lm_head", "qwen3-moe-tied",
        untie_embeddings_and_output_weights=True, caught=COVERAGE,
    ),
    *each(
        "two tables taken for tied ones", "lm_head.weight differs from model.embed_tokens", "mixtral",
        "deepseek-v3", untie_embeddings_and_output_weights=False, caught=COVERAGE,
    ),
    *each(
        "the dense width for experts", rf"experts.*{SHAPE}", "qwen3-moe", "deepseek-v2", moe_ffn_hidden_size=96,
        caught=COVERAGE,
    ),
    *each(
        "no bias of the router", rf"{UNUSED}.*correction_bias", "deepseek-v3", "glm4-moe",
        moe_router_enable_expert_bias=False, caught=COVERAGE,
    ),
    *each(
        "prediction layers that are none", rf"{MISSING}model\.layers\.4\.eh_proj", "deepseek-v3",
        mtp_num_layers=1, caught=COVERAGE,
    ),
]  # fmt: skip
