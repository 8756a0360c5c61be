"""The engine's own router and ours side by side, for the tests that show the engine's defects."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter as EngineRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe import TopKRouter
from megatron_moe.platform import engine_version
from megatron_moe.platform.defects import known_defects


def present(name: str) -> bool:
    """Whether the table says that the engine in use has this defect: what its own code has to show."""
    (defect,) = [defect for defect in known_defects() if defect.id == name]
    return defect.is_present(engine_version())


def router_config(num_experts: int, **changes: Any) -> TransformerConfig:
    """A router whose gate can hand on its input as the logits: as wide as there are experts."""
    values: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=num_experts,
        num_attention_heads=2,
        num_moe_experts=num_experts,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    return TransformerConfig(**{**values, **changes})


def both_routers(pg_collection: Any, num_experts: int, **changes: Any) -> tuple[Any, Any]:
    """The engine's router and ours, with the identity as the gate's weight."""
    forget_logged_losses()
    routers = []
    for made in (EngineRouter, TopKRouter):
        router = made(router_config(num_experts, **changes), pg_collection)
        with torch.no_grad():
            router.weight.copy_(torch.eye(num_experts))
        router.set_layer_number(1)
        routers.append(router.train())
    return routers[0], routers[1]


def one_hot_logits(choices: list[int], num_experts: int, height: float = 4.0) -> torch.Tensor:
    """hidden [T, 1, E] that sends token t to expert choices[t], with the identity as the gate."""
    return height * torch.nn.functional.one_hot(torch.tensor(choices), num_experts).float().unsqueeze(1)


def attached_gradient(router: Any, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
    """The gradient [E, H] that attached losses alone give the gate, as one rank has it."""
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    router.weight.grad = None
    probs, _ = router(hidden, **options)
    (probs.sum() * 0).backward()
    return router.weight.grad.clone()


def forget_logged_losses() -> None:
    """The engine keeps them in a global of the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        moe_utils.clear_aux_losses_tracker()


def engine_logged(name: str, pg_collection: Any) -> float:
    """What the engine would log of its routers' losses since the last call, after its reduction over ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        moe_utils.reduce_aux_losses_tracker_across_ranks([name], pg_collection=pg_collection)
        value = float(moe_utils.get_moe_layer_wise_logging_tracker()[name]["values"][0])
    forget_logged_losses()
    return value
