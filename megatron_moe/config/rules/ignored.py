"""Settings that Megatron-LM accepts and does not read: they are left out with a note, where others are refused.

Each function looks at the settings as given and returns what to change in them, and the note. A run that a program
builds by hand is not changed: there, the rules refuse these settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.rules.activations import NOT_KEPT
from megatron_moe.config.run_flags import TIKTOKEN_FIELDS

Given = dict[str, Any]
Change = tuple[Given, str]
"""New values by field, and the note."""

YARN_FIELDS = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)

LOADING = ("finetune", "no_load_optim", "no_load_rng", "ckpt_step", "exit_on_missing_checkpoint")
"""How a checkpoint is loaded."""

SAVING = ("save_interval", "save_retain_interval", "no_save_optim", "no_save_rng", "async_save")
"""How a checkpoint is saved, in Megatron-LM too."""

READ_WITH = {
    "fine_grained_activation_offloading": ("offload_modules",),
    "manual_gc": ("manual_gc_interval", "manual_gc_eval"),
    "profile": ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
    "qk_clip": ("qk_clip_alpha", "qk_clip_threshold"),
    "tensorboard_dir": ("tensorboard_queue_size",),
    "wandb_project": ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
}
"""Flag -> those that are read with it alone, in Megatron-LM too."""

SCALARS = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_world_size_to_tensorboard",
)
"""What is read where scalars go to TensorBoard, Weights & Biases or MLflow."""
_TAKE_SCALARS = ("tensorboard_dir", "wandb_project", "mlflow_experiment")


def unread(value: Callable[[str], Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a flag that is not given, by its value, and those that are not read without it."""
    for flag, names in READ_WITH.items():
        if not value(flag):
            yield flag, names
    if not any(value(flag) for flag in _TAKE_SCALARS):
        yield _TAKE_SCALARS[0], SCALARS


def as_megatron_reads(given: Given) -> tuple[Given, tuple[str, ...]]:
    """Return the settings without those that Megatron-LM accepts and ignores, with a note for each change."""
    notes: list[str] = []
    for ignored in _IGNORED:
        change = ignored(given)
        if change is not None:
            given = {**given, **change[0]}
            notes.append(change[1])
    return given, tuple(notes)


def _value(given: Given, name: str) -> Any:
    return given.get(name, all_fields()[name].default)


def _set_among(given: Given, names: Iterable[str]) -> list[str]:
    """Return those of the names whose given value is not the default."""
    return [name for name in names if _value(given, name) != all_fields()[name].default]


def _typed(given: Given, names: Iterable[str]) -> str:
    return ", ".join(all_fields()[name].typed(given[name]) for name in names)


def _left_out(names: Iterable[str]) -> Given:
    return {name: all_fields()[name].default for name in names}


def sequence_parallelism_of_one_rank(given: Given) -> Change | None:
    """Switch sequence parallelism off without TP, since it splits activations over the TP ranks."""
    if not _value(given, "sequence_parallel") or _value(given, "tensor_model_parallel_size") != 1:
        return None
    return {"sequence_parallel": False}, "--sequence-parallel: is off, as in Megatron-LM: there is one TP rank"


def heads_of_latent_attention(given: Given) -> Change | None:
    """Leave out what describes the heads of other attention; latent attention has widths of its own."""
    names = _set_among(given, ("kv_channels", "group_query_attention", "num_query_groups", "add_qkv_bias"))
    if not names or not _value(given, "multi_latent_attention"):
        return None
    return _left_out(names), (
        f"{_typed(given, names)}: left out, latent attention does not read it, in Megatron-LM neither; its heads have"
        " --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim"
    )


def yarn_of_latent_attention(given: Given) -> Change | None:
    """Take yarn where a factor is given for latent attention, as Megatron-LM does by default.

    At factor 1 yarn is the plain rotation, whatever its other settings say.
    """
    names = _set_among(given, YARN_FIELDS)
    if not names or _value(given, "rope_type") == "yarn":
        return None
    if not _value(given, "multi_latent_attention"):
        return _left_out(names), (
            f"{_typed(given, names)}: LEFT OUT, positions are rotated plainly: latent attention alone reads it, in"
            " Megatron-LM too"
        )
    if given.get("rope_type") is not None:
        return _left_out(names), f"{_typed(given, names)}: LEFT OUT, --rope-type rope rotates plainly; yarn reads it"
    if "rotary_scaling_factor" in names:
        return {"rope_type": "yarn"}, (
            f"{_typed(given, names)}: --rope-type yarn is TAKEN, which is Megatron-LM's default for latent attention;"
            " give --rope-type rope for the plain rotation"
        )
    return _left_out(names), f"{_typed(given, names)}: left out, at --rotary-scaling-factor 1 yarn rotates plainly"


