"""Rules about single parameters: their dtypes, FP8 and its audit, and which of them are trained, and how fast."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from megatron_moe.config import module_names
from megatron_moe.config.fields import all_fields, number_meant
from megatron_moe.config.module_names import frozen, kept_in_fp32, modules
from megatron_moe.config.rules.rule import (
    LAYOUT,
    Refusal,
    is_half,
    nearest_multiples,
    of_transformer_engine,
    refuse,
    rule,
    set_among,
    stage_flags,
    unread,
)
from megatron_moe.config.schema import Run

refuse(
    "one_half_precision",
    ("bf16", "fp16"),
    "choose one; drop --fp16, or use --no-bf16 over a preset",
    when=lambda run: run.precision.bf16 and run.precision.fp16,
)
_LOSS_SCALE_FIELDS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
unread(
    ("loss_scale", *_LOSS_SCALE_FIELDS),
    "fp16",
    "only fp16 reads these; drop them or use --fp16",
    in_megatron=True,
    refused_there=("loss_scale",),
)
unread(
    _LOSS_SCALE_FIELDS,
    "loss_scale",
    "the constant scale ignores these; drop them or --loss-scale",
    is_read=lambda run: run.precision.loss_scale is None,
    in_megatron=True,
)
refuse(
    "loss_scales_are_ordered",
    ("initial_loss_scale", "min_loss_scale"),
    lambda run: (
        f"the first scale is below the smallest; use --min-loss-scale {run.precision.initial_loss_scale:g} or less"
    ),
    when=lambda run: run.precision.initial_loss_scale < run.precision.min_loss_scale,
)


@rule()
def bf16_reduction_needs_bf16(run: Run) -> None:
    """Refuse gradients reduced in bf16 without a bf16 model, or together with fp32 gradients."""
    p = run.precision
    if p.grad_reduce_in_bf16 and not p.bf16:
        raise Refusal(("grad_reduce_in_bf16", "bf16"), "the gradients are not bf16; use --bf16 or drop the flag")
    if p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32:
        raise Refusal(
            ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"), "these exclude each other; choose one"
        )


@rule()
def fused_gradients_have_fp32_sums(run: Run) -> None:
    """Refuse to add weight gradients in the product where there is no fp32 sum, or the experts' product cannot."""
    if not run.precision.gradient_accumulation_fusion:
        return
    flag = "gradient_accumulation_fusion"
    if not run.derived.grads_in_fp32:
        raise Refusal(
            (flag, *set_among(run, ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))),
            "a sum in half precision rounds what is added to it; add gradients in fp32, or drop the flag",
        )
    if run.derived.zero_stage >= 2:
        raise Refusal(
            (flag, *stage_flags(run)),
            "gradients are sent as they are made, and no rank has the sum of a whole one; "
            "use --data-parallel-sharding-strategy optim, or drop the flag",
        )
    if run.moe.num_experts is not None and run.moe.moe_expert_backend in ("te", "loop"):
        raise Refusal(
            (flag, "moe_expert_backend"),
            "its experts' gradients are rounded before they are added; use --moe-expert-backend grouped_mm, or drop "
            "the flag",
        )


