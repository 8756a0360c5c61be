"""Rules about attention: heads, norms of queries and keys, rotation, windows and sinks; and about norms behind it."""

from __future__ import annotations

from megatron_moe.config.model_flags import ROPE_SETTINGS
from megatron_moe.config.rules.rule import (
    Refusal,
    divisors,
    is_set,
    nearest_multiples,
    refuse,
    rule,
    set_among,
    unread,
    value,
)
from megatron_moe.config.schema import Run

unread(
    ("num_query_groups",),
    "group_query_attention",
    "each head has a key and a value of its own; add --group-query-attention or drop them",
    in_megatron=True,
)
refuse(
    "grouped_queries_have_a_number",
    ("group_query_attention", "num_query_groups"),
    "say how many groups, e.g. --num-query-groups 1",
    when=lambda run: run.model.group_query_attention and run.model.num_query_groups is None,
)
unread(
    ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "dsa_indexer_topk"),
    "multi_latent_attention",
    "only latent attention reads these; add --multi-latent-attention or drop them",
    in_megatron=True,
)


# Latent attention has no separate key/value heads, and rotates its rotary part alone, always in pairs.
unread(
    (
        "group_query_attention",
        "num_query_groups",
        "kv_channels",
        "add_qkv_bias",
        "qk_layernorm_after_rotation",
        "softmax_scale",
        "qk_layernorm_across_heads",
        "rotary_percent",
        "rotary_interleaved",
    ),
    "multi_latent_attention",
    "latent attention does not read these, its heads have --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim; drop"
    " them",
    is_read=lambda run: not run.model.multi_latent_attention,
    in_megatron=True,
    refused_there=("rotary_percent", "rotary_interleaved"),
)
unread(
    ("qk_layernorm_after_rotation", "qk_layernorm_across_heads"),
    "qk_layernorm",
    "queries and keys have no norm; add --qk-layernorm or drop it",
)
refuse(
    "norms_and_factors_are_of_local_layers",
    ("transformer_impl",),
    "these were not tried with Transformer Engine's layers; use --transformer-impl local",
    when=lambda run: run.model.transformer_impl != "local",
    any_of=(
        "qk_layernorm_after_rotation",
        "softmax_scale",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "qk_layernorm_across_heads",
    ),
)
refuse(
    "norms_of_all_heads_are_before_the_rotation",
    ("qk_layernorm_across_heads", "qk_layernorm_after_rotation"),
    "a norm of all heads comes before the rotation; drop one of them",
    when=lambda run: run.model.qk_layernorm_across_heads and run.model.qk_layernorm_after_rotation,
)
refuse(
    "reordered_norms_are_checked",
    ("reordered_norm",),
    "with norms behind attention and MLP these were not checked; drop them, or --reordered-norm",
    when=lambda run: run.model.reordered_norm,
    any_of=(
        "transformer_impl",
        "multi_latent_attention",
        "mtp_num_layers",
        "fp32_residual_connection",
        "fp8_format",
        "overlap_moe_expert_parallel_comm",
        "fine_grained_activation_offloading",
    ),
)
refuse(
    "reordered_norms_are_not_recomputed",
    ("recompute_modules", "reordered_norm"),
    "norms alone are recomputed before attention and MLP, and these are behind them; drop layernorm",
    when=lambda run: run.model.reordered_norm and "layernorm" in run.derived.recomputed_modules,
)
refuse(
    "latent_attention_needs_rotary_embedding",
    ("position_embedding_type", "multi_latent_attention"),
    "latent attention needs --position-embedding-type rope",
    when=lambda run: run.model.multi_latent_attention and run.model.position_embedding_type != "rope",
)


@rule()
def heads_divide_hidden(run: Run) -> None:
    """Require that the heads divide the hidden size, unless their width is given or the attention is latent."""
    m = run.model
    if m.multi_latent_attention or m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return
    raise Refusal(
        ("hidden_size", "num_attention_heads"),
        f"the hidden size must divide by the heads; use heads out of {divisors(m.hidden_size)}, or set --kv-channels",
    )


refuse(
    "query_groups_divide_heads",
    ("num_attention_heads", "num_query_groups"),
    lambda run: f"the heads must divide by the groups; use groups out of {divisors(run.model.num_attention_heads)}",
    when=lambda run: run.model.num_attention_heads % run.derived.num_query_groups,
)
refuse(
    "stretched_frequencies_are_rotary",
    ("rope_type", "position_embedding_type"),
    "without rotary positions there are no frequencies to stretch; drop one of them",
    when=lambda run: run.model.rope_type != "rope" and run.model.position_embedding_type != "rope",
)
refuse(
    "latent_attention_is_stretched_by_yarn",
    ("rope_type", "multi_latent_attention"),
    "no model with latent attention has this kind to compare with; use --rope-type yarn",
    when=lambda run: run.model.multi_latent_attention and run.model.rope_type not in ("rope", "yarn"),
)


