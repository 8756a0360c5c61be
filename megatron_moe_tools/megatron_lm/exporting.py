"""What a checkpoint of Megatron-LM holds besides tensors: its arguments, its marks, and a value for each layer.

Weights alone are written as a `release`, Megatron-LM's form without optimizer and iteration: it loads them as they are,
in any layout, and starts at iteration 0. A step with an optimizer keeps its number; a distributed optimizer loads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.schema import Run, flatten
from megatron_moe.hf.transforms import Shape
from megatron_moe_tools.megatron_lm import names, optimizer
from megatron_moe_tools.megatron_lm.contents import Progress, weight_of

RELEASE = "release"
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"} | {
    "common_backend_version": 1
}
"""The content of `metadata.json`."""
_CONTENT = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""How tensors are named, which Megatron-LM reads before it asks for them: layers by their number."""
_NOT_THERE = frozenset({"moe_router_group_score", "moe_router_norm_topk_prob"})
"""Settings that Megatron-LM has no argument for."""


@dataclass(frozen=True)
class Continued:
    """What a run goes on from besides its weights.

    Attributes:
        progress: how far it had come.
        updates: of the optimizer.
        scheduler: our schedule's state, which counts iterations.
        batch: sequences of an iteration.
        experts_apart: whether experts are spread over ranks there, and then have an optimizer of their own.
    """

    progress: Progress
    updates: int
    scheduler: Mapping[str, Any]
    batch: int
    experts_apart: bool


def common(run: Run, *, transformer_impl: str, half: str | None, continued: Continued | None) -> dict[str, Any]:
    """Return the plain values of a checkpoint that Megatron-LM loads.

    Args:
        run: the model's settings and, if it is continued, the optimizer's.
        transformer_impl: whose layers it is to be loaded into.
        half: `bf16` or `fp16`, the dtype of the weights; None for fp32.
        continued: None for weights alone.
    """
    progress = Progress(0, 0) if continued is None else continued.progress
    flat = {name: value for name, value in flatten(run).items() if name in architecture_keys()}
    values = {name: value for name, value in flat.items() if name not in _NOT_THERE}
    values |= {
        "layernorm_epsilon": run.model.norm_epsilon,
        "kv_channels": run.derived.head_size,
        "ffn_hidden_size": run.derived.ffn_hidden_size,
        "moe_ffn_hidden_size": run.derived.moe_ffn_hidden_size if run.moe.num_experts is not None else None,
        "num_query_groups": run.derived.num_query_groups,
        "moe_layer_freq": list(run.derived.moe_layer_pattern) if run.moe.num_experts is not None else 1,
        "moe_grouped_gemm": run.moe.num_experts is not None,
        "seq_length": run.model.seq_length,
        "max_position_embeddings": run.model.max_position_embeddings or run.model.seq_length,
        "make_vocab_size_divisible_by": run.model.make_vocab_size_divisible_by,
        "padded_vocab_size": run.model.padded_vocab_size,
        "add_position_embedding": True,
        "transformer_impl": transformer_impl,
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "ckpt_format": "torch_dist",
        "no_save_optim": continued is None,
        "no_save_rng": True,
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    values |= dict.fromkeys((*layout, "context_parallel_size", "world_size", "data_parallel_size"), 1)
    args = argparse.Namespace(**values)
    found = {"args": args, "checkpoint_version": 3.0, "iteration": progress.iteration}
    found["content_metadata"] = dict(_CONTENT)
    if continued is None:
        return found
    sharding = {"param_state_sharding_type": _CONTENT["distrib_optim_sharding_type"]}
    plain = optimizer.plain_values(run, continued.updates)
    groups = [plain[0], plain[1]] if 0 in plain else [plain]  # the second has the experts
    parts = {number: {**one, **sharding} for number, one in enumerate(groups)}
    own = parts if continued.experts_apart and len(parts) > 1 else parts[0]
    return {**found, "optimizer": own, "opt_param_scheduler": _scheduler(continued)}


def _scheduler(continued: Continued) -> dict[str, Any]:
    """Return the schedule's state there, where it counts sequences."""
    own = dict(continued.scheduler)
    batch = 1 if own.pop("in_samples", False) else continued.batch
    lengths = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
    return {
        **own,
        **{name: own[name] * batch for name in lengths},
        "num_steps": continued.progress.consumed_samples,
    }


def shape_there(key: str, shape: Shape) -> Shape:
    """Return the shape in Megatron-LM's checkpoints of one of our tensors, or of a box of whole experts of it."""
    return (shape[0], shape[1] * shape[2], shape[3]) if key.endswith(".mlp.experts.weight1") else shape


def name_there(key: str, run: Run, transformer_impl: str) -> str:
    """Return the name in Megatron-LM's checkpoints of one of our weights, or of what the optimizer has for it."""
    weight = weight_of(key)
    layer = names.layer_of(weight)
    pattern = run.derived.moe_layer_pattern
    return key.removesuffix(weight) + names.theirs(
        weight,
        transformer_engine=transformer_impl == "transformer_engine",
        latent=run.model.multi_latent_attention,
        moe=bool(pattern[-1 if layer is None else layer]),
    )


def extra_states(shapes: Mapping[str, Shape], run: Run) -> list[str]:
    """Return the names of the values that layers ask for and that are empty without FP8, whosever layers they are."""
    found: dict[str, None] = {}
    for key, shape in shapes.items():
        there = names.theirs(key, transformer_engine=False, latent=True, moe=True)
        module = there.removesuffix(".weight").removesuffix(".bias")
        if module == there or key.endswith("mlp.router.weight"):
            continue
        if key.endswith((".experts.weight1", ".experts.weight2")):
            found |= dict.fromkeys(f"{module}._extra_state/shard_{expert}_{shape[0]}" for expert in range(shape[0]))
            continue
        found[f"{module}._extra_state/shard_0_1"] = None
        if module.endswith("self_attention.linear_proj"):
            found[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_0_1"] = None
    return list(found)
