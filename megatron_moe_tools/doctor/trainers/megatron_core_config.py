"""What a run asks of megatron-core: a small layout, the engine's own configuration, and what of it is not checked."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import QUANTILE
from megatron_moe.config.schema import Run, flatten
from megatron_moe_tools.doctor.small_copy import AUX_LOSS_COEFF, Z_LOSS_COEFF

MOST_RANKS = 4
_RENAMED = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
_OWN_WAY = frozenset(
    "activation_func attention_backend moe_layer_freq moe_router_load_balancing_type moe_aux_loss_coeff"
    " moe_enable_routing_replay recompute_modules transformer_impl window_size window_attn_skip_freq".split()
)
"""Fields of a run that have another meaning or type in the engine's configuration."""
_DISPATCHERS = ("allgather", "alltoall")
# What a script may ask for, and cannot be built from the engine's own parts on a CPU.
_REFUSED = {
    "multi_latent_attention": "the engine's latent attention needs Transformer Engine",
    "mtp_num_layers": "the engine's multi-token prediction needs Transformer Engine",
    "window_size": "the engine's attention without Transformer Engine has no window",
    "dsa_indexer_topk": "the engine's sparse attention needs Transformer Engine",
    "use_torch_fsdp2": "the engine's fully sharded models need CUDA",
}


def reduced_layout(run: Run) -> dict[str, int]:
    """Return the sizes of the run's axes, each at most 2."""
    parallel, etp = run.parallel, run.derived.expert_tensor_parallel_size
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    sizes += (parallel.expert_model_parallel_size, etp)
    return {axis: min(size, 2) for axis, size in zip(("tp", "pp", "ep", "etp"), sizes)}


def ranks_of(layout: dict[str, int]) -> int:
    """Return the ranks that the layout takes at least.

    Raises:
        ConfigError: there are more than are started.
    """
    ranks = layout["pp"] * math.lcm(layout["tp"], layout["ep"] * layout["etp"])
    if ranks > MOST_RANKS:
        sizes = " ".join(f"{axis.upper()} {size}" for axis, size in layout.items())
        raise ConfigError(
            f"the layout cut to {sizes} takes {ranks} ranks; at most {MOST_RANKS} are started: check "
            "--pipeline-model-parallel-size 1, or --expert-tensor-parallel-size 1, and the rest for itself"
        )
    return ranks


def left_out(run: Run) -> dict[str, str]:
    """Return the names of checks and other things that are not checked, with the reason; refuse what cannot run."""
    given, defaults = flatten(run), flatten(Run())
    for name, reason in _REFUSED.items():
        if given[name] != defaults[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: is not checked; {reason}. Leave it out of the file")
    kinds = run.moe.moe_router_load_balancing_type
    if {QUANTILE} & set(kinds):
        raise ConfigError("--moe-router-load-balancing-type quantile_balancing: is not the engine's")
    padding = "Megatron-LM's batches have none; routers are told of none"
    found = {"padding": padding, "padding-contents": padding}
    if run.moe.moe_expert_capacity_factor is not None:
        found["micro-batches"] = "a capacity is one of each micro-batch"
        if run.moe.moe_token_drop_policy != "position":
            found["later-tokens"] = "a capacity lets later tokens displace earlier ones"
    elif {"aux_loss", "global_aux_loss", "sinkhorn"} & set(kinds) and run.moe.num_experts is not None:
        found["micro-batches"] = f"{', '.join(kinds)} balances each micro-batch"
    dispatcher, optimizer = run.moe.moe_token_dispatcher_type, run.optimizer.optimizer
    others = {
        "context parallelism": (
            run.parallel.context_parallel_size > 1,
            "attention without Transformer Engine refuses it",
        ),
        "norms' marks for sequence parallelism": (
            run.parallel.sequence_parallel,
            "norms without Transformer Engine set none",
        ),
        "virtual pipeline stages": (run.derived.virtual_pipeline_size is not None, "each rank has one stage"),
        f"optimizer {optimizer}": (optimizer != "adam", "Adam steps in its place"),
        "grouped GEMM": (run.moe.num_experts is not None, "experts multiply one after the other"),
        f"dispatcher {dispatcher}": (dispatcher not in _DISPATCHERS, "needs CUDA; alltoall takes its place"),
        "--overlap-param-gather": (run.parallel.overlap_param_gather, "weights are gathered after the step"),
    }
    return found | {name: reason for name, (given, reason) in others.items() if given}


def config_fields(run: Run, copy: Run, layout: dict[str, int], plain: bool) -> dict[str, Any]:
    """Return the fields of the engine's configuration.

    Args:
        run: what the file says. copy: its small copy.
        plain: whether nothing is recomputed, and experts are reached in the simplest way: one process.
    """
    known = {one.name for one in fields(TransformerConfig)}
    found: dict[str, Any] = {}
    for name, value in flatten(copy).items():
        engine_name = _RENAMED.get(name, name)
        if engine_name in known and value is not None and name not in _OWN_WAY:
            found[engine_name] = value
    derived, model, moe = copy.derived, copy.model, run.moe
    found |= {
        "num_layers": len(derived.moe_layer_pattern) if len(set(derived.moe_layer_pattern)) > 1 else 2,
        "ffn_hidden_size": derived.ffn_hidden_size,
        "num_query_groups": max(derived.num_query_groups, 2),  # the engine wants one on each TP rank
        "kv_channels": derived.head_size,
        "gated_linear_unit": derived.gated,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        "tensor_model_parallel_size": layout["tp"],
        "sequence_parallel": run.parallel.sequence_parallel and layout["tp"] > 1,
        "pipeline_model_parallel_size": layout["pp"],
        "expert_model_parallel_size": layout["ep"],
        "expert_tensor_parallel_size": layout["etp"],
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": False,  # gloo may still read them
    }
    if run.training.recompute_modules is not None:
        found["recompute_modules"] = list(run.training.recompute_modules)
    if plain:
        found["recompute_granularity"] = found["recompute_method"] = found["recompute_num_layers"] = None
    if moe.num_experts is None:
        return found
    kinds, coefficients = list(moe.moe_router_load_balancing_type), []
    for value in moe.moe_aux_loss_coeff:
        coefficients.append(value and max(value, AUX_LOSS_COEFF))
    balancing: Any = (kinds, coefficients)
    if len(kinds) == 1:  # then the engine wants no lists
        balancing = (kinds[0], coefficients[0])
    dispatcher = moe.moe_token_dispatcher_type
    if dispatcher not in _DISPATCHERS:
        dispatcher = "alltoall"
    if plain and moe.moe_expert_capacity_factor is None:
        dispatcher = "allgather"
    found |= {
        "moe_layer_freq": list(derived.moe_layer_pattern)[: found["num_layers"]],
        "moe_ffn_hidden_size": derived.moe_ffn_hidden_size,
        "moe_router_load_balancing_type": balancing[0],
        "moe_aux_loss_coeff": balancing[1],
        "moe_z_loss_coeff": moe.moe_z_loss_coeff and max(moe.moe_z_loss_coeff, Z_LOSS_COEFF),
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": False,
        "moe_shared_expert_overlap": False,  # needs CUDA's streams
    }
    return found