def softmax_before_other_scores(given: Given) -> Change | None:
    """Leave out the place of the softmax where scores are none."""
    if not _value(given, "moe_router_pre_softmax") or _value(given, "moe_router_score_function") == "softmax":
        return None
    return {"moe_router_pre_softmax": False}, (
        f"--moe-router-pre-softmax: left out, --moe-router-score-function {given['moe_router_score_function']} has no"
        " softmax to place; Megatron-LM does not read it either"
    )


def kernel_of_the_local_attention(given: Given) -> Change | None:
    """Leave out the kernel of Transformer Engine's attention where attention is torch's."""
    backend = _value(given, "attention_backend")
    if backend == "auto" or _value(given, "transformer_impl") != "local":
        return None
    return {"attention_backend": "auto"}, (
        f"--attention-backend {backend}: left out, Transformer Engine's attention reads it; that of --transformer-impl"
        " local takes the kernel of torch's scaled_dot_product_attention that fits"
    )


def losses_without_weight(given: Given) -> Change | None:
    """Leave out auxiliary losses whose coefficient is 0."""
    kinds, coeffs = _value(given, "moe_router_load_balancing_type"), _value(given, "moe_aux_loss_coeff")
    idle = [kind for kind, coeff in zip(kinds, coeffs) if kind not in ("none", "sinkhorn") and not coeff]
    if not idle or len(kinds) != len(coeffs) or _value(given, "num_experts") is None:
        return None
    rest = [(kind, coeff) for kind, coeff in zip(kinds, coeffs) if kind not in idle] or [("none", 0.0)]
    return {
        "moe_router_load_balancing_type": tuple(kind for kind, _ in rest),
        "moe_aux_loss_coeff": tuple(coeff for _, coeff in rest),
    }, (
        f"--moe-router-load-balancing-type {' '.join(idle)}: NOT ADDED, its coefficient is 0, Megatron-LM's default;"
        " --moe-aux-loss-coeff 0.01 adds it"
    )


def coefficients_without_losses(given: Given) -> Change | None:
    """Leave out coefficients where the command says that there is no auxiliary loss.

    Where it does not say so, Megatron-LM has one.
    """
    if given.get("moe_router_load_balancing_type") != ("none",) or not any(_value(given, "moe_aux_loss_coeff")):
        return None
    names = ["moe_aux_loss_coeff"]
    return _left_out(names), f"{_typed(given, names)}: LEFT OUT, --moe-router-load-balancing-type none has no loss"


def _shards_gradients(given: Given) -> bool:
    """Return whether gradients are sharded: ZeRO stage 2 or 3."""
    strategy = _value(given, "data_parallel_sharding_strategy")
    return strategy in SHARDING_STRATEGIES[2:] or bool(_value(given, "use_torch_fsdp2"))


def buckets_of_sharded_gradients(given: Given) -> Change | None:
    """Leave out the overlap of the engine's buckets from ZeRO stage 2 on, which has none and overlaps by itself."""
    names = _set_among(given, ("overlap_grad_reduce", "overlap_param_gather"))
    if not names or not _shards_gradients(given):
        return None
    return _left_out(names), (
        f"{_typed(given, names)}: always so from ZeRO stage 2 on: each layer is gathered and reduced behind the"
        " computation of the next"
    )


