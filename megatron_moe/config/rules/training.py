"""Rules about reports, the loss, optimizer, schedule, batches over time, and faults."""

from __future__ import annotations

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rules.wording import nearest_multiples, refuse, set_among, spelled
from megatron_moe.config.schema import Run


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


def decay_leaves_weights(run: Run, world_size: int) -> None:
    """Refuse a decay that takes all of a weight in one step, or more: a step takes rate times decay of it."""
    o = run.optimizer
    if o.lr * o.weight_decay >= 1.0:
        raise refuse(
            run,
            ("lr", "weight_decay"),
            f"a step takes lr x weight decay of each weight, all of it here; use --weight-decay below {1 / o.lr:g}",
        )


_MUON_FLAGS = (
    "muon_momentum",
    "muon_nesterov",
    "muon_num_ns_steps",
    "muon_coefficient_type",
    "muon_fp32_matmul_prec",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_split_qkv",
    "muon_split_qkv_per_head",
)


def muon_flags_need_muon(run: Run, world_size: int) -> None:
    """Refuse settings of Muon's for AdamW."""
    stray = set_among(run, _MUON_FLAGS)
    if stray and run.optimizer.optimizer != "muon":
        raise refuse(run, (*stray, "optimizer"), "are settings of Muon's; add --optimizer muon, or drop them")


def heads_are_split_apart(run: Run, world_size: int) -> None:
    """Refuse a matrix for each head where queries, keys and values are to be one."""
    o = run.optimizer
    if o.muon_split_qkv_per_head and not o.muon_split_qkv:
        raise refuse(run, ("muon_split_qkv_per_head", "muon_split_qkv"), "contradict each other; drop one of them")


_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def samples_have_a_batch(run: Run, world_size: int) -> None:
    """Require for what is counted in sequences how many a step has."""
    counted = set_among(run, _SAMPLES)
    if counted and run.training.global_batch_size is None:
        raise refuse(run, (*counted, "global_batch_size"), "say how many sequences a step has: --global-batch-size 256")


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
    warmup, decay = run.derived.lr_warmup_length, run.derived.lr_decay_length
    if decay is not None and warmup >= decay:
        warmups = set_among(run, ("lr_warmup_samples", "lr_warmup_fraction")) or ["lr_warmup_iters"]
        ends = set_among(run, ("lr_decay_iters", "lr_decay_samples", "train_samples")) or ["train_iters"]
        raise refuse(
            run,
            (*warmups, ends[0]),
            f"the warm-up must end before the schedule's {decay} {run.derived.schedule_unit}; use"
            f" {_in_unit(run, 'lr_warmup_iters')} {decay // 10}",
        )


def _in_unit(run: Run, iters: str) -> str:
    """Return the flag of a length of the schedule in the unit that the run counts in."""
    name = iters if run.derived.schedule_unit == "iterations" else iters.replace("iters", "samples")
    return f"--{name.replace('_', '-')}"


def wsd_flags_need_wsd(run: Run, world_size: int) -> None:
    """Refuse settings of the last phase of warm-up, stable, decay with another schedule."""
    stray = set_among(run, ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"))
    if stray and run.optimizer.lr_decay_style != "WSD":
        raise refuse(run, (*stray, "lr_decay_style"), "only WSD reads these; use --lr-decay-style WSD or drop them")


def wsd_phases_fit(run: Run, world_size: int) -> None:
    """Require that warm-up and last phase fit into the schedule."""
    o, decay = run.optimizer, run.derived.lr_decay_length
    if o.lr_decay_style != "WSD" or decay is None:
        return
    last, flag = run.derived.lr_wsd_decay_length, _in_unit(run, "lr_wsd_decay_iters")
    if last is None:
        raise refuse(
            run,
            ("lr_decay_style", "lr_wsd_decay_iters"),
            f"say how long the last phase is, e.g. {flag} {max(1, decay // 10)}",
        )
    room = decay - run.derived.lr_warmup_length
    if last > room:
        phases = set_among(run, ("lr_wsd_decay_samples", "lr_warmup_samples")) or ["lr_wsd_decay_iters"]
        raise refuse(
            run,
            (*phases, "lr_warmup_iters", "lr_decay_iters", "train_iters"),
            f"only {room:g} {run.derived.schedule_unit} are left after the warm-up; use {flag} {int(room)} or less",
        )


def clipped_logits_need_muon(run: Run, world_size: int) -> None:
    """Refuse QK-clip with another optimizer than Muon, which scales the weights that it has updated."""
    if run.optimizer.qk_clip and run.optimizer.optimizer != "muon":
        raise refuse(
            run, ("qk_clip", "optimizer"), "Muon alone scales weights after their update; use --optimizer muon"
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


# Faults


def spikes_have_a_folder(run: Run, world_size: int) -> None:
    """Require a folder for the batches of loss spikes."""
    if run.faults.loss_spike_factor is not None and run.faults.fault_dir is None and run.checkpoint.save is None:
        raise refuse(
            run,
            ("loss_spike_factor", "fault_dir", "save"),
            "there is no folder for the batches; add --fault-dir FOLDER or --save FOLDER",
        )
