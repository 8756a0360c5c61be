"""The engine's own router and ours side by side, for the tests that show the engine's defects."""

import warnings
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter as EngineRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe import TopKRouter
from megatron_moe.engine.defects import engine_version, known_defects
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers import routers

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def present(name: str) -> bool:
    """Whether the table says that the engine in use has this defect: what its own code has to show."""
    (defect,) = [defect for defect in known_defects() if defect.id == name]
    return defect.is_present(engine_version())


def small_config(**changes: Any) -> TransformerConfig:
    """A dense model of the engine."""
    values: dict[str, Any] = dict(
        num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, add_bias_linear=False
    )
    return TransformerConfig(**{**values, **changes})


def engine_linear(config: Any, group: Any, **options: Any) -> ColumnParallelLinear:
    """A linear layer of the engine, [8, 8]."""
    return ColumnParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=False, tp_group=group, **options
    )


def router_config(num_experts: int, **changes: Any) -> TransformerConfig:
    """A router whose gate can hand on its input as the logits: as wide as there are experts."""
    sizes = {"hidden_size": num_experts, "num_moe_experts": num_experts, "moe_router_topk": 1}
    return routers.config(**{**sizes, "moe_router_enable_expert_bias": False, **changes})


def both_routers(pg_collection: Any, num_experts: int, **changes: Any) -> tuple[Any, Any]:
    """The engine's router and ours, with the identity as the gate's weight."""
    forget_logged_losses()
    both = []
    for made in (EngineRouter, TopKRouter):
        router = made(router_config(num_experts, **changes), pg_collection)
        with torch.no_grad():
            router.weight.copy_(torch.eye(num_experts))
        router.set_layer_number(1)
        both.append(router.train())
    return both[0], both[1]


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


def our_loss(router: Any, name: str) -> float:
    """What our update of the router reports of a loss."""
    return float(update_routers([router]).aux_losses[0][name])
