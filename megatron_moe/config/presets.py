"""Presets: named settings of a model, without data, folders or layout.

A preset contains what differs from the schema's defaults. Published models have the figures of the config.json that
their authors published; `derived.parameter_count` gives their published sizes, and transformers the same count for the
same configuration. What a configuration file does not contain, such as coefficients of balancing losses, is the
authors' if they published it. Layers of multi-token prediction, which DeepSeek-V3 and GLM-4.5 were published with, are
left to --mtp-num-layers. Small presets of the same kinds come last.
"""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run, replace

_BIG_RUN: dict[str, Any] = {
    "seq_length": 4096,
    "bf16": True,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
}


def _balanced_by(kind: str, coefficient: float) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": (kind,), "moe_aux_loss_coeff": (coefficient,)}


# DeepSeek-V2 (arXiv 2405.04434): latent attention, a dense layer first, softmax scores as they are

_LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
_YARN_40: dict[str, Any] = {
    "rope_type": "yarn",
    "rotary_base": 10000.0,
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 163840,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_DEEPSEEK_V2_KIND: dict[str, Any] = {
    **_BIG_RUN,
    **_LATENT,
    **_YARN_40,
    **_balanced_by("seq_aux_loss", 1e-3),
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "vocab_size": 102400,
    "moe_router_topk": 6,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_norm_topk_prob": False,
}
# https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json, and DeepSeek-Coder-V2-Lite-Base's
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    **_DEEPSEEK_V2_KIND,
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 10944,
    "num_attention_heads": 16,
    "num_experts": 64,
    "moe_layer_freq": "[0]+[1]*26",
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
}
# https://huggingface.co/deepseek-ai/DeepSeek-V2/blob/main/config.json
_DEEPSEEK_V2: dict[str, Any] = {
    **_DEEPSEEK_V2_KIND,
    "num_layers": 60,
    "hidden_size": 5120,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "num_experts": 160,
    "moe_layer_freq": "[0]+[1]*59",
    "moe_ffn_hidden_size": 1536,
    "moe_shared_expert_intermediate_size": 3072,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 3,
    "moe_router_group_score": "max",
    "moe_router_topk_scaling_factor": 16.0,
}
# https://huggingface.co/deepseek-ai/DeepSeek-Coder-V2-Base/blob/main/config.json
_DEEPSEEK_CODER_V2: dict[str, Any] = {**_DEEPSEEK_V2, "mscale": 1.0, "mscale_all_dim": 1.0}

# DeepSeek-V3 (arXiv 2412.19437): experts chosen by sigmoid scores plus a bias, from the best groups

DEEPSEEK_V3_KIND: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_norm_topk_prob": True,
    "moe_router_group_score": "top2",
    "moe_router_bias_update_rate": 1e-3,
}
# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, and R1's
_DEEPSEEK_V3: dict[str, Any] = {
    **_BIG_RUN,
    **DEEPSEEK_V3_KIND,
    **_LATENT,
    **_YARN_40,
    **_balanced_by("seq_aux_loss", 1e-4),
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "num_experts": 256,
    "moe_layer_freq": "[0]*3+[1]*58",
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
}
# https://huggingface.co/moonshotai/Kimi-K2-Base/blob/main/config.json: one group; yarn's ramp is a step
_KIMI_K2: dict[str, Any] = {
    **_DEEPSEEK_V3,
    **_balanced_by("seq_aux_loss", 1e-3),
    "num_attention_heads": 64,
    "rotary_base": 50000.0,
    "rotary_scaling_factor": 32.0,
    "max_position_embeddings": 131072,
    "beta_fast": 1.0,
    "vocab_size": 163840,
    "num_experts": 384,
    "moe_layer_freq": "[0]+[1]*60",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": 2.827,
}
# https://huggingface.co/moonshotai/Moonlight-16B-A3B/blob/main/config.json
_MOONLIGHT: dict[str, Any] = {
    **_BIG_RUN,
    **DEEPSEEK_V3_KIND,
    **_LATENT,
    **_balanced_by("seq_aux_loss", 1e-3),
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 11264,
    "num_attention_heads": 16,
    "rotary_base": 50000.0,
    "max_position_embeddings": 8192,
    "norm_epsilon": 1e-5,
    "vocab_size": 163840,
    "num_experts": 64,
    "moe_layer_freq": "[0]+[1]*26",
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6,
    "moe_router_topk_scaling_factor": 2.446,
}

