"""megatron-core's own MoE layer as a contestant, as published, built from its local specs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contestants import Contestant, LayerContestant, Skipped, engine_config
from benchmarks.problem import Problem
from megatron_moe.platform import has_cuda


def engine_sequential(problem: Problem, dispatcher: str, fused: bool, pg_collection: Any) -> Contestant:
    """The stock layer with SequentialMLP: one dense MLP per expert.

    Args:
        dispatcher: the engine's `alltoall` or `allgather`.
        fused: its weighted SwiGLU in one autograd step (`bias_activation_fusion`).
        pg_collection: groups of one rank.
    """
    module = _build(problem, pg_collection, False, moe_token_dispatcher_type=dispatcher, bias_activation_fusion=fused)
    local = module.experts.local_experts
    with torch.no_grad():
        for expert, w1, w2 in zip(local, problem.w1, problem.w2, strict=True):
            expert.linear_fc1.weight.copy_(w1)
            expert.linear_fc2.weight.copy_(w2)

    def experts() -> dict[str, Tensor]:
        return {
            "dw1": torch.stack([expert.linear_fc1.weight.grad for expert in local]),
            "dw2": torch.stack([expert.linear_fc2.weight.grad for expert in local]),
        }

    return _contestant(problem, module, experts)


def engine_grouped(problem: Problem, pg_collection: Any) -> Contestant:
    """The engine's GroupedMLP with torch's grouped_mm in place of the grouped_gemm package.

    Not stock, which needs that package: for comparison.

    Raises:
        Skipped: on an engine that has no GroupedMLP any more.
    """
    from megatron.core.transformer.moe import experts as engine_experts

    if "GroupedMLP" not in vars(engine_experts):
        raise Skipped("this megatron-core has no GroupedMLP; its grouped experts need Transformer Engine")
    if problem.x.dtype != torch.bfloat16:
        raise Skipped("GroupedMLP takes bf16 only")
    from megatron.core.transformer.moe import grouped_gemm_util

    vars(grouped_gemm_util).update(grouped_gemm=SimpleNamespace(), ops=SimpleNamespace(gmm=_grouped_mm))
    module = _build(problem, pg_collection, True, moe_grouped_gemm=True, bias_activation_fusion=True)
    s, experts = problem.shape, module.experts
    weight1, weight2 = (s.experts, s.hidden, 2 * s.ffn), (s.experts, s.ffn, s.hidden)
    with torch.no_grad():
        experts.weight1.view(weight1).copy_(problem.w1.transpose(1, 2))
        experts.weight2.view(weight2).copy_(problem.w2.transpose(1, 2))

    def gradients() -> dict[str, Tensor]:
        return {
            "dw1": experts.weight1.grad.view(weight1).transpose(1, 2),
            "dw2": experts.weight2.grad.view(weight2).transpose(1, 2),
        }

    return _contestant(problem, module, gradients)


class _HostStream:
    """The stream on which the engine's dispatcher copies its counts to the host, where they are already."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self) -> Any:
        """An event that has happened."""
        return SimpleNamespace(synchronize=lambda: None)


def _grouped_mm(rows: Tensor, weights: Tensor, tokens_per_expert: Tensor, trans_b: bool = False) -> Tensor:
    offsets = tokens_per_expert.to(rows.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(rows, weights.transpose(-2, -1) if trans_b else weights, offs=offsets)


def _build(problem: Problem, pg_collection: Any, grouped: bool, **config: Any) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    if not has_cuda():
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _HostStream()
    spec = get_moe_module_spec(use_te=False, num_experts=problem.shape.experts, moe_grouped_gemm=grouped)
    # 0.16.1 describes the layer with a ModuleSpec, 0.19.2 with a builder.
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    settings = engine_config(problem.shape, problem.x.dtype, expert_model_parallel_size=problem.expert_ranks, **config)
    module = MoELayer(settings, submodules, layer_number=1, pg_collection=pg_collection)
    module.to(problem.x.device)
    with torch.no_grad():
        module.router.weight.copy_(problem.router)
        module.shared_experts.linear_fc1.weight.copy_(problem.shared_w1)
        module.shared_experts.linear_fc2.weight.copy_(problem.shared_w2)
    return module


def _contestant(problem: Problem, module: Any, experts: Any) -> Contestant:
    def gradients() -> dict[str, Tensor]:
        return {
            "drouter": module.router.weight.grad,
            "dshared_w1": module.shared_experts.linear_fc1.weight.grad,
            "dshared_w2": module.shared_experts.linear_fc2.weight.grad,
            **experts(),
        }

    return LayerContestant(problem, module, lambda x: module(x.unsqueeze(1))[0].squeeze(1), gradients)
