"""Rules about precision, optimizer, schedule, batches over time, recomputation and faults."""

from __future__ import annotations

from megatron_moe.config import module_names
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rules.wording import nearest_multiples, refuse, set_among, spelled
from megatron_moe.config.schema import Run

_LOSS_SCALE_FIELDS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

# Precision


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


_NOT_COMPUTED = {
    "tensorwise": "one scale for a whole tensor needs a maximum over all ranks that share it",
    "delayed": "scales from the maxima of earlier steps are state, which no checkpoint here has",
    "mxfp8": "blocks of 32 with powers of two as scales are another format, of Blackwell, which is not emulated here",
    "custom": "it names a recipe of your own for Transformer Engine, which no flag here does",
}


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


def health_sample_needs_health(run: Run, world_size: int) -> None:
    """Refuse a sample size of the health measurements without measurements."""
    if set_among(run, ("health_sample_tokens",)) and run.derived.health_interval == 0:
        raise refuse(
            run, ("health_sample_tokens", "health_interval"), "nothing is measured; use --health-interval 10, say"
        )


def chunk_tokens_need_the_fused_loss(run: Run, world_size: int) -> None:
    """Refuse a chunk size without the fused loss."""
    if set_among(run, ("cross_entropy_chunk_tokens",)) and not run.model.cross_entropy_loss_fusion:
        raise refuse(
            run,
            ("cross_entropy_chunk_tokens", "cross_entropy_loss_fusion"),
            "only the fused loss works in chunks; add --cross-entropy-loss-fusion",
        )


# Optimizer and schedule


def training_has_a_length(run: Run, world_size: int) -> None:
    """Require the length of the training, which has no default."""
    if run.training.train_iters is None:
        raise refuse(run, ("train_iters",), "say how many optimizer steps to train, e.g. --train-iters 1000")


def learning_rates_are_ordered(run: Run, world_size: int) -> None:
    """Require that the rate rises from the warm-up's start to the peak and falls to the end's rate."""
    o = run.optimizer
    for name, low in (("min_lr", o.min_lr), ("lr_warmup_init", o.lr_warmup_init)):
        if low > o.lr:
            flag = "--" + name.replace("_", "-")
            raise refuse(run, (name, "lr"), f"is above the peak; use {flag} {o.lr} or less")


_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def samples_have_a_batch(run: Run, world_size: int) -> None:
    """Require for what is counted in sequences how many an iteration has, always the same."""
    counted = set_among(run, _SAMPLES)
    if counted and run.training.global_batch_size is None:
        raise refuse(run, (*counted, "global_batch_size"), "say how many sequences a step has: --global-batch-size 256")
    if counted and run.training.rampup_batch_size is not None:
        raise refuse(
            run,
            (*counted, "rampup_batch_size"),
            "steps have different batches, and the schedule counts steps; use --train-iters, --lr-decay-iters and"
            " --lr-warmup-iters",
        )


def lengths_are_given_once(run: Run, world_size: int) -> None:
    """Refuse a length given both in iterations and in sequences."""
    for samples in _SAMPLES[1:]:
        names = (samples, samples.replace("samples", "iters"))
        if len(set_among(run, names)) == 2:
            raise refuse(run, names, "both say how long it is; keep one")


def warmup_is_given_once(run: Run, world_size: int) -> None:
    """Refuse a warm-up given both as a count and as a share of the decay."""
    counts = set_among(run, ("lr_warmup_iters", "lr_warmup_samples"))
    if counts and run.optimizer.lr_warmup_fraction is not None:
        raise refuse(run, (*counts, "lr_warmup_fraction"), "both say how long the warm-up is; keep one")


def warmup_ends_before_decay(run: Run, world_size: int) -> None:
    """Require that the warm-up ends before the schedule does."""
    warmup, decay = run.derived.lr_warmup_iters, run.derived.lr_decay_iters
    if decay is not None and warmup >= decay:
        warmups = set_among(run, ("lr_warmup_samples", "lr_warmup_fraction")) or ["lr_warmup_iters"]
        ends = set_among(run, ("lr_decay_iters", "lr_decay_samples", "train_samples")) or ["train_iters"]
        raise refuse(
            run,
            (*warmups, ends[0]),
            f"the warm-up must end before the schedule's {decay:g} iterations; use --lr-warmup-iters"
            f" {int(decay // 10)}",
        )


