"""Named starting points: the settings that make a model, without data, folders or layout.

A preset holds what differs from the schema's defaults. The real models' figures are those of the configuration files
their authors published; `derived.parameter_count` reproduces their published sizes.
"""

from __future__ import annotations

from typing import Any

# DeepSeek-V3's architecture (arXiv 2412.19437): latent attention, a dense layer first, then experts chosen by sigmoid
# scores plus a bias, from the best groups, beside a shared expert.
_DEEPSEEK_V3_ROUTING: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_norm_topk_prob": True,
    "moe_router_group_score": "top2",
    "moe_router_bias_update_rate": 1e-3,
}

_DEMO: dict[str, Any] = {
    **_DEEPSEEK_V3_ROUTING,
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
    **_DEEPSEEK_V3_ROUTING,
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

_BIG_RUN: dict[str, Any] = {
    "seq_length": 4096,
    "bf16": True,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
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

# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without the multi-token-prediction layer.
_DEEPSEEK_V3: dict[str, Any] = {
    **_BIG_RUN,
    **_DEEPSEEK_V3_ROUTING,
    **_YARN_40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "num_experts": 256,
    "moe_layer_freq": "[0]*3+[1]*58",
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (1e-4,),
}

# https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    **_BIG_RUN,
    **_YARN_40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 10944,
    "num_attention_heads": 16,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "num_experts": 64,
    "moe_layer_freq": "[0]+[1]*26",
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_norm_topk_prob": False,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (1e-3,),
}

# https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json
_MIXTRAL_8X7B: dict[str, Any] = {
    **_BIG_RUN,
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
    "moe_router_load_balancing_type": ("aux_loss",),
    "moe_aux_loss_coeff": (0.02,),
}

# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
_QWEN3_30B_A3B: dict[str, Any] = {
    **_BIG_RUN,
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "rotary_base": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "num_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_norm_topk_prob": True,
    "moe_router_load_balancing_type": ("aux_loss",),
    "moe_aux_loss_coeff": (1e-3,),
}

PRESETS: dict[str, dict[str, Any]] = {
    "demo": _DEMO,
    "tiny": _TINY,
    "tiny-gqa": _TINY_GQA,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
}
