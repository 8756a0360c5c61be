"""Who competes: our layer, the engine's own, transformers', and the bound that no one can beat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problem import Problem, Shape


class Skipped(Exception):
    """A contestant that cannot compete here; the message says why."""


class Contestant(ABC):
    """One step is a forward and a backward pass over the whole problem, to the input and all weights."""

    @abstractmethod
    def forward(self) -> None:
        """Run the forward pass."""

    @abstractmethod
    def backward(self) -> None:
        """Run the backward pass."""

    def step(self) -> None:
        """Run one step; this is what is timed."""
        self.forward()
        self.backward()

    def clear(self) -> None:  # noqa: B027 (the bound has no gradients to forget)
        """Forget the gradients of the last step, as an optimizer would; not timed."""

    def results(self) -> dict[str, Tensor]:
        """After a step: what `oracle` gives, in the same layout; empty for the bound, which computes no layer."""
        return {}


class Bound(Contestant):
    """The layer's six matrix products, forward and backward, as dense ones of the same FLOPs, and nothing else.

    Rows of routed and shared experts stand below one another: R = T (K + Fs / F).
    """

    def __init__(self, problem: Problem) -> None:
        s = problem.shape
        rows = round(s.tokens * (s.topk + s.shared / s.ffn))
        like = {"dtype": problem.x.dtype, "device": problem.x.device}
        self._x, self._gate_up = torch.randn(rows, s.hidden, **like), torch.randn(rows, 2 * s.ffn, **like)
        self._act, self._w1 = torch.randn(rows, s.ffn, **like), torch.randn(2 * s.ffn, s.hidden, **like)
        self._w2 = torch.randn(s.hidden, s.ffn, **like)

    def forward(self) -> None:
        torch.mm(self._x, self._w1.t())
        torch.mm(self._act, self._w2.t())

    def backward(self) -> None:
        torch.mm(self._x, self._w2)
        torch.mm(self._x.t(), self._act)
        torch.mm(self._gate_up, self._w1)
        torch.mm(self._gate_up.t(), self._x)


class LayerContestant(Contestant):
    """A module whose output for x [T, H] and whose gradients are compared and timed.

    Args:
        module: the layer, weights in place.
        forward: x [T, H] -> y [T, H].
        gradients: the gradients of the weights, by the oracle's names and in its layout.
    """

    def __init__(
        self,
        problem: Problem,
        module: nn.Module,
        forward: Callable[[Tensor], Tensor],
        gradients: Callable[[], dict[str, Tensor]],
    ) -> None:
        self._module, self._compute, self._gradients = module.train(), forward, gradients
        self._x, self._grad_output = problem.x.clone().requires_grad_(), problem.grad_output
        self._y: Tensor | None = None

    def forward(self) -> None:
        self._y = self._compute(self._x)

    def backward(self) -> None:
        assert self._y is not None
        self._y.backward(self._grad_output)

    def clear(self) -> None:
        self._y = self._x.grad = None
        self._module.zero_grad(set_to_none=True)

    def results(self) -> dict[str, Tensor]:
        assert self._y is not None and self._x.grad is not None
        return {"y": self._y.detach(), "dx": self._x.grad, **self._gradients()}


def ours(problem: Problem, backend: str, pg_collection: Any = None) -> Contestant:
    """Our MoELayer with one of its expert backends; groups of one rank are the default."""
    from megatron_moe.moe.layer import MoELayer

    config = engine_config(problem.shape, problem.x.dtype, expert_model_parallel_size=problem.expert_ranks)
    config.moe_expert_backend = backend  # the engine has none: MoEOptions reads it by its name
    module = MoELayer(config, layer_number=1, pg_collection=pg_collection).to(problem.x.device)
    experts, shared = module.experts, module.shared_experts
    with torch.no_grad():
        module.router.weight.copy_(problem.router)
        experts.weight1.copy_(problem.w1.view_as(experts.weight1))
        experts.weight2.copy_(problem.w2)
        shared.linear_fc1.weight.copy_(problem.shared_w1)
        shared.linear_fc2.weight.copy_(problem.shared_w2)

    def forward(x: Tensor) -> Tensor:
        # An optimizer step ends every counting period; without one the counts of a long benchmark would overflow.
        module.router.reset_counts()
        return module(x.unsqueeze(1))[0].squeeze(1)

    def gradients() -> dict[str, Tensor]:
        return {
            "drouter": module.router.weight.grad,
            "dw1": experts.weight1.grad.flatten(1, 2),
            "dw2": experts.weight2.grad,
            "dshared_w1": shared.linear_fc1.weight.grad,
            "dshared_w2": shared.linear_fc2.weight.grad,
        }

    return LayerContestant(problem, module, forward, gradients)


def transformers_layer(problem: Problem, implementation: str) -> Contestant:
    """transformers' DeepseekV3MoE with one of its expert implementations."""
    try:
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    except ImportError as error:
        raise Skipped(f"transformers is not installed ({error})") from error
    s = problem.shape
    if s.shared % s.ffn:
        raise Skipped(f"its shared expert is a multiple of an expert's width, {s.shared} is none of {s.ffn}")
    config = DeepseekV3Config(
        hidden_size=s.hidden,
        moe_intermediate_size=s.ffn,
        n_routed_experts=s.experts,
        num_experts_per_tok=s.topk,
        n_shared_experts=s.shared // s.ffn,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=s.scaling_factor,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    module = DeepseekV3MoE(config).to(device=problem.x.device, dtype=problem.x.dtype)
    shared = module.shared_experts
    gate, up = problem.shared_w1.chunk(2)
    with torch.no_grad():
        module.gate.weight.copy_(problem.router)
        module.experts.gate_up_proj.copy_(problem.w1)
        module.experts.down_proj.copy_(problem.w2)
        shared.gate_proj.weight.copy_(gate)
        shared.up_proj.weight.copy_(up)
        shared.down_proj.weight.copy_(problem.shared_w2)

    def gradients() -> dict[str, Tensor]:
        return {
            "drouter": module.gate.weight.grad,
            "dw1": module.experts.gate_up_proj.grad,
            "dw2": module.experts.down_proj.grad,
            "dshared_w1": torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad]),
            "dshared_w2": shared.down_proj.weight.grad,
        }

    return LayerContestant(problem, module, lambda x: module(x.unsqueeze(0)).squeeze(0), gradients)


def engine_config(shape: Shape, dtype: torch.dtype, **changes: Any) -> Any:
    """The engine's own TransformerConfig of the layer, which both its layer and ours are built from."""
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": shape.hidden,
        "num_attention_heads": 4,
        "ffn_hidden_size": 4 * shape.hidden,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_shared_expert_intermediate_size": shape.shared,
        "moe_router_topk": shape.topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": shape.scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**settings, **changes})