# GLM-4.5 (arXiv 2508.06471): DeepSeek-V3's router over grouped-query attention, half of each head rotated

_GLM_KIND: dict[str, Any] = {
    **_BIG_RUN,
    **_balanced_by("seq_aux_loss", 1e-4),
    "num_attention_heads": 96,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "add_qkv_bias": True,
    "rotary_base": 1e6,
    "rotary_percent": 0.5,
    "max_position_embeddings": 131072,
    "norm_epsilon": 1e-5,
    "vocab_size": 151552,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_norm_topk_prob": True,
    "moe_router_bias_update_rate": 1e-3,
}
# https://huggingface.co/zai-org/GLM-4.5/blob/main/config.json
_GLM_4_5: dict[str, Any] = {
    **_GLM_KIND,
    "num_layers": 92,
    "hidden_size": 5120,
    "ffn_hidden_size": 12288,
    "qk_layernorm": True,
    "num_experts": 160,
    "moe_layer_freq": "[0]*3+[1]*89",
    "moe_ffn_hidden_size": 1536,
    "moe_shared_expert_intermediate_size": 1536,
    "moe_router_topk_scaling_factor": 2.5,
}
# https://huggingface.co/zai-org/GLM-4.5-Air/blob/main/config.json
_GLM_4_5_AIR: dict[str, Any] = {
    **_GLM_KIND,
    "num_layers": 46,
    "hidden_size": 4096,
    "ffn_hidden_size": 10944,
    "num_experts": 128,
    "moe_layer_freq": "[0]+[1]*45",
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 1408,
}

# Mixtral: a softmax over the chosen experts, in every layer

# https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json
_MIXTRAL_8X7B: dict[str, Any] = {
    **_BIG_RUN,
    **_balanced_by("aux_loss", 0.02),
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "rotary_base": 1e6,
    "max_position_embeddings": 32768,
    "norm_epsilon": 1e-5,
    "vocab_size": 32000,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
}
# https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json
_MIXTRAL_8X22B: dict[str, Any] = {
    **_MIXTRAL_8X7B,
    **_balanced_by("aux_loss", 1e-3),
    "num_layers": 56,
    "hidden_size": 6144,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 48,
    "max_position_embeddings": 65536,
}

# Qwen: a softmax over all experts; Qwen2 with a gated shared expert, Qwen3 without, its weights made to sum to one

