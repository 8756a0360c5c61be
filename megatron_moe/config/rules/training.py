"""Rules about precision, optimizer, schedule, batches over time and recomputation."""

from __future__ import annotations

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rules.wording import nearest_multiples, refuse, set_among, spelled
from megatron_moe.config.schema import Run

_LOSS_SCALE_FIELDS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

# ---- precision


def one_half_precision(run: Run, world_size: int) -> None:
    """Weights have one dtype."""
    if run.precision.bf16 and run.precision.fp16:
        raise refuse(run, ("bf16", "fp16"), "choose one; drop --fp16, or use --no-bf16 over a preset")


def loss_scale_flags_need_fp16(run: Run, world_size: int) -> None:
    """Only fp16 gradients are scaled against underflow."""
    stray = set_among(run, ("loss_scale", *_LOSS_SCALE_FIELDS))
    if stray and not run.precision.fp16:
        raise refuse(run, (*stray, "fp16"), "only fp16 reads these; drop them or use --fp16")


def constant_loss_scale_is_alone(run: Run, world_size: int) -> None:
    """A constant loss scale does not start, grow or shrink."""
    stray = set_among(run, _LOSS_SCALE_FIELDS)
    if stray and run.precision.loss_scale is not None:
        raise refuse(run, (*stray, "loss_scale"), "the constant scale ignores these; drop them or --loss-scale")


def loss_scales_are_ordered(run: Run, world_size: int) -> None:
    """The dynamic scale starts at or above its floor."""
    if run.precision.initial_loss_scale < run.precision.min_loss_scale:
        raise refuse(
            run,
            ("initial_loss_scale", "min_loss_scale"),
            f"the first scale is below the smallest; use --min-loss-scale {run.precision.initial_loss_scale:g} or less",
        )


def bf16_reduction_needs_bf16(run: Run, world_size: int) -> None:
    """Gradients reduced in bf16 are those of a bf16 model, and then they are not fp32."""
    p = run.precision
    if p.grad_reduce_in_bf16 and not p.bf16:
        raise refuse(run, ("grad_reduce_in_bf16", "bf16"), "the gradients are not bf16; use --bf16 or drop the flag")
    if p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32:
        raise refuse(
            run, ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"), "these exclude each other; choose one"
        )


def fp32_exceptions_need_half_precision(run: Run, world_size: int) -> None:
    """In an fp32 run everything is fp32 already."""
    stray = set_among(run, ("keep_fp32", "fp32_residual_connection", "eval_in_fp32"))
    if stray and not (run.precision.bf16 or run.precision.fp16):
        raise refuse(run, (*stray, "bf16", "fp16"), "everything is fp32 already; add --bf16 or --fp16")


def audit_output_needs_audit(run: Run, world_size: int) -> None:
    """A path for files that are not written would be ignored."""
    if set_among(run, ("audit_precision_output",)) and not run.precision.audit_precision:
        raise refuse(run, ("audit_precision_output", "audit_precision"), "nothing is written; add --audit-precision")


def audit_needs_a_second_step(run: Run, world_size: int) -> None:
    """The first step also builds buffers, so the second is the one that is traced."""
    if run.precision.audit_precision and run.training.train_iters == 1:
        raise refuse(run, ("audit_precision", "train_iters"), "the second step is traced; use --train-iters 2 or more")


def health_sample_needs_health(run: Run, world_size: int) -> None:
    """Without measurements there is nothing to sample."""
    if set_among(run, ("health_sample_tokens",)) and run.derived.health_interval == 0:
        raise refuse(
            run, ("health_sample_tokens", "health_interval"), "nothing is measured; use --health-interval 10, say"
        )


def chunk_tokens_need_the_fused_loss(run: Run, world_size: int) -> None:
    """Only the fused loss works in chunks."""
    if set_among(run, ("cross_entropy_chunk_tokens",)) and not run.model.cross_entropy_loss_fusion:
        raise refuse(
            run,
            ("cross_entropy_chunk_tokens", "cross_entropy_loss_fusion"),
            "only the fused loss works in chunks; add --cross-entropy-loss-fusion",
        )


# ---- optimizer and schedule


def training_has_a_length(run: Run, world_size: int) -> None:
    """How long to train is never guessed."""
    if run.training.train_iters is None:
        raise refuse(run, ("train_iters",), "say how many optimizer steps to train, e.g. --train-iters 1000")


def learning_rates_are_ordered(run: Run, world_size: int) -> None:
    """The schedule rises to the peak from the warm-up's start and falls to the end's rate."""
    o = run.optimizer
    for name, low in (("min_lr", o.min_lr), ("lr_warmup_init", o.lr_warmup_init)):
        if low > o.lr:
            flag = "--" + name.replace("_", "-")
            raise refuse(run, (name, "lr"), f"lies above the peak; use {flag} {o.lr} or less")