refuse(  # shards are fp32
    "sharded_gradients_are_reduced_in_fp32",
    stage_flags,
    "from ZeRO stage 2 on gradients are reduced in fp32; drop it, and use --zero-quantized-gradients int8 to send fewer"
    " bytes",
    when=lambda run: run.derived.zero_stage >= 2 and is_half(run) and not run.derived.grads_in_fp32,
    any_of=("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
    needs=LAYOUT,
)
refuse(
    "fp32_evaluation_needs_whole_weights",
    lambda run: ("eval_in_fp32", *stage_flags(run)),
    "from ZeRO stage 2 on weights are gathered in the model's dtype; drop it, or use --data-parallel-sharding-strategy"
    " optim",
    when=lambda run: run.derived.zero_stage >= 2 and is_half(run) and run.precision.eval_in_fp32,
    needs=LAYOUT,
)
refuse(
    "offloaded_gradients_are_whole",
    lambda run: ("optimizer_cpu_offload", "tensor_model_parallel_size", *stage_flags(run)),
    "gradients in host memory cannot be added up over a GPU's tensor-parallel ranks; use"
    " --data-parallel-sharding-strategy optim, which offloads the moments alone, or drop the offload",
    when=lambda run: (
        run.optimizer.optimizer_cpu_offload
        and run.derived.zero_stage >= 2
        and run.parallel.tensor_model_parallel_size > 1
    ),
    needs=LAYOUT,
)
unread(
    ("keep_fp32", "fp32_residual_connection", "eval_in_fp32"),
    ("bf16", "fp16"),
    "everything is fp32 already; add --bf16 or --fp16",
    is_read=lambda run: run.precision.bf16 or run.precision.fp16,
)
refuse(
    "tf32_is_for_fp32_runs",
    lambda run: ("allow_tf32", *set_among(run, ("bf16", "fp16"))),
    "it makes products of an fp32 run faster, and here fp32 is what has to be exact; drop one of the two",
    when=lambda run: run.precision.allow_tf32 and is_half(run),
)
unread(
    ("exp_avg_dtype", "exp_avg_sq_dtype"),
    "use_precision_aware_optimizer",
    "without it moments are fp32; add --use-precision-aware-optimizer, or drop them",
)


@rule()
def fp32_patterns_name_whole_modules(run: Run) -> None:
    """Refuse a pattern of --keep-fp32 that matches no module, and two dtypes for one tensor that is tied."""
    for pattern in run.precision.keep_fp32 or ():
        if not module_names.matches(run, pattern):
            near = module_names.near_names(run, pattern)
            raise Refusal(
                ("keep_fp32",),
                f"{pattern!r} names no module and no parameter of this model; use e.g. {', '.join(near)}",
            )
    embedding, output_layer = module_names.at_ends(kept_in_fp32(run))
    if not run.model.untie_embeddings_and_output_weights and embedding != output_layer:
        raise Refusal(
            ("keep_fp32", _TIED),
            "embedding and output layer share one weight, which has one dtype; name both, embedding and output_layer, "
            "or use --untie-embeddings-and-output-weights",
        )


_FREEZE, _TIED = "freeze", "untie_embeddings_and_output_weights"


@rule()
def frozen_parts_are_tried(run: Run) -> None:
    """Require patterns that match parameters, and refuse frozen ones with what has not been written or tried."""
    if not run.optimizer.freeze:
        return
    for pattern in run.optimizer.freeze:
        if not module_names.parameters_of(run, pattern):
            raise Refusal((_FREEZE,), _names_no_parameter(run, pattern))
    if run.derived.zero_stage >= 2:
        raise Refusal(
            (_FREEZE, *stage_flags(run)),
            "a fully sharded model keeps fp32 shards of all weights and gradients; use --use-distributed-optimizer",
        )
    if run.precision.fp8_format is not None:
        raise Refusal((_FREEZE, "fp8_format"), "frozen weights were not tried in FP8; drop one of the two")
    if run.moe.overlap_moe_expert_parallel_comm:
        raise Refusal(
            (_FREEZE, "overlap_moe_expert_parallel_comm"),
            "the parts of a layer were not tried with frozen weights; drop one of the two",
        )
    embedding, output_layer = module_names.at_ends(frozen(run))
    tied = not run.model.untie_embeddings_and_output_weights
    if tied and embedding != output_layer:
        raise Refusal(
            (_FREEZE, _TIED),
            "embedding and output layer share one weight; name both, embedding and output_layer, or none, or use "
            "--untie-embeddings-and-output-weights",
        )
    copied = [name for name, shares in (("mtp_num_layers", run.model.mtp_num_layers), (_TIED, tied)) if shares]
    if embedding and copied and run.parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            (_FREEZE, *copied, "pipeline_model_parallel_size"),
            "the last stage has a copy of the embedding, whose gradients the engine adds to the first one's; do not "
            "freeze the embedding, or use --pipeline-model-parallel-size 1",
        )


def _names_no_parameter(run: Run, pattern: str) -> str:
    near = ", ".join(module_names.near_names(run, pattern))
    return f"{pattern!r} names no module with parameters and no parameter of this model; use e.g. {near}"