_QWEN_KIND: dict[str, Any] = {
    **_BIG_RUN,
    **_balanced_by("aux_loss", 1e-3),
    "group_query_attention": True,
    "num_query_groups": 4,
    "rotary_base": 1e6,
    "vocab_size": 151936,
    "moe_router_topk": 8,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
}
_QWEN2_KIND: dict[str, Any] = {
    **_QWEN_KIND,
    "add_qkv_bias": True,
    "moe_shared_expert_gate": True,
    "moe_router_norm_topk_prob": False,
}
# https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B/blob/main/config.json
_QWEN1_5_MOE: dict[str, Any] = {
    **_QWEN2_KIND,
    "num_layers": 24,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 16,
    "num_query_groups": 16,
    "max_position_embeddings": 8192,
    "num_experts": 60,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 5632,
    "moe_router_topk": 4,
}
# https://huggingface.co/Qwen/Qwen2-57B-A14B/blob/main/config.json
_QWEN2_57B_A14B: dict[str, Any] = {
    **_QWEN2_KIND,
    "num_layers": 28,
    "hidden_size": 3584,
    "ffn_hidden_size": 18944,
    "num_attention_heads": 28,
    "max_position_embeddings": 131072,
    "num_experts": 64,
    "moe_ffn_hidden_size": 2560,
    "moe_shared_expert_intermediate_size": 20480,
}
_QWEN3_KIND: dict[str, Any] = {
    **_QWEN_KIND,
    "kv_channels": 128,
    "qk_layernorm": True,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "moe_router_norm_topk_prob": True,
}
# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
_QWEN3_30B_A3B: dict[str, Any] = {
    **_QWEN3_KIND,
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "moe_ffn_hidden_size": 768,
}
# https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json
_QWEN3_235B_A22B: dict[str, Any] = {
    **_QWEN3_KIND,
    "num_layers": 94,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 64,
    "moe_ffn_hidden_size": 1536,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-coder-v2": _DEEPSEEK_CODER_V2,
    "deepseek-coder-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
    "moonlight-16b-a3b": _MOONLIGHT,
    "glm-4.5": _GLM_4_5,
    "glm-4.5-air": _GLM_4_5_AIR,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mixtral-8x22b": _MIXTRAL_8X22B,
    "qwen1.5-moe-a2.7b": _QWEN1_5_MOE,
    "qwen2-57b-a14b": _QWEN2_57B_A14B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": _QWEN3_235B_A22B,
}

# Small models of the same kinds

_DEMO: dict[str, Any] = {
    **DEEPSEEK_V3_KIND,
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "seq_length": 256,
    "num_experts": 16,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "bf16": True,
    "use_distributed_optimizer": True,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_iters": 160,
    # So few steps are little time: at DeepSeek's 1e-3 the bias would not get past the spread of the scores, and a layer
    # stays on its first favourites (load 3.9 of at most 4 after 40 steps; with 1e-2 it is 1.2 after 100).
    "moe_router_bias_update_rate": 1e-2,
    # At 2e-3 a bf16 run ended 0.32 % from an fp32 one after 400 steps, at 1e-3 0.08 to 0.2 % (docs/precision.md).
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 20,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}

# Small enough for tests: a step takes tens of milliseconds on one core. Four layers, so that PP2 with two virtual
# stages needs no other flag; a dense first layer, so that the expert-free path is always walked too.
_TINY: dict[str, Any] = {
    **DEEPSEEK_V3_KIND,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "seq_length": 64,
    "num_experts": 8,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 2,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 20,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "eval_iters": 2,
}

_TINY_GQA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 64,
    "num_experts": 8,
    "moe_ffn_hidden_size": 48,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": ("aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 20,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "eval_iters": 2,
}

PRESETS: dict[str, dict[str, Any]] = {"demo": _DEMO, "tiny": _TINY, "tiny-gqa": _TINY_GQA, **PUBLISHED}


_FIRST_FP16_SCALE = 2.0**12


def with_made_up_data(run: Run) -> Run:
    """Return `run` with what one step needs and its flags do not set: made-up tokens, a vocabulary, a length.

    fp16 starts at a loss scale without an overflow in the first step, so that the optimizer updates the weights.
    """
    changes: dict[str, Any] = {"eval_iters": 0, "eval_interval": 0}
    if run.training.train_iters is None:
        changes["train_iters"] = 2 + run.optimizer.lr_warmup_iters
    if run.data.data_path is None and run.data.train_data_path is None:
        changes["mock_data"] = True
        if run.model.vocab_size is None and run.data.tokenizer_type is None:
            changes["vocab_size"] = 1024
    if run.precision.fp16 and run.precision.loss_scale is None:
        changes["initial_loss_scale"] = min(run.precision.initial_loss_scale, _FIRST_FP16_SCALE)
    return replace(run, **changes)
