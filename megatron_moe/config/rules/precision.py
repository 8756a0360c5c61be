"""Rules about dtypes: halves, the loss scale, fused gradients, fp32 exceptions, TF32, FP8 and the audit."""

from __future__ import annotations

from megatron_moe.config import module_names
from megatron_moe.config.rules.wording import nearest_multiples, refuse, set_among
from megatron_moe.config.schema import Run

_LOSS_SCALE_FIELDS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def one_half_precision(run: Run, world_size: int) -> None:
    """Refuse bf16 and fp16 together: weights have one dtype."""
    if run.precision.bf16 and run.precision.fp16:
        raise refuse(run, ("bf16", "fp16"), "choose one; drop --fp16, or use --no-bf16 over a preset")


def loss_scale_flags_need_fp16(run: Run, world_size: int) -> None:
    """Refuse loss scaling without fp16."""
    stray = set_among(run, ("loss_scale", *_LOSS_SCALE_FIELDS))
    if stray and not run.precision.fp16:
        raise refuse(run, (*stray, "fp16"), "only fp16 reads these; drop them or use --fp16")


def constant_loss_scale_is_alone(run: Run, world_size: int) -> None:
    """Refuse settings of the dynamic loss scale with a constant one."""
    stray = set_among(run, _LOSS_SCALE_FIELDS)
    if stray and run.precision.loss_scale is not None:
        raise refuse(run, (*stray, "loss_scale"), "the constant scale ignores these; drop them or --loss-scale")


def loss_scales_are_ordered(run: Run, world_size: int) -> None:
    """Require that the dynamic scale starts at or above its floor."""
    if run.precision.initial_loss_scale < run.precision.min_loss_scale:
        raise refuse(
            run,
            ("initial_loss_scale", "min_loss_scale"),
            f"the first scale is below the smallest; use --min-loss-scale {run.precision.initial_loss_scale:g} or less",
        )


def bf16_reduction_needs_bf16(run: Run, world_size: int) -> None:
    """Refuse gradients reduced in bf16 without a bf16 model, or together with fp32 gradients."""
    p = run.precision
    if p.grad_reduce_in_bf16 and not p.bf16:
        raise refuse(run, ("grad_reduce_in_bf16", "bf16"), "the gradients are not bf16; use --bf16 or drop the flag")
    if p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32:
        raise refuse(
            run, ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"), "these exclude each other; choose one"
        )


def fused_gradients_have_fp32_sums(run: Run, world_size: int) -> None:
    """Refuse to add weight gradients in the product where there is no fp32 sum, or the experts' product cannot."""
    if not run.precision.gradient_accumulation_fusion:
        return
    flag = "gradient_accumulation_fusion"
    if not run.derived.grads_in_fp32:
        raise refuse(
            run,
            (flag, *set_among(run, ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))),
            "a sum in half precision rounds what is added to it; add gradients in fp32, or drop the flag",
        )
    if run.derived.zero_stage >= 2:
        raise refuse(
            run,
            (flag, *set_among(run, ("data_parallel_sharding_strategy", "use_torch_fsdp2"))),
            "gradients are sent as they are made, and no rank has the sum of a whole one; "
            "use --data-parallel-sharding-strategy optim, or drop the flag",
        )
    if run.moe.num_experts is not None and run.moe.moe_expert_backend in ("te", "loop"):
        raise refuse(
            run,
            (flag, "moe_expert_backend"),
            "its experts' gradients are rounded before they are added; use --moe-expert-backend grouped_mm, or drop "
            "the flag",
        )
    if run.derived.fp8_format_of_experts is not None:
        raise refuse(
            run,
            (flag, "fp8_format"),
            "the experts' gradients are rounded as they leave a product in FP8; give --fp8-modules without experts, or "
            "drop the flag",
        )


def fp32_exceptions_need_half_precision(run: Run, world_size: int) -> None:
    """Refuse fp32 exceptions in an fp32 run, where they have no effect."""
    stray = set_among(run, ("keep_fp32", "fp32_residual_connection", "eval_in_fp32"))
    if stray and not (run.precision.bf16 or run.precision.fp16):
        raise refuse(run, (*stray, "bf16", "fp16"), "everything is fp32 already; add --bf16 or --fp16")


def moments_are_stored_by_the_precision_aware_optimizer(run: Run, world_size: int) -> None:
    """Refuse dtypes of moments for an optimizer that stores them in fp32."""
    options = run.optimizer
    stray = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(options, name) != "fp32"]
    if stray and not options.use_precision_aware_optimizer:
        raise refuse(
            run,
            (*stray, "use_precision_aware_optimizer"),
            "without it moments are fp32; add --use-precision-aware-optimizer, or drop them",
        )


_NOT_COMPUTED = {
    "tensorwise": "one scale for a whole tensor needs a maximum over all ranks that share it",
    "delayed": "scales from the maxima of earlier steps are state, which no checkpoint here has",
    "mxfp8": "blocks of 32 with powers of two as scales are another format, of Blackwell, which is not emulated here",
    "custom": "it names a recipe of your own for Transformer Engine, which no flag here does",
}


