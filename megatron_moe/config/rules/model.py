"""Rules about the transformer: its shape, its modules, and those that stay in fp32 in a bf16 or fp16 model."""

from __future__ import annotations

import importlib.util
import sys

from megatron_moe.config import module_names
from megatron_moe.config.rules.ignored import YARN_FIELDS
from megatron_moe.config.rules.wording import divisors, nearest_multiples, package_missing, refuse, set_among
from megatron_moe.config.schema import Run

_MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_GQA_FIELDS = (
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "rotary_percent",
    "rotary_interleaved",
)


def heads_divide_hidden(run: Run, world_size: int) -> None:
    """Require that the heads divide the hidden size, unless their width is given or the attention is latent."""
    m = run.model
    if m.multi_latent_attention or m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0:
        return
    raise refuse(
        run,
        ("hidden_size", "num_attention_heads"),
        f"the hidden size must divide by the heads; use heads out of {divisors(m.hidden_size)}, or set --kv-channels",
    )


def query_groups_go_with_their_switch(run: Run, world_size: int) -> None:
    """Require grouped-query attention's switch and its number of groups together, as in Megatron-LM."""
    m = run.model
    if m.group_query_attention and m.num_query_groups is None:
        raise refuse(
            run, ("group_query_attention", "num_query_groups"), "say how many groups, e.g. --num-query-groups 1"
        )
    if m.num_query_groups is not None and not m.group_query_attention:
        raise refuse(
            run,
            ("num_query_groups", "group_query_attention"),
            "the groups would be ignored; add --group-query-attention or drop them",
        )


def query_groups_divide_heads(run: Run, world_size: int) -> None:
    """Require that every key/value head serves the same number of query heads."""
    groups = run.derived.num_query_groups
    if run.model.num_attention_heads % groups:
        raise refuse(
            run,
            ("num_attention_heads", "num_query_groups"),
            f"the heads must divide by the groups; use groups out of {divisors(run.model.num_attention_heads)}",
        )


def latent_flags_need_latent_attention(run: Run, world_size: int) -> None:
    """Refuse ranks and widths of latent attention, and yarn, with other attention, which ignores them."""
    stray = set_among(run, _MLA_FIELDS)
    if stray and not run.model.multi_latent_attention:
        raise refuse(
            run,
            (*stray, "multi_latent_attention"),
            "only latent attention reads these; add --multi-latent-attention or drop them",
        )


def grouped_query_flags_need_grouped_query_attention(run: Run, world_size: int) -> None:
    """Refuse flags of grouped-query attention with latent attention.

    Latent attention has no separate key/value heads, and rotates its rotary part alone, always in pairs.
    """
    stray = set_among(run, _GQA_FIELDS)
    if stray and run.model.multi_latent_attention:
        raise refuse(
            run,
            (*stray, "multi_latent_attention"),
            "latent attention does not read these; drop them, or use --no-multi-latent-attention",
        )


def latent_attention_needs_rotary_embedding(run: Run, world_size: int) -> None:
    """Require rotary embedding for latent attention, whose queries and keys have a rotary part."""
    if run.model.multi_latent_attention and run.model.position_embedding_type != "rope":
        raise refuse(
            run,
            ("position_embedding_type", "multi_latent_attention"),
            "latent attention needs --position-embedding-type rope",
        )


def yarn_flags_need_yarn(run: Run, world_size: int) -> None:
    """Refuse settings of yarn with the plain rotary embedding, which ignores them."""
    stray = set_among(run, YARN_FIELDS)
    if stray and run.model.rope_type != "yarn":
        raise refuse(run, (*stray, "rope_type"), "only yarn reads these; use --rope-type yarn or drop them")


def rotary_frequencies_are_not_scaled(run: Run, world_size: int) -> None:
    """Refuse Llama 3's scaling of the rotary frequencies, which latent attention does not read in Megatron-LM."""
    if run.model.use_rope_scaling:
        raise refuse(
            run,
            ("use_rope_scaling",),
            "frequencies are not scaled; drop it where the sequence is not longer than the model was made for",
        )


def yarn_betas_are_ordered(run: Run, world_size: int) -> None:
    """Require that beta-fast is not below beta-slow.

    Frequencies are kept above beta-fast rotations and interpolated below beta-slow, with a ramp between them, which is
    a step where both are equal (Kimi-K2).
    """
    m = run.model
    if m.rope_type == "yarn" and m.beta_fast < m.beta_slow:
        raise refuse(run, ("beta_fast", "beta_slow"), "the first must not be below the second; e.g. 32 and 1")


def rotary_width_is_even(run: Run, world_size: int) -> None:
    """Require an even rotary width, since rotation takes pairs of channels."""
    m = run.model
    if m.position_embedding_type != "rope":
        return
    if m.multi_latent_attention:
        if m.qk_pos_emb_head_dim % 2:
            raise refuse(
                run,
                ("qk_pos_emb_head_dim",),
                f"rotation takes pairs of channels; use {nearest_multiples(m.qk_pos_emb_head_dim, 2)}",
            )
        return
    width = run.derived.head_size
    rotated = int(width * m.rotary_percent)
    if rotated % 2 or rotated == 0:
        raise refuse(
            run,
            ("rotary_percent", "kv_channels", "hidden_size", "num_attention_heads"),
            f"a head is {width} wide, of which {rotated} would be rotated; rotation takes pairs of channels:"
            " choose an even width, e.g. by --kv-channels",
        )


def sequence_fits_positions(run: Run, world_size: int) -> None:
    """Require at least as many positions in the model as a sequence has."""
    m = run.model
    if m.seq_length > run.derived.max_position_embeddings:
        raise refuse(
            run,
            ("seq_length", "max_position_embeddings"),
            f"the sequence has more positions; use --max-position-embeddings {m.seq_length} or a shorter sequence",
        )