@rule()
def multiples_are_pairs(run: Run) -> None:
    """Require that each multiple is PATTERN=X, with a number that a rate or a decay can be multiplied by."""
    for field in module_names.MULTIPLES:
        for word in module_names.group_words(run, field):
            pattern, _, number = word.rpartition("=")
            try:
                multiple = float(number if pattern else "")
            except ValueError:
                meant = number_meant(number, (float,)) or "; write e.g. router=0.5"
                raise Refusal((field,), f"{word!r} is not PATTERN=X, with a number X{meant}") from None
            if not math.isfinite(multiple) or multiple < 0:
                least = "above 0" if field == "lr_mult" else "at least 0"
                raise Refusal((field,), f"{word!r}: a multiple is {least} and finite; use e.g. {pattern}=0.5")
            if field == "lr_mult" and not multiple:
                raise Refusal(
                    (field,),
                    f"{word!r} would compute gradients and moments that change nothing; use --freeze {pattern}, or a "
                    "multiple above 0",
                )


def _reason(run: Run, field: str, pattern: str) -> str:
    """Return why a pattern decides for no parameter, and what would."""
    names = module_names.parameters_of_group(run, pattern)
    if not names:
        parts = module_names.parts(run).items()
        state = [f"{name}.{buffer}" for name, part in parts for buffer in part.state]  # expert_bias, and counts
        if any(fnmatchcase(name, pattern) for name in state):
            return (
                f"{pattern!r} names no parameter but state that no optimizer updates; expert_bias moves by "
                "--moe-router-bias-update-rate"
            )
        return _names_no_parameter(run, pattern)
    if names <= module_names.frozen(run):
        return f"{pattern!r} names parameters that --freeze leaves out of the training; drop it, or do not freeze them"
    return (
        f"{pattern!r} decides nothing: the last word that matches a parameter decides, and later ones of "
        f"{all_fields()[field].flag} match all that it names; put it behind them, or drop it"
    )


@rule()
def multiples_decide_something(run: Run) -> None:
    """Require of each multiple a parameter that is trained and for which no later one decides, and a decay above 0."""
    if module_names.group_words(run, "weight_decay_mult") and not run.optimizer.weight_decay:
        raise Refusal(
            ("weight_decay_mult", "weight_decay"),
            "multiplies a decay of 0; drop it, or use --weight-decay 0.1, and *=0 as the first word of the multiples to"
            " decay nothing else",
        )
    for field in module_names.MULTIPLES:
        deciding = set(module_names.deciding_words(run, field).values())
        for word in module_names.group_words(run, field):
            if word not in deciding:
                pattern = word.rpartition("=")[0]
                raise Refusal((field,), _reason(run, field, pattern))


refuse(  # it could neither be gone on with nor exported
    "an_average_is_saved",
    ("ema_decay", "no_save_optim"),
    "the average is saved with the optimizer; drop one of the two",
    when=lambda run: run.optimizer.ema_decay is not None and run.checkpoint.no_save_optim,
)
_LAYOUT, _RANKS = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"


@rule(needs=LAYOUT)
def each_stage_trains_something(run: Run) -> None:
    """Require of frozen parameters that each virtual stage keeps one to train besides its experts.

    The engine makes an optimizer for each kind of parameters on each stage, whose ranks then step together.
    """
    left_alone = frozen(run)
    if not left_alone:
        return
    trained = [
        name
        for name, parameters in modules(run).items()
        if not name.endswith(".experts") and any(f"{name}.{own}" not in left_alone for own in parameters)
    ]
    for number, stage in enumerate(run.derived.pipeline_stages):
        starts = [f"decoder.layers.{layer}." for layer in stage.layers]
        starts += ["embedding."] * stage.embedding + ["mtp."] * bool(stage.predictions)
        starts += ["decoder.final_layernorm", "output_layer"] * stage.loss
        if not any(name.startswith(tuple(starts)) for name in trained):
            raise Refusal(
                ("freeze", _RANKS),
                f"stage {number} of the pipeline, counted from 0, has nothing to train but experts; leave a parameter "
                f"of it out of the patterns, e.g. its norms, or use fewer stages",
            )


@rule(needs=LAYOUT)
def normed_states_travel_in_the_models_dtype(run: Run) -> None:
    """Refuse fp32 for what a stage sends behind the final norm, which is computed where the last layer is."""
    stages = run.derived.pipeline_stages
    if not run.model.mtp_num_layers or (stages[-1].layers and stages[-1].predictions):
        return
    asks = set_among(run, ("fp32_residual_connection",))
    kept = kept_in_fp32(run)
    if "output_layer" in kept and any(name.endswith("final_layernorm") for name in kept):
        asks.append("keep_fp32")  # its output stays in fp32 then
    if asks:
        raise Refusal(
            (_LAYOUT, "mtp_num_layers", *asks),
            "with multi-token prediction the final norm is where the last t is, and its output is sent on in the"
            " model's dtype; end the layout with a t before mL, or drop the rest",
        )


