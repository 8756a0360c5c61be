"""Presets: named settings of a model, without data, folders or layout.

A preset contains what differs from the schema's defaults. Published models are in `presets_published.py`; this file
has small ones of the same kinds.
"""

from __future__ import annotations

from typing import Any

from megatron_moe.config.presets_published import DEEPSEEK_V3_KIND, PUBLISHED
from megatron_moe.config.schema import Run, replace

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
