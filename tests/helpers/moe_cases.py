"""Building a MoE layer of this package on any layout from one set of full weights, for the distributed tests."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups
from tests.helpers import routers
from tests.numbers.reference_moe import Routing, Weights

H, F_WIDTH, SHARED = 16, 8, 12


def random_case(seed: int) -> dict[str, Any]:
    """One draw of every option the router and the layer have."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    score = pick("softmax", "sigmoid")
    num_experts = pick(4, 8)
    grouped = num_experts == 8 and pick(True, False)
    topk = pick(2, 4) if grouped else pick(1, 2, 3)
    case = dict(
        seed=seed,
        num_experts=num_experts,
        routing=Routing(
            topk=topk,
            score_function=score,
            pre_softmax=score == "softmax" and (topk == 1 or pick(True, False)),
            # One normalised weight is the constant 1, and has no gradient to compare.
            normalise=topk > 1 and pick(True, False),
            scaling_factor=pick(None, 2.5),
            num_groups=4 if grouped else None,
            group_topk=2 if grouped else None,
            group_score=pick("max", "top2", "megatron"),
        ),
        bias=score == "sigmoid" and pick(True, False),
        shared=pick(True, False),
        shared_gate=pick(True, False),
        padding=pick(True, False),
        dispatcher=pick("alltoall", "allgather"),
        backend=pick("grouped_mm", "loop"),
        per_token=pick(True, False),
        aux=pick(None, "aux_loss", "seq_aux_loss"),
        z=pick(None, 0.01),
        pad=False,
    )
    routing = case["routing"]
    forced = pick("", "", "sinkhorn", "round robin")
    if forced == "sinkhorn" and not grouped and not case["bias"]:
        # Sinkhorn's weights are its own, and there is no auxiliary loss beside it.
        score = "sigmoid" if topk == 1 else "softmax"
        case["routing"] = Routing(topk, score, sinkhorn=True, pre_softmax=topk > 1, normalise=False)
        case["aux"] = None
    elif forced == "round robin":
        routing.round_robin = True
    else:
        routing.replayed = seed % 3 == 2
    if not case["routing"].sinkhorn:
        case["routing"].capacity_factor = pick(None, 0.4, 0.75, 1.25)
        case["routing"].drop_policy = pick("probs", "position")
        case["pad"] = case["routing"].capacity_factor is not None and pick(True, False)
    return case


def full_weights(case: dict[str, Any], dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(1000 + case["seed"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    e, width = case["num_experts"], case.get("width", F_WIDTH)
    weights = Weights(normal(e, H) / 2, normal(e, 2, width, H) / 4, normal(e, H, width) / 3)
    weights.bias = normal(e) / 4 if case["bias"] else None
    if case["shared"]:
        weights.shared1, weights.shared2 = normal(2, SHARED, H) / 4, normal(H, SHARED) / 4
        weights.shared_gate = normal(1, H) / 4 if case["shared_gate"] else None
    return weights


def tokens_and_padding(case: dict[str, Any], sequence: int, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden [S, B, H] and is_padding [B, S], over all ranks."""
    generator = torch.Generator().manual_seed(2000 + case["seed"])
    hidden = torch.randn(sequence, batch, H, generator=generator)
    padding = torch.rand(batch, sequence, generator=generator) < 0.25 if case["padding"] else None
    return hidden, padding


def engine_config(case: dict[str, Any], run: Run) -> TransformerConfig:
    routing: Routing = case["routing"]
    same_names = ("topk", "score_function", "pre_softmax", "num_groups", "group_topk")
    names = ("tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size")
    config = routers.config(
        hidden_size=H,
        num_attention_heads=4,
        ffn_hidden_size=F_WIDTH,
        moe_ffn_hidden_size=case.get("width", F_WIDTH),
        num_moe_experts=case["num_experts"],
        moe_router_enable_expert_bias=False,
        moe_router_topk_scaling_factor=routing.scaling_factor,
        moe_router_load_balancing_type="sinkhorn" if routing.sinkhorn else case["aux"] or "none",
        moe_router_force_load_balancing=routing.round_robin,
        moe_expert_capacity_factor=routing.capacity_factor,
        moe_token_drop_policy=routing.drop_policy,
        moe_pad_expert_input_to_capacity=case.get("pad", False),
        moe_aux_loss_coeff=0.1 if case["aux"] else 0.0,
        moe_z_loss_coeff=case["z"],
        calculate_per_token_loss=case["per_token"],
        moe_token_dispatcher_type=case["dispatcher"],
        moe_shared_expert_intermediate_size=SHARED if case["shared"] else None,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        expert_tensor_parallel_size=run.parallel.expert_tensor_parallel_size,
        **{name: getattr(run.parallel, name) for name in names},
        **{f"moe_router_{name}": getattr(routing, name) for name in same_names},
    )
    config.moe_router_enable_expert_bias = case["bias"]  # with softmax scores the engine's checks would refuse it
    config.moe_router_group_score = routing.group_score
    config.moe_router_norm_topk_prob = routing.normalise
    config.moe_expert_backend = case["backend"]
    config.fp8_format = case.get("fp8_format")
    config.moe_shared_expert_gate = case["shared"] and case["shared_gate"]
    return config


def build_layer(case: dict[str, Any], layout: dict[str, Any], pg: Any = None) -> tuple[MoELayer, Any]:
    """The layer of this rank with the case's full weights cut to its part, and the process groups: `pg` or new ones."""
    run = replace(Run(), **layout)
    pg = pg or groups.initialize(run)
    layer = MoELayer(engine_config(case, run), pg_collection=pg, layer_number=1)
    weights = full_weights(case)
    with torch.no_grad():
        layer.router.weight.copy_(weights.router)
        if weights.bias is not None:
            layer.router.expert_bias.copy_(weights.bias)

        def full(name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
            expert, kind = name.removeprefix("expert").split(".")
            tensor = getattr(weights, kind)[int(expert)]
            assert tuple(tensor.shape) == shape
            return tensor

        layer.experts.reset_parameters(full, 1.0, 1.0)
        if layer.shared_experts is not None:
            tp, rank = pg.tp.size(), pg.tp.rank()
            layer.shared_experts.linear_fc1.weight.copy_(weights.shared1.chunk(tp, 1)[rank].flatten(0, 1))
            layer.shared_experts.linear_fc2.weight.copy_(weights.shared2.chunk(tp, 1)[rank])
            if layer.shared_experts.gate_weight is not None:
                layer.shared_experts.gate_weight.copy_(weights.shared_gate)
    return layer, pg
