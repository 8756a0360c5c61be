"""A small router, its configuration and tokens for it."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe import TopKRouter


def config(**changes: Any) -> TransformerConfig:
    values: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    return TransformerConfig(**{**values, **changes})


def router(**changes: Any) -> TopKRouter:
    torch.manual_seed(0)
    return TopKRouter(config(**changes))


def tokens(count: int = 10, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