def wsd_flags_need_wsd(run: Run, world_size: int) -> None:
    """Refuse settings of the last phase of warm-up, stable, decay with another schedule."""
    stray = set_among(run, ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"))
    if stray and run.optimizer.lr_decay_style != "WSD":
        raise refuse(run, (*stray, "lr_decay_style"), "only WSD reads these; use --lr-decay-style WSD or drop them")


def wsd_phases_fit(run: Run, world_size: int) -> None:
    """Require that warm-up and last phase fit into the schedule."""
    o, decay = run.optimizer, run.derived.lr_decay_iters
    if o.lr_decay_style != "WSD" or decay is None:
        return
    last = run.derived.lr_wsd_decay_iters
    if last is None:
        raise refuse(
            run,
            ("lr_decay_style", "lr_wsd_decay_iters"),
            f"say how long the last phase is, e.g. --lr-wsd-decay-iters {int(max(1, decay // 10))}",
        )
    room = decay - run.derived.lr_warmup_iters
    if last > room:
        phases = set_among(run, ("lr_wsd_decay_samples", "lr_warmup_samples")) or ["lr_wsd_decay_iters"]
        raise refuse(
            run,
            (*phases, "lr_warmup_iters", "lr_decay_iters", "train_iters"),
            f"only {room:g} iterations are left after the warm-up; use --lr-wsd-decay-iters {int(room)} or less",
        )


# Batches over time


def rampup_reaches_the_batch(run: Run, world_size: int) -> None:
    """Require that the batch grows from START by whole INCREMENTs to the global batch.

    The ramp-up takes at least as many samples as steps.
    """
    ramp = run.training.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3:
        raise refuse(run, ("rampup_batch_size",), "takes three numbers, START INCREMENT SAMPLES; e.g. 8 8 10000")
    start, increment, samples = ramp
    batch = run.derived.global_batch_size(world_size)
    if start >= batch or (batch - start) % increment:
        raise refuse(
            run,
            ("rampup_batch_size", "global_batch_size"),
            f"{start} plus whole increments of {increment} must reach the global batch of {batch};"
            f" use --global-batch-size {start + max(1, (batch - start) // increment) * increment}",
        )
    if samples < (batch - start) // increment:
        raise refuse(
            run,
            ("rampup_batch_size", "global_batch_size"),
            f"{samples} samples are fewer than the {(batch - start) // increment} increments; use more samples",
        )


def rampup_batches_divide(run: Run, world_size: int) -> None:
    """Require whole micro-batches per rank in every batch of the ramp-up, and whole rounds with interleaving."""
    ramp = run.training.rampup_batch_size
    if ramp is None:
        return
    unit = run.training.micro_batch_size * run.derived.data_parallel_size(world_size)
    if run.derived.virtual_pipeline_size is not None:
        unit *= run.parallel.pipeline_model_parallel_size
    for word, size in zip(("START", "INCREMENT"), ramp):
        if size % unit:
            raise ConfigError(
                f"{spelled(run, 'rampup_batch_size')}, {spelled(run, 'micro_batch_size')}: {word} {size} must be a"
                f" multiple of {unit}, the samples of one round over all ranks; use {nearest_multiples(size, unit)}"
            )


def evaluation_has_iterations(run: Run, world_size: int) -> None:
    """Refuse an evaluation interval without evaluation iterations."""
    if run.training.eval_interval and not run.training.eval_iters:
        raise refuse(
            run, ("eval_interval", "eval_iters"), "nothing would be evaluated; use --eval-iters 10 or --eval-interval 0"
        )


# Recomputation


def full_recompute_is_described(run: Run, world_size: int) -> None:
    """Require method and layers for the recomputation of whole layers."""
    t = run.training
    missing = [
        n
        for n, v in (("recompute_method", t.recompute_method), ("recompute_num_layers", t.recompute_num_layers))
        if v is None
    ]
    if t.recompute_granularity == "full" and missing:
        raise refuse(
            run,
            ("recompute_granularity", *missing),
            "say which layers: --recompute-method uniform --recompute-num-layers 1 recomputes every one",
        )


def recompute_flags_fit_granularity(run: Run, world_size: int) -> None:
    """Refuse method and layers without full recomputation, and modules without selective."""
    granularity = run.training.recompute_granularity
    if granularity != "full":
        stray = set_among(run, ("recompute_method", "recompute_num_layers"))
        if stray:
            raise refuse(
                run,
                (*stray, "recompute_granularity"),
                "only full recomputation reads these; use --recompute-granularity full",
            )
    if granularity != "selective" and run.training.recompute_modules is not None:
        raise refuse(
            run,
            ("recompute_modules", "recompute_granularity"),
            "only selective recomputation reads these; use --recompute-granularity selective",
        )


def recompute_layers_within_stage(run: Run, world_size: int) -> None:
    """Require that no stage recomputes more layers than it has."""
    chunk = max(len(stage.layers) for stage in run.derived.pipeline_stages)
    count = run.training.recompute_num_layers
    if count is not None and count > chunk:
        raise refuse(
            run,
            ("recompute_num_layers", "num_layers", "pipeline_model_parallel_size"),
            f"a stage has {chunk} layers; use --recompute-num-layers {chunk} or less",
        )


def recomputed_modules_exist(run: Run, world_size: int) -> None:
    """Refuse to recompute modules that the model does not have."""
    modules = run.training.recompute_modules or ()
    needed = {
        "moe": ("num_experts", run.moe.num_experts),
        "moe_act": ("num_experts", run.moe.num_experts),
        "shared_experts": ("moe_shared_expert_intermediate_size", run.moe.moe_shared_expert_intermediate_size),
        "mla_up_proj": ("multi_latent_attention", run.model.multi_latent_attention),
    }
    for module in modules:
        field, value = needed.get(module, ("", True))
        if not value:
            raise refuse(
                run, ("recompute_modules", field), f"there is no {module} to recompute; use mlp or core_attn instead"
            )


def recomputed_modules_do_not_nest(run: Run, world_size: int) -> None:
    """Refuse to recompute parts of the MoE layer when the whole layer is recomputed."""
    modules = run.training.recompute_modules or ()
    inner = [module for module in ("moe_act", "shared_experts") if module in modules]
    if "moe" in modules and inner:
        raise refuse(run, ("recompute_modules",), f"moe holds {' and '.join(inner)}; drop moe or drop what it holds")


# Faults


def spikes_have_a_folder(run: Run, world_size: int) -> None:
    """Require a folder for the batches of loss spikes."""
    if run.faults.loss_spike_factor is not None and run.faults.fault_dir is None and run.checkpoint.save is None:
        raise refuse(
            run,
            ("loss_spike_factor", "fault_dir", "save"),
            "there is no folder for the batches; add --fault-dir FOLDER or --save FOLDER",
        )
