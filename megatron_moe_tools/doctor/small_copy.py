"""A small copy of a run's model: its features, at sizes that a laptop trains in milliseconds.

Kept are the kind of attention, biases, norms, tied or separate embeddings, the pattern of dense and MoE layers, scores,
groups, expert bias, shared expert, balancing losses, capacity, multi-token prediction, per-token loss, recomputation
and dispatcher. Changed are sizes, data, the learning rate's schedule, and what draws random numbers, since two layouts
draw differently. Added are auxiliary losses and z-loss, where a router can have them, with a weight that shows in the
gradients: at 1e-4 a wrong scale would hide in the tolerances, and who turns them on later should find them right. The
copy is computed in fp32, where a difference between layouts is larger than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron_moe.config.model_flags import QUANTILE
from megatron_moe.config.schema import Run, flatten, replace

LAYERS, HEADS, EXPERTS, HIDDEN, WIDTH, LENGTH = 4, 4, 8, 32, 32, 32
DEPTHS = 2  # at most, of multi-token prediction
AUX_LOSS_COEFF, Z_LOSS_COEFF = 0.05, 0.01
VOCABULARY, PADDED_VOCABULARY = 250, 256
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}

# Sections and single flags that do not say which model is trained, or describe the run's own layout: reset.
_RESET_SECTIONS = ("data", "checkpoint", "faults", "logging", "parallel", "precision")
_RESET = (
    "rampup_batch_size",
    "skip_train",
    "eval_interval",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
    "use_distributed_optimizer",
    "optimizer_cpu_offload",
    "moe_alltoall_by_node",
    "moe_seq_aux_loss_per",  # its samples are one document each, or it has no such losses
    # Groups of codes begin elsewhere on another layout, and are rounded otherwise.
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "train_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_restart_at",
    "use_checkpoint_opt_param_scheduler",
    "override_opt_param_scheduler",
    "lr_decay_style",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "min_lr",
)


def small_copy(run: Run) -> Run:
    """Return the small copy of `run` on one rank; a layout adds its own flags."""
    defaults, flat = flatten(Run()), flatten(run)
    for names in (_RESET, *(vars(getattr(run, section)) for section in _RESET_SECTIONS)):
        for name in names:
            flat[name] = defaults[name]
    flat |= {
        **_sizes(run),
        **_experts(run),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
        "moe_global_aux_loss_counts": "batch",  # the other way depends on the layout, as its help says
        "transformer_impl": "local",
        "lr_decay_style": "constant",
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 100,
        # Adam moves a weight by a whole learning rate whose gradient is nothing but rounding, where that is as large as
        # this number: at 1e-8 one seed in ten had gradients that differed by 1e-4 in the step after.
        "adam_eps": 1e-6,
        "eval_iters": 0,
        "mock_data": True,
        "min_offloaded_tensor_size": 1,
    }
    if run.optimizer.optimizer == "muon":
        # Five steps make a rounding error in the direction of a small singular value 500 times as large, two 16 times.
        flat |= {"muon_fp32_matmul_prec": "highest", "muon_num_ns_steps": 2}
    return replace(Run(), **flat)


def changed_fields(run: Run, copy: Run) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which the small copy differs, with both values."""
    after, changed = flatten(copy), {}
    for name, value in flatten(run).items():
        if value != after[name]:
            changed[name] = (value, after[name])
    return changed


def _sizes(run: Run) -> dict[str, Any]:
    m = run.model
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 48,
        "num_attention_heads": HEADS,
        "seq_length": LENGTH,
        "max_position_embeddings": None,
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 8,
        "padded_vocab_size": None,
        # At the usual 0.02 such a small model is almost linear, and its logits are all alike.
        "init_method_std": 0.1,
    }
    if m.window_size is not None:  # shorter than a rank's chunks
        sizes["window_size"], sizes["window_attn_skip_freq"] = "3,0", _shortened(run.derived.window_pattern)
    if m.activation_func_clamp_value is not None:
        sizes["activation_func_clamp_value"] = 0.5  # cuts some off
    if m.mtp_num_layers is not None:
        sizes["mtp_num_layers"] = min(m.mtp_num_layers, DEPTHS)
    if run.training.recompute_num_layers is not None:
        sizes["recompute_num_layers"] = 1
    if m.cross_entropy_chunk_tokens is not None:
        sizes["cross_entropy_chunk_tokens"] = 16
    if m.multi_latent_attention:
        sizes |= _LATENT
        if m.q_lora_rank is None:
            sizes["q_lora_rank"] = None
        return sizes
    if m.kv_channels is not None:
        sizes["kv_channels"] = 16
    if m.short_factor is not None and m.long_factor is not None:  # LongRoPE has as many as a head has pairs
        pairs = int(sizes.get("kv_channels", HIDDEN // HEADS) * m.rotary_percent) // 2
        sizes |= {"short_factor": (m.short_factor * pairs)[:pairs], "long_factor": (m.long_factor * pairs)[:pairs]}
        sizes["original_max_position_embeddings"] = LENGTH // 2
    if m.group_query_attention:
        same = {m.num_attention_heads: HEADS, 1: 1}
        sizes["num_query_groups"] = same.get(run.derived.num_query_groups, 2)
    return sizes


def _shortened(pattern: Sequence[int]) -> str:
    """Return a list expression in which consecutive layers of one kind are one layer, and the last kind is repeated."""
    order = [kind for kind, _ in groupby(pattern)][:LAYERS]
    return str([*order, *order[-1:] * (LAYERS - len(order))])


def _experts(run: Run) -> dict[str, Any]:
    moe = run.moe
    if moe.num_experts is None:
        return {}
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS,
        "moe_ffn_hidden_size": WIDTH,
        "moe_router_topk": min(moe.moe_router_topk, 2),
        "moe_layer_freq": 1,
        "moe_expert_backend": "grouped_mm" if moe.moe_expert_backend == "te" else moe.moe_expert_backend,
    }
    pattern = run.derived.moe_layer_pattern
    if not all(pattern):
        sizes["moe_layer_freq"] = _shortened(pattern)
    kinds = moe.moe_router_load_balancing_type
    if not {"sinkhorn", QUANTILE} & set(kinds):
        losses = dict(zip(kinds, moe.moe_aux_loss_coeff))
        if "none" in kinds or not losses:
            losses = {"seq_aux_loss": AUX_LOSS_COEFF}
        sizes["moe_router_load_balancing_type"] = tuple(losses)
        sizes["moe_aux_loss_coeff"] = tuple(max(coeff, AUX_LOSS_COEFF) for coeff in losses.values())
        sizes["moe_z_loss_coeff"] = max(moe.moe_z_loss_coeff or 0.0, Z_LOSS_COEFF)
    if moe.moe_shared_expert_intermediate_size is not None:
        sizes["moe_shared_expert_intermediate_size"] = WIDTH
    if moe.moe_router_num_groups is not None and moe.moe_router_group_topk is not None:
        all_chosen = moe.moe_router_group_topk == moe.moe_router_num_groups
        sizes["moe_router_num_groups"] = 2 if all_chosen else 4
        sizes["moe_router_group_topk"] = min(moe.moe_router_group_topk, 2, sizes["moe_router_topk"])
    return sizes
