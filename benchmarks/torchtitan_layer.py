"""torchtitan's MoE layer as a contestant, as published, where it can be imported (it needs triton)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import Contestant, LayerContestant, Skipped
from benchmarks.problem import Problem, Shape


def torchtitan_layer(problem: Problem) -> Contestant:
    """The MoE of torchtitan 0.3 with its dispatcher of one rank.

    Raises:
        Skipped: where it cannot be imported, and for dtypes other than bf16, in which its experts multiply.
    """
    try:
        module = _build(problem.shape).to(problem.x.device)
    except ImportError as error:
        raise Skipped(f"torchtitan 0.3 cannot be imported ({error})") from error
    if problem.x.dtype != torch.bfloat16:
        raise Skipped("its experts multiply in bf16 whatever the dtype")
    experts, shared = module.routed_experts.inner_experts, module.shared_experts
    # Its gate multiplies in fp32 by autocast, which CPUs have for half precision only; its buffers stay in fp32, too.
    module.router.gate.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    for part in (experts, shared):
        part.to(problem.x.dtype)
    gate_up = {"w1": (experts.w1_EFD, experts.w3_EFD), "shared_w1": (shared.w1.weight, shared.w3.weight)}
    with torch.no_grad():
        module.router.gate.weight.copy_(problem.router)
        experts.w2_EDF.copy_(problem.w2)
        shared.w2.weight.copy_(problem.shared_w2)
        for name, weights in gate_up.items():
            for weight, values in zip(weights, getattr(problem, name).chunk(2, dim=-2), strict=True):
                weight.copy_(values)

    def gradients() -> dict[str, Tensor]:
        return {
            "drouter": module.router.gate.weight.grad,
            "dw2": experts.w2_EDF.grad,
            "dshared_w2": shared.w2.weight.grad,
            **{f"d{name}": torch.cat([one.grad for one in weights], dim=-2) for name, weights in gate_up.items()},
        }

    return LayerContestant(problem, module, lambda x: module(x.unsqueeze(0)).squeeze(0), gradients)


def _build(shape: Shape) -> Any:
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    def linear(inputs: int, outputs: int) -> Any:
        return Linear.Config(in_features=inputs, out_features=outputs)

    s = shape
    experts = GroupedExperts.Config(dim=s.hidden, hidden_dim=s.ffn, num_experts=s.experts)
    dispatcher = LocalTokenDispatcher.Config(num_experts=s.experts, top_k=s.topk)
    router = TokenChoiceTopKRouter.Config(
        num_experts=s.experts,
        gate=linear(s.hidden, s.experts),
        top_k=s.topk,
        route_norm=True,
        route_scale=s.scaling_factor,
    )
    config = MoE.Config(
        num_experts=s.experts,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=router,
        shared_experts=FeedForward.Config(
            w1=linear(s.hidden, s.shared), w2=linear(s.shared, s.hidden), w3=linear(s.hidden, s.shared)
        ),
    )
    return MoE(config)