def padded_vocabulary_holds_its_tokens(run: Run, world_size: int) -> None:
    """Require a row for each token in a table of a given size, and equal shares; see `derived.padded_vocab_size`."""
    # A tokenizer's vocabulary is not known before the tokenizer is read (training/plan.py).
    run.derived.padded_vocab_size(run.model.vocab_size or 1)


def softmax_flag_is_read(run: Run, world_size: int) -> None:
    """Refuse a softmax in half precision with our core attention, which always computes it in fp32."""
    if not run.precision.attention_softmax_in_fp32 and run.model.transformer_impl == "local":
        raise refuse(
            run,
            ("attention_softmax_in_fp32", "transformer_impl"),
            "the local attention's softmax is always fp32; drop --no-attention-softmax-in-fp32",
        )


def attention_backend_is_read(run: Run, world_size: int) -> None:
    """Refuse a choice among Transformer Engine's kernels with our core attention, whose kernel is torch's choice."""
    if run.model.attention_backend != "auto" and run.model.transformer_impl == "local":
        raise refuse(
            run,
            ("attention_backend", "transformer_impl"),
            "the local attention takes the kernel that fits; use --attention-backend auto",
        )


def measured_attention_is_our_own(run: Run, world_size: int) -> None:
    """Refuse to measure attention logits in Transformer Engine's attention, which ours measures alone."""
    measuring = set_among(run, ("qk_clip", "log_max_attention_logit"))
    if measuring and run.model.transformer_impl != "local":
        raise refuse(
            run,
            (*measuring, "transformer_impl"),
            "the local attention alone measures its logits; use --transformer-impl local",
        )


def clipped_queries_are_not_normed(run: Run, world_size: int) -> None:
    """Refuse QK-clip where norms after the projections undo what it does to their weights.

    The norms of latent attention are before the projections.
    """
    if run.optimizer.qk_clip and run.model.qk_layernorm and not run.model.multi_latent_attention:
        raise refuse(
            run,
            ("qk_clip", "qk_layernorm"),
            "the norms give queries and keys the same size whatever their weights are, and bound the logits; keep one",
        )


def transformer_engine_is_installed(run: Run, world_size: int) -> None:
    """Require that Transformer Engine is installed if a flag chooses it."""
    asking = [
        name
        for name, asks in (
            ("transformer_impl", run.model.transformer_impl == "transformer_engine"),
            ("moe_expert_backend", run.moe.moe_expert_backend == "te"),
        )
        if asks
    ]
    # One that cannot be loaded is hidden from the engine, by None in its place; what uses it says why.
    hidden = "transformer_engine" in sys.modules
    if asking and not hidden and importlib.util.find_spec("transformer_engine") is None:
        raise package_missing(
            run,
            asking,
            "Transformer Engine is not installed; install the extra [gpu], or use --transformer-impl local and"
            " --moe-expert-backend grouped_mm",
        )


def prediction_weight_needs_its_layers(run: Run, world_size: int) -> None:
    """Refuse a weight of the multi-token prediction loss without its layers."""
    if set_among(run, ("mtp_loss_scaling_factor",)) and run.model.mtp_num_layers is None:
        raise refuse(
            run,
            ("mtp_loss_scaling_factor", "mtp_num_layers"),
            "only multi-token prediction reads this; add --mtp-num-layers 1 or drop it",
        )


def predictions_fit_the_sequence(run: Run, world_size: int) -> None:
    """Require a target for each depth: depth k predicts k + 1 tokens ahead, within the sequence."""
    depths, length = run.model.mtp_num_layers, run.model.seq_length
    if depths is not None and depths >= length:
        raise refuse(
            run,
            ("mtp_num_layers", "seq_length"),
            f"the last depths would have no target; use --mtp-num-layers {max(length - 1, 1)} or less",
        )


def fp32_patterns_name_modules(run: Run, world_size: int) -> None:
    """Refuse a pattern of --keep-fp32 that matches no module, which would silently keep none in fp32."""
    for pattern in run.precision.keep_fp32 or ():
        if not module_names.matches(run, pattern):
            near = module_names.near_names(run, pattern)
            raise refuse(
                run,
                ("keep_fp32",),
                f"{pattern!r} names no module and no parameter of this model; use e.g. {', '.join(near)}",
            )


def tied_weights_stay_together(run: Run, world_size: int) -> None:
    """Require one dtype of a tied embedding and output layer, which are one tensor."""
    kept = module_names.kept_in_fp32(run)
    ends = [any(name.startswith(end) for name in kept) for end in (module_names.EMBEDDING, module_names.OUTPUT_LAYER)]
    if not run.model.untie_embeddings_and_output_weights and ends[0] != ends[1]:
        raise refuse(
            run,
            ("keep_fp32", "untie_embeddings_and_output_weights"),
            "embedding and output layer share one weight, which has one dtype; name both, embedding and output_layer, "
            "or use --untie-embeddings-and-output-weights",
        )


def fp32_compute_is_our_own(run: Run, world_size: int) -> None:
    """Refuse fp32 modules or an fp32 stream with Transformer Engine's modules, where they are not verified."""
    wanted = [
        name for name in ("keep_fp32", "fp32_residual_connection", "eval_in_fp32") if getattr(run.precision, name)
    ]
    engine = [
        name
        for name, asks in (
            ("transformer_impl", run.model.transformer_impl == "transformer_engine"),
            ("moe_expert_backend", run.moe.moe_expert_backend == "te"),
        )
        if asks
    ]
    if wanted and engine:
        raise refuse(
            run,
            (*wanted, *engine),
            "not with Transformer Engine's modules, whose dtypes are their own; use --transformer-impl local and "
            "--moe-expert-backend grouped_mm",
        )