def warmup_is_given_once(run: Run, world_size: int) -> None:
    """The warm-up is a count of iterations or a share of the decay."""
    if run.optimizer.lr_warmup_iters and run.optimizer.lr_warmup_fraction is not None:
        raise refuse(run, ("lr_warmup_iters", "lr_warmup_fraction"), "both say how long the warm-up is; keep one")


def warmup_ends_before_decay(run: Run, world_size: int) -> None:
    """The warm-up is the first part of the schedule and leaves a rest."""
    warmup, decay = run.derived.lr_warmup_iters, run.derived.lr_decay_iters
    if decay is not None and warmup >= decay:
        names = ["lr_warmup_iters", "lr_decay_iters" if run.optimizer.lr_decay_iters is not None else "train_iters"]
        raise refuse(
            run,
            names,
            f"the warm-up must end before the schedule's {decay} iterations; use --lr-warmup-iters {decay // 10}",
        )


def wsd_flags_need_wsd(run: Run, world_size: int) -> None:
    """Only warm-up, stable, decay has a last phase of its own."""
    stray = set_among(run, ("lr_wsd_decay_style", "lr_wsd_decay_iters"))
    if stray and run.optimizer.lr_decay_style != "WSD":
        raise refuse(run, (*stray, "lr_decay_style"), "only WSD reads these; use --lr-decay-style WSD or drop them")


def wsd_phases_fit(run: Run, world_size: int) -> None:
    """Warm-up and last phase fit into the schedule."""
    o, decay = run.optimizer, run.derived.lr_decay_iters
    if o.lr_decay_style != "WSD" or decay is None:
        return
    if o.lr_wsd_decay_iters is None:
        raise refuse(
            run,
            ("lr_decay_style", "lr_wsd_decay_iters"),
            f"say how long the last phase is, e.g. --lr-wsd-decay-iters {max(1, decay // 10)}",
        )
    room = decay - run.derived.lr_warmup_iters
    if o.lr_wsd_decay_iters > room:
        raise refuse(
            run,
            ("lr_wsd_decay_iters", "lr_warmup_iters", "lr_decay_iters", "train_iters"),
            f"only {room} iterations are left after the warm-up; use --lr-wsd-decay-iters {room} or less",
        )


# ---- batches over time


def rampup_reaches_the_batch(run: Run, world_size: int) -> None:
    """The batch grows from START by whole INCREMENTs to the global batch, over at least as many samples as steps."""
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
    """Every batch of the ramp-up is a whole number of micro-batches per rank, and of rounds where PP interleaves."""
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
    """An interval without iterations would evaluate nothing."""
    if run.training.eval_interval and not run.training.eval_iters:
        raise refuse(
            run, ("eval_interval", "eval_iters"), "nothing would be evaluated; use --eval-iters 10 or --eval-interval 0"
        )


# ---- recomputation


def full_recompute_is_described(run: Run, world_size: int) -> None:
    """Recomputing whole layers needs to know which."""
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
    """Method and layers belong to full recomputation, modules to selective."""
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
    """No stage recomputes more layers than it has."""
    chunk = max(run.derived.pipeline_layer_counts) // (run.derived.virtual_pipeline_size or 1)
    count = run.training.recompute_num_layers
    if count is not None and count > chunk:
        raise refuse(
            run,
            ("recompute_num_layers", "num_layers", "pipeline_model_parallel_size"),
            f"a stage has {chunk} layers; use --recompute-num-layers {chunk} or less",
        )


def recomputed_modules_exist(run: Run, world_size: int) -> None:
    """What the model does not have cannot be recomputed."""
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
    """The whole MoE layer recomputed leaves nothing of it to recompute once more."""
    modules = run.training.recompute_modules or ()
    inner = [module for module in ("moe_act", "shared_experts") if module in modules]
    if "moe" in modules and inner:
        raise refuse(run, ("recompute_modules",), f"moe holds {' and '.join(inner)}; drop moe or drop what it holds")


# ---- Rules about what is done when numbers go wrong or ranks die.


def spikes_have_a_folder(run: Run, world_size: int) -> None:
    """The batch of a spike is written somewhere."""
    if run.faults.loss_spike_factor is not None and run.faults.fault_dir is None and run.checkpoint.save is None:
        raise refuse(
            run,
            ("loss_spike_factor", "fault_dir", "save"),
            "there is no folder for the batches; add --fault-dir FOLDER or --save FOLDER",
        )