def overlap_of_sharded_layers(given: Given) -> Change | None:
    """Leave out from ZeRO stage 2 on the overlap of two micro-batches, which takes sharded layers apart."""
    names = _set_among(given, ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"))
    if "overlap_moe_expert_parallel_comm" not in names or not _shards_gradients(given):
        return None
    return _left_out(names), (
        f"{_typed(given, names)}: NOT OVERLAPPED from ZeRO stage 2 on, where a layer's weights are gathered when it is"
        " called as a whole; the numbers are the same"
    )


def offload_of_overlapping_batches(given: Given) -> Change | None:
    """Leave out the offload of activations where micro-batches overlap, whose layers are computed in parts."""
    names = _set_among(given, ("fine_grained_activation_offloading", "offload_modules"))
    if len(names) < 2 or not _value(given, "overlap_moe_expert_parallel_comm"):
        return None
    return _left_out(names), (
        f"{_typed(given, names)}: ACTIVATIONS STAY ON THE DEVICE and take its memory, since"
        " --overlap-moe-expert-parallel-comm computes layers in parts; the numbers are the same"
    )


def offload_of_what_is_not_kept(given: Given) -> Change | None:
    """Leave out of the offloaded modules those whose inputs are recomputed."""
    modules, recomputed = _value(given, "offload_modules") or (), _value(given, "recompute_modules") or ()
    lost = [name for module in recomputed for name in NOT_KEPT.get(module, ()) if name in modules]
    if not lost:
        return None
    left = tuple(name for name in modules if name not in lost)
    changed = {"offload_modules": left} if left else {"fine_grained_activation_offloading": False}
    return {"offload_modules": None, **changed}, (
        f"{_typed(given, ['offload_modules'])}: without {' '.join(lost)}, which"
        f" {_typed(given, ['recompute_modules'])} does not keep"
    )


def weights_in_fp8(given: Given) -> Change | None:
    """Store and gather in the model's dtype what Megatron-LM stores in FP8: a product rounds the weight itself."""
    if not _value(given, "fp8_param_gather"):
        return None
    return {"fp8_param_gather": False}, (
        "--fp8-param-gather: NOT STORED IN FP8, weights are stored and gathered in the model's dtype and rounded to FP8"
        " for a product, which is more exact and takes more memory and traffic"
    )


def later_gradients_of_fp8_products(given: Given) -> Change | None:
    """Compute the gradients of FP8 products' weights in their place: they are found together with those of rows."""
    if not _value(given, "delay_wgrad_compute") or _value(given, "fp8_format") is None:
        return None
    return {"delay_wgrad_compute": False}, (
        "--delay-wgrad-compute: left out, FP8 products find the gradients of rows and weights together; the numbers are"
        " the same"
    )


def tokenizer_of_the_gpt_files(given: Given) -> Change | None:
    """Take the tokenizer that Megatron-LM's pretrain_gpt.py has by default, where its two files are given."""
    files = (_value(given, "vocab_file"), _value(given, "merge_file"))
    if _value(given, "tokenizer_type") is not None or None in files:
        return None
    return {"tokenizer_type": "GPT2BPETokenizer"}, (
        f"{_typed(given, ('vocab_file', 'merge_file'))}: --tokenizer-type GPT2BPETokenizer is TAKEN, the default of"
        " Megatron-LM's pretrain_gpt.py"
    )


def split_that_counts_embedding_and_loss(given: Given) -> Change | None:
    """Write as letters a split of the pipeline in which the embedding or the loss counts as a layer.

    Megatron-LM adds them to the layers, splits evenly, and takes one layer from the first or the last chunk. A split
    that is not even is left to the rules.
    """
    names = _set_among(given, ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"))
    if not names:
        return None
    ranks = _value(given, "pipeline_model_parallel_size")
    if ranks == 1:
        return _left_out(names), f"{_typed(given, names)}: left out, there is one stage"
    counted = _value(given, "num_layers") + len(names)
    per_chunk = _value(given, "num_layers_per_virtual_pipeline_stage") or counted // ranks
    others = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if _set_among(given, others) or per_chunk < 1 or counted % (ranks * per_chunk):
        return None
    chunks = ["t" * per_chunk] * (counted // per_chunk)
    for name, chunk in (("account_for_embedding_in_pipeline_split", 0), ("account_for_loss_in_pipeline_split", -1)):
        chunks[chunk] = chunks[chunk][name in names :]
    chunks[-1] += "m" * (_value(given, "mtp_num_layers") or 0)
    layout = f"E{'|'.join(chunks)}L"
    note = f"{_typed(given, names)}: --pipeline-model-parallel-layout '{layout}' here"
    replaced: Given = {"num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": layout}
    return {**_left_out(names), **replaced}, note


def capacity_below_zero(given: Given) -> Change | None:
    """Take a capacity below zero for none."""
    factor = _value(given, "moe_expert_capacity_factor")
    if factor is None or factor >= 0:
        return None
    return {"moe_expert_capacity_factor": None}, (
        f"--moe-expert-capacity-factor {factor}: is none, as in Megatron-LM: no token is dropped"
    )


def loading_without_a_folder(given: Given) -> Change | None:
    """Leave out how a checkpoint would be loaded, where none is loaded."""
    names = _set_among(given, LOADING)
    if not names or _value(given, "load") is not None or _value(given, "load_hf") is not None:
        return None
    return _left_out(names), f"{_typed(given, names)}: left out, nothing is loaded without --load"


def saving_without_a_folder(given: Given) -> Change | None:
    """Leave out how checkpoints would be saved, where none is."""
    names = _set_among(given, SAVING)
    if not names or _value(given, "save") is not None:
        return None
    return _left_out(names), f"{_typed(given, names)}: left out, NOTHING IS SAVED without --save"


def settings_of_a_flag_that_is_off(given: Given) -> Change | None:
    """Leave out the settings of collecting by hand, of profiling and of reports where there is none of these."""
    stray = [(flag, _set_among(given, names)) for flag, names in unread(lambda flag: _value(given, flag))]
    names = [name for _, found in stray for name in found]
    if not names:
        return None
    missing = ", ".join(dict.fromkeys(all_fields()[flag].flag for flag, found in stray if found))
    return _left_out(names), f"{_typed(given, names)}: left out, without {missing}; Megatron-LM does not read it either"


@dataclass(frozen=True)
class Unread:
    """Settings that are read in some runs only.

    Args:
        fields: the settings. is_read: whether a run with these settings reads them. reason: why it does not otherwise.
    """

    fields: tuple[str, ...]
    is_read: Callable[[Given], Any]
    reason: str

    def __call__(self, given: Given) -> Change | None:
        """Leave the settings out where they are not read."""
        names = _set_among(given, self.fields)
        if not names or self.is_read(given):
            return None
        return _left_out(names), f"{_typed(given, names)}: left out, {self.reason}"


def _is_set(name: str) -> Callable[[Given], bool]:
    return lambda given: _value(given, name) not in (None, False, 0)


def _with_experts(name: str) -> Callable[[Given], bool]:
    """Return whether a setting of experts is set; a dense model has rules of its own."""
    return lambda given: _value(given, "num_experts") is None or _value(given, name) not in (None, False)


_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("num_query_groups",),
        _is_set("group_query_attention"),
        "each head has a key and a value of its own without --group-query-attention",
    ),
    Unread(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        _is_set("multi_latent_attention"),
        "the attention is not latent without --multi-latent-attention",
    ),
    Unread(
        ("use_rope_scaling",),
        lambda given: not _value(given, "multi_latent_attention"),
        "latent attention does not read it; its positions are scaled by --rope-type yarn",
    ),
    Unread(("mtp_loss_scaling_factor",), _is_set("mtp_num_layers"), "nothing is predicted without --mtp-num-layers"),
    Unread(
        ("moe_router_bias_update_rate",),
        _with_experts("moe_router_enable_expert_bias"),
        "there is no bias without --moe-router-enable-expert-bias",
    ),
    Unread(
        ("moe_token_drop_policy",),
        _with_experts("moe_expert_capacity_factor"),
        "no token is dropped without --moe-expert-capacity-factor",
    ),
    Unread(
        ("moe_shared_expert_overlap", "moe_shared_expert_gate"),
        _with_experts("moe_shared_expert_intermediate_size"),
        "there is no shared expert without --moe-shared-expert-intermediate-size",
    ),
    # Not --loss-scale: Megatron-LM multiplies by a constant scale in bf16, too.
    Unread(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda given: _value(given, "fp16") and _value(given, "loss_scale") is None,
        "a loss scale changes with --fp16 alone, and without --loss-scale",
    ),
    Unread(("first_last_layers_bf16",), _is_set("fp8_format"), "nothing is in FP8 without --fp8-format"),
    Unread(
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        _is_set("first_last_layers_bf16"),
        "they count the layers of --first-last-layers-bf16",
    ),
    Unread(("decoupled_min_lr",), _is_set("decoupled_lr"), "it ends the schedule of --decoupled-lr"),
    Unread(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda given: _value(given, "lr_decay_style") == "WSD",
        "--lr-decay-style WSD alone has such a phase",
    ),
    Unread(
        TIKTOKEN_FIELDS,
        lambda given: _value(given, "tokenizer_type") == "TikTokenizer",
        "--tokenizer-type TikTokenizer alone reads it",
    ),
    Unread(("eval_interval",), _is_set("eval_iters"), "nothing is evaluated with --eval-iters 0"),
    Unread(
        ("recompute_method", "recompute_num_layers"),
        _is_set("recompute_granularity"),
        "nothing is recomputed without --recompute-granularity",
    ),
    Unread(
        ("recompute_modules",),
        lambda given: _value(given, "recompute_granularity") == "selective",
        "--recompute-granularity selective alone recomputes modules",
    ),
)

_IGNORED: tuple[Callable[[Given], Change | None], ...] = (
    sequence_parallelism_of_one_rank,
    heads_of_latent_attention,
    yarn_of_latent_attention,
    softmax_before_other_scores,
    kernel_of_the_local_attention,
    losses_without_weight,
    coefficients_without_losses,
    capacity_below_zero,
    buckets_of_sharded_gradients,
    overlap_of_sharded_layers,
    offload_of_overlapping_batches,
    offload_of_what_is_not_kept,
    weights_in_fp8,
    later_gradients_of_fp8_products,
    split_that_counts_embedding_and_loss,
    tokenizer_of_the_gpt_files,
    loading_without_a_folder,
    saving_without_a_folder,
    settings_of_a_flag_that_is_off,
    *_UNREAD,
)
