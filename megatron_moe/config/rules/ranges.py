"""Rules about single values: the range of each number, and the list of each choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, choice_suggestion
from megatron_moe.config.rules.rule import rule, source, value
from megatron_moe.config.schema import Run


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers; `above` and `below` are excluded bounds, `low` and `high` included ones."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def holds(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        words = [
            f"{word} {bound:.15g}"
            for word, bound in (
                ("at least", self.low),
                ("above", self.above),
                ("at most", self.high),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " and ".join(words)


_POSITIVE_COUNT = Range(low=1)
_COUNT = Range(low=0)
_POSITIVE = Range(above=0)
_NOT_NEGATIVE = Range(low=0)
_PROBABILITY = Range(low=0, below=1)

# Every numeric field that has no rule of its own; a test checks that the list is complete.
RANGES: dict[str, Range] = {
    "num_layers": Range(low=1, high=10_000),
    "mtp_num_layers": _POSITIVE_COUNT,
    "mtp_loss_scaling_factor": _NOT_NEGATIVE,
    "moe_input_jitter_eps": Range(above=0, below=1),
    "moe_expert_capacity_factor": _POSITIVE,
    "num_layers_at_start_in_bf16": _NOT_NEGATIVE,
    "num_layers_at_end_in_bf16": _NOT_NEGATIVE,
    "hidden_size": _POSITIVE_COUNT,
    "ffn_hidden_size": _POSITIVE_COUNT,
    "num_attention_heads": _POSITIVE_COUNT,
    "num_query_groups": _POSITIVE_COUNT,
    "kv_channels": _POSITIVE_COUNT,
    "seq_length": _POSITIVE_COUNT,
    "max_position_embeddings": _POSITIVE_COUNT,
    "rotary_base": Range(above=1),
    "rotary_percent": Range(above=0, high=1),
    "rotary_scaling_factor": Range(low=1),
    "original_max_position_embeddings": _POSITIVE_COUNT,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": _POSITIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "norm_epsilon": _POSITIVE,
    "q_lora_rank": _POSITIVE_COUNT,
    "kv_lora_rank": _POSITIVE_COUNT,
    "qk_head_dim": _POSITIVE_COUNT,
    "qk_pos_emb_head_dim": _POSITIVE_COUNT,
    "v_head_dim": _POSITIVE_COUNT,
    "attention_dropout": _PROBABILITY,
    "hidden_dropout": _PROBABILITY,
    "init_method_std": _POSITIVE,
    "vocab_size": _POSITIVE_COUNT,
    "make_vocab_size_divisible_by": _POSITIVE_COUNT,
    "padded_vocab_size": _POSITIVE_COUNT,
    "tiktoken_num_special_tokens": _POSITIVE_COUNT,
    "cross_entropy_chunk_tokens": _POSITIVE_COUNT,
    "num_experts": Range(low=2),
    "moe_ffn_hidden_size": _POSITIVE_COUNT,
    "moe_router_topk": _POSITIVE_COUNT,
    "moe_router_num_groups": _POSITIVE_COUNT,
    "moe_router_group_topk": _POSITIVE_COUNT,
    "moe_router_topk_scaling_factor": _POSITIVE,
    "moe_router_bias_update_rate": _NOT_NEGATIVE,
    "moe_aux_loss_coeff": _NOT_NEGATIVE,
    "moe_z_loss_coeff": _NOT_NEGATIVE,
    "moe_shared_expert_intermediate_size": _POSITIVE_COUNT,
    "moe_deepep_num_sms": Range(low=2),
    "moe_hybridep_num_sms": _POSITIVE_COUNT,
    "tensor_model_parallel_size": _POSITIVE_COUNT,
    "pipeline_model_parallel_size": _POSITIVE_COUNT,
    "num_layers_per_virtual_pipeline_stage": _POSITIVE_COUNT,
    "num_virtual_stages_per_pipeline_rank": _POSITIVE_COUNT,
    "decoder_first_pipeline_num_layers": _POSITIVE_COUNT,
    "decoder_last_pipeline_num_layers": _POSITIVE_COUNT,
    "context_parallel_size": _POSITIVE_COUNT,
    "expert_model_parallel_size": _POSITIVE_COUNT,
    "expert_tensor_parallel_size": _POSITIVE_COUNT,
    "distributed_timeout_minutes": _POSITIVE,
    "ddp_bucket_size": _POSITIVE_COUNT,
    "zero_hpz_partition_size": Range(low=2),
    "loss_scale": _POSITIVE,
    "initial_loss_scale": _POSITIVE,
    "min_loss_scale": _POSITIVE,
    "loss_scale_window": _POSITIVE_COUNT,
    "hysteresis": _POSITIVE_COUNT,
    "check_precision_interval": _COUNT,
    "lr": _POSITIVE,
    "min_lr": _NOT_NEGATIVE,
    "decoupled_lr": _POSITIVE,
    "decoupled_min_lr": _NOT_NEGATIVE,
    "lr_decay_iters": _POSITIVE_COUNT,
    "lr_decay_samples": _POSITIVE_COUNT,
    "lr_warmup_samples": _COUNT,
    "lr_wsd_decay_samples": _POSITIVE_COUNT,
    "train_samples": _POSITIVE_COUNT,
    "lr_warmup_iters": _COUNT,
    "lr_warmup_fraction": _PROBABILITY,
    "lr_warmup_init": _NOT_NEGATIVE,
    "lr_wsd_decay_iters": _POSITIVE_COUNT,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _PROBABILITY,
    "adam_beta2": _PROBABILITY,
    # fp32's smallest normal number: less is 0 to a kernel, and an element without a gradient would become 0 / 0.
    "adam_eps": Range(low=2.0**-126),
    "muon_momentum": _PROBABILITY,
    "muon_num_ns_steps": Range(low=1, high=100),
    "muon_extra_scale_factor": _POSITIVE,
    "qk_clip_alpha": Range(low=0, high=1),
    "qk_clip_threshold": _POSITIVE,
    "ema_decay": Range(above=0, below=1),
    "clip_grad": _NOT_NEGATIVE,
    "micro_batch_size": Range(low=1, high=2**24),
    "global_batch_size": Range(low=1, high=2**24),
    "rampup_batch_size": _POSITIVE_COUNT,
    "train_iters": Range(low=1, high=10**12),
    "min_offloaded_tensor_size": _POSITIVE_COUNT,
    "eval_interval": _COUNT,
    "eval_iters": _COUNT,
    "seed": Range(low=0, below=2**31),
    "exit_interval": _POSITIVE_COUNT,
    "manual_gc_interval": _COUNT,
    "tensorboard_log_interval": _POSITIVE_COUNT,
    "tensorboard_queue_size": _POSITIVE_COUNT,
    "profile_step_start": _COUNT,
    "profile_step_end": _POSITIVE_COUNT,
    "profile_ranks": _COUNT,
    "keep_last_k": _POSITIVE_COUNT,
    "check_weight_hash_across_dp_replicas_interval": _POSITIVE_COUNT,
    "loss_spike_factor": _POSITIVE,
    "exit_duration_in_mins": _POSITIVE,
    "recompute_num_layers": _POSITIVE_COUNT,
    "num_workers": _COUNT,
    "data_verify_gb": _NOT_NEGATIVE,
    "save_interval": _POSITIVE_COUNT,
    "save_retain_interval": _POSITIVE_COUNT,
    "ckpt_step": _COUNT,
    "log_interval": _POSITIVE_COUNT,
    "health_interval": _COUNT,
    "health_sample_tokens": _POSITIVE_COUNT,
    "sample_tokens": _POSITIVE_COUNT,
    "peak_tflops": _POSITIVE,
}


@rule()
def choices_are_known(run: Run, world_size: int) -> None:
    """Require a listed value where a field has choices, also where no command line was read."""
    found = {}
    for name, field in all_fields().items():
        given = value(run, name)
        for word in given if isinstance(given, tuple) else (given,):
            if field.choices is not None and word is not None and word not in field.choices:
                listed = ", ".join(map(str, field.choices))
                near = choice_suggestion(str(word), map(str, field.choices))
                found[name] = f"{field.flag} {word}: not one of {listed}{near}"
    if found:
        raise ConfigError(*found.values(), fields=found)


@rule()
def numbers_are_in_range(run: Run, world_size: int) -> None:
    """Require sizes and counts that are positive, rates and coefficients that are not negative, all finite."""
    found = {}
    for name, allowed in RANGES.items():
        given = value(run, name)
        for number in given if isinstance(given, tuple) else (given,):
            if number is not None and not allowed.holds(number):
                finite = "" if math.isfinite(number) else "finite and "
                found[name] = (
                    f"{all_fields()[name].flag} {number}{source(run, name)}: must be {finite}{allowed};"
                    f" e.g. {_working(name, allowed)}"
                )
    if found:
        raise ConfigError(*found.values(), fields=found)


_USUAL = {"ema_decay": 0.9999, "decoupled_lr": 1e-4}


def _working(name: str, allowed: Range) -> str:
    """Return a setting in the range: the default, a usual one, or a number near the lowest."""
    field = all_fields()[name]
    tried = (field.default, allowed.low, _USUAL.get(name), 1, 2, 0.1)
    return f"{field.flag} {next(n for n in tried if isinstance(n, (int, float)) and allowed.holds(n)):g}"