@rule()
def rope_settings_are_read(run: Run) -> None:
    """Refuse settings of another kind of rotary embedding."""
    read = ROPE_SETTINGS.get(run.model.rope_type, ())
    for kind, names in ROPE_SETTINGS.items():
        stray = [name for name in set_among(run, names) if name not in read]
        if stray:
            raise Refusal((*stray, "rope_type"), f"is not read; use --rope-type {kind} or drop it")


refuse(
    "a_factor_stretches",
    ("rope_type", "rotary_scaling_factor"),
    "a factor of 1 changes nothing; say how many times as long the context is, e.g. --rotary-scaling-factor 8",
    when=lambda run: run.model.rope_type in ("linear", "llama3") and run.model.rotary_scaling_factor == 1,
)
refuse(
    "llama3_factors_are_ordered",
    ("low_freq_factor", "high_freq_factor"),
    "the first must be below the second; e.g. 1 and 4",
    when=lambda run: run.model.rope_type == "llama3" and run.model.low_freq_factor >= run.model.high_freq_factor,
)


@rule()
def longrope_has_a_factor_for_each_pair(run: Run) -> None:
    """Require LongRoPE's two lists to be as long as half of the rotated width."""
    m = run.model
    if m.rope_type != "longrope":
        return
    pairs = int(run.derived.head_size * m.rotary_percent) // 2
    for name in ("short_factor", "long_factor"):
        if len(value(run, name) or ()) != pairs:
            raise Refusal(
                (name,), f"LongRoPE has a divisor for each of the {pairs} rotated pairs of a head: give {pairs}"
            )


# Frequencies are kept above beta-fast rotations and interpolated below beta-slow, with a ramp between them, which is a
# step where both are equal (Kimi-K2).
refuse(
    "yarn_betas_are_ordered",
    ("beta_fast", "beta_slow"),
    "the first must not be below the second; e.g. 32 and 1",
    when=lambda run: run.model.rope_type == "yarn" and run.model.beta_fast < run.model.beta_slow,
)


@rule()
def rotary_width_is_even(run: Run) -> None:
    """Require an even rotary width, since rotation takes pairs of channels."""
    m = run.model
    if m.position_embedding_type != "rope":
        return
    if m.multi_latent_attention:
        if m.qk_pos_emb_head_dim % 2:
            raise Refusal(
                ("qk_pos_emb_head_dim",),
                f"rotation takes pairs of channels; use {nearest_multiples(m.qk_pos_emb_head_dim, 2)}",
            )
        return
    width = run.derived.head_size
    rotated = int(width * m.rotary_percent)
    if rotated % 2 or rotated == 0:
        raise Refusal(
            ("rotary_percent", "kv_channels", "hidden_size", "num_attention_heads"),
            f"a head is {width} wide, of which {rotated} would be rotated; rotation takes pairs of channels:"
            " choose an even width, e.g. by --kv-channels",
        )


unread(
    ("window_attn_skip_freq",),
    "window_size",
    "no layer has a window; add --window-size, e.g. 127,0, or drop it",
    in_megatron=True,
)
refuse(
    "windows_are_of_some_layers",
    ("window_size", "window_attn_skip_freq"),
    "no layer would have the window; put a 1 into the pattern, or drop both",
    when=lambda run: run.derived.window is not None and not any(run.derived.window_pattern),
)


@rule()
def sinks_and_windows_can_work(run: Run) -> None:
    """Refuse sinks and windows where attention is another than ours over grouped queries, without dropout."""
    names = set_among(run, ("softmax_type", "window_size"))
    obstacles = {
        "multi_latent_attention": "latent attention has neither; use grouped-query attention",
        "transformer_impl": "they are the local attention's; use --transformer-impl local",
        "attention_dropout": "they drop no weights; use --attention-dropout 0",
        "mtp_num_layers": "further predictions were not tried with them; drop --mtp-num-layers",
    }
    for field, reason in obstacles.items():
        if names and is_set(run, field):
            raise Refusal((*names, field), reason)
    if run.model.window_size is not None and (run.optimizer.qk_clip or run.logging.log_max_attention_logit):
        raise Refusal(
            ("window_size", *set_among(run, ("qk_clip", "log_max_attention_logit"))),
            "the largest logit is taken over all tokens before a query; drop one of them",
        )