def tf32_is_for_fp32_runs(run: Run, world_size: int) -> None:
    """Refuse TF32 in half precision, whose few products of fp32 numbers are there to be exact."""
    half = set_among(run, ("bf16", "fp16"))
    if run.precision.allow_tf32 and half:
        raise refuse(
            run,
            ("allow_tf32", *half),
            "it makes products of an fp32 run faster, and here fp32 is what has to be exact; drop one of the two",
        )


def fp8_scales_are_per_block(run: Run, world_size: int) -> None:
    """Refuse recipes of FP8 other than scales per tile and block, and weights that are stored in FP8."""
    p = run.precision
    if p.fp8_recipe in _NOT_COMPUTED:
        raise refuse(run, ("fp8_recipe",), f"{_NOT_COMPUTED[p.fp8_recipe]}; use --fp8-recipe blockwise")
    if p.fp8_param_gather:
        raise refuse(
            run,
            ("fp8_param_gather",),
            "weights are stored and gathered in the model's dtype, and rounded to FP8 for a product; drop the flag, or "
            "use --zero-quantized-weights to gather fewer bytes",
        )


def fp8_narrowing_needs_fp8(run: Run, world_size: int) -> None:
    """Refuse flags that leave something out of FP8 where nothing is in it."""
    p = run.precision
    stray = set_among(run, ("fp8_modules", "first_last_layers_bf16"))
    if stray and p.fp8_format is None:
        raise refuse(run, (*stray, "fp8_format"), "nothing is in FP8; drop them, or add --fp8-format e4m3")
    stray = set_among(run, ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"))
    if stray and not p.first_last_layers_bf16:
        raise refuse(run, (*stray, "first_last_layers_bf16"), "these count its layers; add --first-last-layers-bf16")


def fp8_is_for_bf16_products(run: Run, world_size: int) -> None:
    """Require what FP8 is computed for: products of a bf16 model, and of its experts by a kernel that has FP8."""
    if run.precision.fp8_format is None:
        return
    if not run.precision.bf16:
        raise refuse(run, ("fp8_format", "bf16"), "the model around products in FP8 is bf16; add --bf16")
    names = module_names.multiplied_in_fp8(run)
    if not names:
        raise refuse(
            run,
            ("fp8_format", "fp8_modules", "num_experts", "first_last_layers_bf16"),
            "no module of this model is left to multiply in FP8; name others, or drop --fp8-format",
        )
    experts = any(module_names.parts(run)[name].alias == "experts" for name in names)
    if experts and run.moe.moe_expert_backend not in ("grouped_mm", "te"):
        raise refuse(
            run,
            ("fp8_format", "moe_expert_backend"),
            "this kernel has no FP8; use --moe-expert-backend grouped_mm, or --fp8-modules without experts",
        )


def fp8_of_transformer_engine_takes_whole_tiles(run: Run, world_size: int) -> None:
    """Require that Transformer Engine cuts the experts' matrices where our own kernels do."""
    if run.derived.fp8_format_of_experts is None or run.moe.num_experts is None or run.moe.moe_expert_backend != "te":
        return
    etp = run.derived.expert_tensor_parallel_size
    for field, width, step in (
        ("hidden_size", run.model.hidden_size, 128),
        ("moe_ffn_hidden_size", run.derived.moe_ffn_hidden_size, 128 * etp),
    ):
        if width % step:
            raise refuse(
                run,
                ("fp8_format", "moe_expert_backend", field, "expert_tensor_parallel_size"),
                f"tiles of 128 would have numbers of two matrices; {nearest_multiples(width, step)} works, or "
                "--moe-expert-backend grouped_mm",
            )


def fp8_and_fp32_exclude_each_other(run: Run, world_size: int) -> None:
    """Refuse FP8 for modules that are to compute in fp32."""
    if run.precision.fp8_format is None:
        return
    if run.precision.eval_in_fp32:
        raise refuse(run, ("fp8_format", "eval_in_fp32"), "products would still round to FP8; drop one of them")
    kept = module_names.kept_in_fp32(run)
    names = module_names.multiplied_in_fp8(run)
    both = [name for name in names if name in kept or module_names.is_inside(name, kept)]
    if both:
        raise refuse(
            run,
            ("fp8_format", "fp8_modules", "keep_fp32"),
            f"{both[0]} cannot be fp32 and FP8; keep other modules, name other --fp8-modules, or drop one flag",
        )


def audit_output_needs_audit(run: Run, world_size: int) -> None:
    """Refuse a path of the audit's files without an audit."""
    if set_among(run, ("audit_precision_output",)) and not run.precision.audit_precision:
        raise refuse(run, ("audit_precision_output", "audit_precision"), "nothing is written; add --audit-precision")


def audit_needs_a_second_step(run: Run, world_size: int) -> None:
    """Require two steps for the audit: the second is traced, since the first also builds buffers."""
    if run.precision.audit_precision and run.training.train_iters == 1:
        raise refuse(run, ("audit_precision", "train_iters"), "the second step is traced; use --train-iters 2 or more")