refuse(
    "fp32_compute_is_our_own",
    of_transformer_engine,
    "not with Transformer Engine's modules, whose dtypes are their own; use --transformer-impl local and "
    "--moe-expert-backend grouped_mm",
    when=of_transformer_engine,
    any_of=("keep_fp32", "fp32_residual_connection", "eval_in_fp32"),
)
_NOT_COMPUTED = {
    "tensorwise": "one scale for a whole tensor needs a maximum over all ranks that share it",
    "delayed": "scales from the maxima of earlier steps are state, which no checkpoint here has",
    "mxfp8": "blocks of 32 with powers of two as scales are another format, of Blackwell, which is not emulated here",
    "custom": "it names a recipe of your own for Transformer Engine, which no flag here does",
}


@rule()
def fp8_scales_are_per_block(run: Run) -> None:
    """Refuse recipes of FP8 other than scales per tile and block, and weights that are stored in FP8."""
    p = run.precision
    if p.fp8_recipe in _NOT_COMPUTED:
        raise Refusal(("fp8_recipe",), f"{_NOT_COMPUTED[p.fp8_recipe]}; use --fp8-recipe blockwise")
    if p.fp8_param_gather:
        raise Refusal(
            ("fp8_param_gather",),
            "weights are stored and gathered in the model's dtype, and rounded to FP8 for a product; drop the flag, or "
            "use --zero-quantized-weights to gather fewer bytes",
        )


unread(
    ("fp8_modules", "first_last_layers_bf16"),
    "fp8_format",
    "nothing is in FP8; drop them, or add --fp8-format e4m3",
    in_megatron=True,
    refused_there=("fp8_modules",),
)
unread(
    ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    "first_last_layers_bf16",
    "these count its layers; add --first-last-layers-bf16",
    in_megatron=True,
)


@rule()
def fp8_is_for_bf16_products(run: Run) -> None:
    """Require what FP8 is computed for: products of a bf16 model that are not to be fp32, by a kernel that has FP8."""
    if run.precision.fp8_format is None:
        return
    if not run.precision.bf16:
        raise Refusal(("fp8_format", "bf16"), "the model around products in FP8 is bf16; add --bf16")
    names = module_names.multiplied_in_fp8(run)
    if not names:
        raise Refusal(
            ("fp8_format", "fp8_modules", "num_experts", "first_last_layers_bf16"),
            "no module of this model is left to multiply in FP8; name others, or drop --fp8-format",
        )
    experts = any(module_names.parts(run)[name].alias == "experts" for name in names)
    if experts and run.moe.moe_expert_backend not in ("grouped_mm", "te"):
        raise Refusal(
            ("fp8_format", "moe_expert_backend"),
            "this kernel has no FP8; use --moe-expert-backend grouped_mm, or --fp8-modules without experts",
        )
    tiles = {
        "hidden_size": (run.model.hidden_size, 128),
        "moe_ffn_hidden_size": (run.derived.moe_ffn_hidden_size, 128 * run.derived.expert_tensor_parallel_size),
    }
    for field, (width, step) in tiles.items():
        if experts and run.moe.moe_expert_backend == "te" and width % step:
            raise Refusal(
                ("fp8_format", "moe_expert_backend", field, "expert_tensor_parallel_size"),
                f"tiles of 128 would have numbers of two matrices; {nearest_multiples(width, step)} works, or "
                "--moe-expert-backend grouped_mm",
            )
    if run.precision.eval_in_fp32:
        raise Refusal(("fp8_format", "eval_in_fp32"), "products would still round to FP8; drop one of them")
    kept = kept_in_fp32(run)
    for name in names:
        if name in kept or module_names.is_inside(name, kept):
            raise Refusal(
                ("fp8_format", "fp8_modules", "keep_fp32"),
                f"{name} cannot be fp32 and FP8; keep other modules, name other --fp8-modules, or drop one flag",
            )


unread(("audit_precision_output",), "audit_precision", "nothing is written; add --audit-precision")
