"""Routers with a bias that is watched, for test_finalize_model_grads_*ranks.py."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe import TopKRouter


def bias_router(
    pg_collection: Any, num_experts: int, topk: int, layout: dict[str, Any], hidden_size: int = 8, **options: Any
) -> TopKRouter:
    """A router with sigmoid scores and a bias; `options` are the engine configuration's, or attributes we add to it."""
    added = ("moe_router_bias_center", "moe_router_group_score")
    ours = {name: options.pop(name) for name in added if name in options}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=2,
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=layout.get("tensor_model_parallel_size", 1),
        sequence_parallel=layout.get("sequence_parallel", False),
        add_bias_linear=False,
        use_cpu_initialization=True,
        **options,
    )
    vars(config).update(ours)
    return TopKRouter(config, pg_collection)
