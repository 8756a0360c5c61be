"""Does a checkpoint's configuration fit the run that loads it? No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.module_names import kept_in_fp32
from megatron_moe.config.schema import ModelConfig, MoEConfig, Run, flatten, replace

_FREE = {
    # may differ between the runs that share a checkpoint: they change neither a weight's shape nor its meaning
    "seq_length",
    "max_position_embeddings",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "mtp_loss_scaling_factor",
    "attention_softmax_in_fp32",
    "make_vocab_size_divisible_by",
    "transformer_impl",
    "cross_entropy_loss_fusion",
    "cross_entropy_chunk_tokens",
    "moe_router_bias_update_rate",
    "moe_router_bias_center",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_global_aux_loss_counts",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
    "moe_router_force_load_balancing",
    "moe_token_dispatcher_type",
    "moe_expert_backend",
}
_TRAINING_STATE = ("bf16", "fp16")
"""Settings that the optimizer's state depends on; free where only weights are loaded."""

_NOT_TOLD = {
    "load",
    "load_hf",
    "use_checkpoint_args",
    "save",
    "ckpt_step",
    "metrics_file",
    "plot_file",
    "summary_file",
    "tensorboard_dir",
    "dry_run",
}


def architecture_keys() -> list[str]:
    """The configuration keys that a checkpoint and the run that loads it must agree on."""
    names = [field.name for section in (ModelConfig, MoEConfig) for field in dataclasses.fields(section)]
    return [name for name in names if name not in _FREE]


def check_matches(run: Run, saved: dict[str, Any], where: str, *, weights_only: bool = False) -> None:
    """Refuse a checkpoint of another model, or of another kind of optimizer state.

    Keys that the checkpoint does not have, because it is older than they are, are not compared.

    Args:
        weights_only: it was converted, and holds no optimizer's state.

    Raises:
        ConfigError: with every key that differs.
    """
    current = flatten(run)
    keys = architecture_keys()
    if weights_only or not (run.checkpoint.finetune or run.checkpoint.no_load_optim):
        keys = [*keys, *_TRAINING_STATE]
    differing = [name for name in keys if name in saved and saved[name] != current[name]]
    if not differing and _kept_otherwise(run, saved):
        differing = ["keep_fp32"]
    if not differing:
        return
    lines = [f"  --{name.replace('_', '-')}: checkpoint {saved[name]}, this run {current[name]}" for name in differing]
    hint = "use the checkpoint's values, which --use-checkpoint-args takes, or another folder"
    if differing == ["keep_fp32"]:
        hint = "use the checkpoint's value: its weights have these dtypes, and weights are never cast silently"
    elif all(name in _TRAINING_STATE for name in differing):
        hint = "use the checkpoint's values, or load the weights alone with --finetune or --no-load-optim"
        if weights_only:
            hint = "weights are never cast silently: use its dtype, or convert them to another with --dtype"
    raise ConfigError("\n".join([f"--load {where}: the checkpoint does not fit this run; {hint}:", *lines]))


def _kept_otherwise(run: Run, saved: dict[str, Any]) -> bool:
    """Whether other modules are fp32 in the checkpoint; other words for the same modules make no difference."""
    half = run.precision.bf16 or run.precision.fp16
    if not half or "keep_fp32" not in saved:
        return False
    patterns = saved["keep_fp32"]
    before = replace(run, keep_fp32=None if patterns is None else tuple(patterns))
    return kept_in_fp32(run) != kept_in_fp32(before)


def changed_settings(run: Run, saved: dict[str, Any]) -> list[str]:
    """What else differs and is allowed to, as `name: old -> new`; worth telling on a resume."""
    current = flatten(run)
    return [
        f"{name}: {saved[name]} -> {current[name]}"
        for name in sorted(saved.keys() & current.keys() - _NOT_TOLD)
        if saved[name] != current[name]
    ]
