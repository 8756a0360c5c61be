"""Rules about optimizer and schedule, batches, the memory of activations, micro-batches that overlap, and faults."""

from __future__ import annotations

import importlib.util
import sys

from megatron_moe.config import module_names
from megatron_moe.config.cuda_graphs import WITHIN_MOE, existing_modules, obstacle
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.paths import is_url
from megatron_moe.config.rules.rule import (
    FILES,
    LENGTH,
    Refusal,
    is_half,
    nearest_multiples,
    of_transformer_engine,
    refuse,
    rule,
    set_among,
    spelled,
    stage_flags,
    unread,
    value,
)
from megatron_moe.config.schema import Run

_RECOMPUTED_LAYERS = ("recompute_method", "recompute_num_layers")
unread(
    ("health_sample_tokens",),
    "health_interval",
    "nothing is measured; use --health-interval 10, say",
    is_read=lambda run: run.derived.health_interval,
)
unread(
    ("cross_entropy_chunk_tokens",),
    "cross_entropy_loss_fusion",
    "only the fused loss works in chunks; add --cross-entropy-loss-fusion",
)
refuse(
    "training_has_a_length",
    ("train_iters",),
    "say how many optimizer steps to train, e.g. --train-iters 1000",
    when=lambda run: run.training.train_iters is None and not run.training.skip_train,
    needs=LENGTH,
)
refuse(
    "a_model_without_training_is_loaded",
    ("skip_train", "load", "load_hf"),
    "there is no trained model to evaluate; add --load FOLDER or --load-hf FOLDER",
    when=lambda run: run.training.skip_train and run.checkpoint.load is None and run.checkpoint.load_hf is None,
    needs=FILES,
)
refuse(
    "a_run_without_training_has_no_step",
    ("skip_train",),
    "there is no step to trace; keep one of the two",
    when=lambda run: run.training.skip_train,
    any_of=("audit_precision",),
)
refuse(  # the first also builds buffers
    "audit_needs_a_second_step",
    ("audit_precision", "train_iters"),
    "the second step is traced; use --train-iters 2 or more",
    when=lambda run: run.precision.audit_precision and run.training.train_iters == 1,
)


@rule()
def learning_rates_are_ordered(run: Run) -> None:
    """Require that the rate rises from the warm-up's start to the peak and falls to the end's rate."""
    o = run.optimizer
    for name, low in (("min_lr", o.min_lr), ("lr_warmup_init", o.lr_warmup_init)):
        if low > o.lr:
            flag = "--" + name.replace("_", "-")
            raise Refusal((name, "lr"), f"is above the peak; use {flag} {o.lr} or less")


refuse(
    "decay_leaves_weights",
    ("lr", "weight_decay"),
    lambda run: (
        "a step takes lr x weight decay of each weight, all of it here; use --weight-decay below "
        f"{1 / run.optimizer.lr:g}"
    ),
    when=lambda run: run.optimizer.lr * run.optimizer.weight_decay >= 1.0,
)
unread(
    tuple(name for name in all_fields() if name.startswith("muon_")),
    "optimizer",
    "these are settings of Muon's; add --optimizer muon, or drop them",
    at="muon",
)
refuse(
    "heads_are_split_apart",
    ("muon_split_qkv_per_head", "muon_split_qkv"),
    "contradict each other; drop one of them",
    when=lambda run: run.optimizer.muon_split_qkv_per_head and not run.optimizer.muon_split_qkv,
)
unread(
    ("decoupled_min_lr",),
    "decoupled_lr",
    "it ends the schedule of --decoupled-lr; give that too, or drop it",
    in_megatron=True,
)


@rule()
def decoupled_rates_are_ordered(run: Run) -> None:
    """Require of the schedule of the embedding and the output layer what is required of the other one."""
    options = run.optimizer
    if options.decoupled_lr is None:
        return
    peak, least = module_names.decoupled_range(run)
    end = "min_lr" if options.decoupled_min_lr is None else "decoupled_min_lr"
    if least > peak:
        raise Refusal(("decoupled_lr", end), f"is above the peak at the end; use --decoupled-min-lr {peak} or less")
    if options.lr_warmup_init > peak:
        raise Refusal(
            ("decoupled_lr", "lr_warmup_init"),
            f"all schedules warm up from one rate, which is above this peak; use --lr-warmup-init {peak} or less",
        )
    if module_names.frozen(run).issuperset(module_names.TABLES):
        raise Refusal(("decoupled_lr", "freeze"), "the embedding and the output layer are frozen; drop one of the two")


_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
refuse(
    "samples_have_a_batch",
    ("global_batch_size",),
    "say how many sequences a step has: --global-batch-size 256",
    when=lambda run: run.training.global_batch_size is None,
    any_of=_SAMPLES,
)


@rule()
def lengths_are_given_once(run: Run) -> None:
    """Refuse a length given both in iterations and in sequences."""
    for samples in _SAMPLES[1:]:
        names = (samples, samples.replace("samples", "iters"))
        if len(set_among(run, names)) == 2:
            raise Refusal(names, "both say how long it is; keep one")


refuse(
    "warmup_is_given_once",
    ("lr_warmup_fraction",),
    "both say how long the warm-up is; keep one",
    when=lambda run: run.optimizer.lr_warmup_fraction is not None,
    any_of=("lr_warmup_iters", "lr_warmup_samples"),
)


refuse(
    "schedule_is_of_one_source",
    ("use_checkpoint_opt_param_scheduler",),
    "the schedule would have the checkpoint's settings and the flags'; drop one of the two",
    when=lambda run: run.optimizer.use_checkpoint_opt_param_scheduler,
    any_of=("override_opt_param_scheduler", "lr_restart_at"),
)
refuse(
    "restarts_go_on_from_a_schedule",
    ("finetune",),
    "a schedule begins with the run then; drop one of the two",
    # What --pretrained-checkpoint makes of a first start is no flag of the user's.
    when=lambda run: (
        run.checkpoint.finetune and (run.optimizer.lr_restart_at or run.checkpoint.pretrained_checkpoint is None)
    ),
    any_of=("lr_restart_at", "use_checkpoint_opt_param_scheduler"),
)


@rule()
def restarted_schedules_have_a_length(run: Run) -> None:
    """Require that something of the run is left for a schedule that begins anew, and that its length is known."""
    options, steps = run.optimizer, run.training.train_iters
    if options.lr_restart_at and steps is not None and options.lr_restart_at >= steps:
        raise Refusal(
            ("lr_restart_at", "train_iters"),
            f"no step comes after it; use --train-iters {options.lr_restart_at + 1} or more",
        )
    if (
        options.lr_restart_at
        and run.training.train_samples
        and not (options.lr_decay_iters or options.lr_decay_samples)
    ):
        raise Refusal(
            ("lr_restart_at", "train_samples"), "say how long the new schedule is: --lr-decay-samples 1000000"
        )


def _in_unit(run: Run, iters: str) -> str:
    """Return the flag of a length of the schedule in the unit that the run counts in."""
    name = iters if run.derived.schedule_unit == "iterations" else iters.replace("iters", "samples")
    return f"--{name.replace('_', '-')}"


@rule()
def warmup_ends_before_decay(run: Run) -> None:
    """Require that the warm-up ends before the schedule does."""
    warmup, decay = run.derived.lr_warmup_length, run.derived.lr_decay_length
    if decay is not None and warmup >= decay:
        warmups = set_among(run, ("lr_warmup_samples", "lr_warmup_fraction")) or ["lr_warmup_iters"]
        ends = set_among(run, ("lr_decay_iters", "lr_decay_samples", "train_samples")) or ["train_iters"]
        raise Refusal(
            (*warmups, ends[0]),
            f"the warm-up must end before the schedule's {decay} {run.derived.schedule_unit}; use"
            f" {_in_unit(run, 'lr_warmup_iters')} {decay // 10}",
        )


unread(
    ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    "lr_decay_style",
    "only WSD reads these; use --lr-decay-style WSD or drop them",
    at="WSD",
    in_megatron=True,
)


@rule()
def wsd_phases_fit(run: Run) -> None:
    """Require that warm-up and last phase fit into the schedule."""
    o, decay = run.optimizer, run.derived.lr_decay_length
    if o.lr_decay_style != "WSD" or decay is None:
        return
    last, flag = run.derived.lr_wsd_decay_length, _in_unit(run, "lr_wsd_decay_iters")
    if last is None:
        raise Refusal(
            ("lr_decay_style", "lr_wsd_decay_iters"),
            f"say how long the last phase is, e.g. {flag} {max(1, decay // 10)}",
        )
    room = decay - run.derived.lr_warmup_length
    if last > room:
        phases = set_among(run, ("lr_wsd_decay_samples", "lr_warmup_samples")) or ["lr_wsd_decay_iters"]
        raise Refusal(
            (*phases, "lr_warmup_iters", "lr_decay_iters", "train_iters"),
            f"only {room:g} {run.derived.schedule_unit} are left after the warm-up; use {flag} {int(room)} or less",
        )


unread(("qk_clip",), "optimizer", "Muon alone scales weights after their update; use --optimizer muon", at="muon")
refuse(  # the norms of latent attention are before the projections
    "clipped_queries_are_not_normed",
    ("qk_clip", "qk_layernorm"),
    "the norms give queries and keys the same size whatever their weights are, and bound the logits; keep one",
    when=lambda run: run.optimizer.qk_clip and run.model.qk_layernorm and not run.model.multi_latent_attention,
)
_CLIPPED = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")


@rule()
def clipped_weights_are_trained(run: Run) -> None:
    """Refuse QK-clip where the weights that it would scale are frozen."""
    if not run.optimizer.qk_clip:
        return
    kept = sorted(name for name in module_names.frozen(run) if name.split(".")[-2] in _CLIPPED)
    if kept:
        raise Refusal(
            ("qk_clip", "freeze"),
            f"{kept[0]} would have to be scaled, and is frozen; leave queries and keys out of the frozen parameters, "
            "or drop --qk-clip",
        )


unread(
    ("qk_clip", "log_max_attention_logit"),
    "transformer_impl",
    "the local attention alone measures its logits; use --transformer-impl local",
    at="local",
)


@rule()
def rampup_reaches_the_batch(run: Run, world_size: int) -> None:
    """Require that the batch grows from START by whole INCREMENTs to the global batch, in at least as many samples.

    Each of its sizes is whole micro-batches per rank, and whole rounds with interleaving.
    """
    ramp = run.training.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3:
        raise Refusal(("rampup_batch_size",), "takes three numbers, START INCREMENT SAMPLES; e.g. 8 8 10000")
    start, increment, samples = ramp
    batch = run.derived.global_batch_size(world_size)
    if start >= batch or (batch - start) % increment:
        raise Refusal(
            ("rampup_batch_size", "global_batch_size"),
            f"{start} plus whole increments of {increment} must reach the global batch of {batch};"
            f" use --global-batch-size {start + max(1, (batch - start) // increment) * increment}",
        )
    if samples < (batch - start) // increment:
        raise Refusal(
            ("rampup_batch_size", "global_batch_size"),
            f"{samples} samples are fewer than the {(batch - start) // increment} increments; use more samples",
        )
    unit = run.training.micro_batch_size * run.derived.data_parallel_size(world_size)
    if run.derived.virtual_pipeline_size is not None:
        unit *= run.parallel.pipeline_model_parallel_size
    for word, size in (("START", start), ("INCREMENT", increment)):
        if size % unit:
            raise ConfigError(
                f"{spelled(run, 'rampup_batch_size')}, {spelled(run, 'micro_batch_size')}: {word} {size} must be a"
                f" multiple of {unit}, the samples of one round over all ranks; use {nearest_multiples(size, unit)}"
            )


unread(
    ("eval_interval",),
    "eval_iters",
    "nothing would be evaluated; use --eval-iters 10 or --eval-interval 0",
    in_megatron=True,
)
refuse(
    "full_recompute_is_described",
    lambda run: ("recompute_granularity", *(name for name in _RECOMPUTED_LAYERS if value(run, name) is None)),
    "say which layers: --recompute-method uniform --recompute-num-layers 1 recomputes every one",
    when=lambda run: (
        run.training.recompute_granularity == "full" and any(value(run, name) is None for name in _RECOMPUTED_LAYERS)
    ),
)
unread(
    ("recompute_method", "recompute_num_layers"),
    "recompute_granularity",
    "nothing is recomputed; use --recompute-granularity full",
    in_megatron=True,
)
unread(
    ("recompute_num_layers", "recompute_method"),
    "recompute_granularity",
    "only full recomputation reads these; use --recompute-granularity full",
    is_read=lambda run: run.training.recompute_granularity != "selective",
)
unread(
    ("recompute_modules",),
    "recompute_granularity",
    "only selective recomputation reads these; use --recompute-granularity selective",
    at="selective",
    in_megatron=True,
)


@rule()
def recompute_layers_within_stage(run: Run) -> None:
    """Require that no stage recomputes more layers than it has, and that groups of layers divide each stage."""
    layers = [len(stage.layers) for stage in run.derived.pipeline_stages]
    chunk, count = max(layers), run.training.recompute_num_layers
    if count is not None and count > chunk:
        raise Refusal(
            ("recompute_num_layers", "num_layers", "pipeline_model_parallel_size"),
            f"a stage has {chunk} layers; use --recompute-num-layers {chunk} or less",
        )
    if run.training.recompute_method == "uniform" and any(number % (count or 1) for number in layers):
        raise Refusal(
            ("recompute_num_layers", "recompute_method"),
            f"stages have {', '.join(map(str, sorted(set(layers))))} layers, which groups of {count} don't divide",
        )


@rule()
def recomputed_modules_exist(run: Run) -> None:
    """Refuse to recompute modules that the model does not have, and parts of a MoE layer that is recomputed whole."""
    modules = run.training.recompute_modules or ()
    shared, latent = "moe_shared_expert_intermediate_size", "multi_latent_attention"
    needed = {"moe": "num_experts", "moe_act": "num_experts", "shared_experts": shared, "mla_up_proj": latent}
    for module in modules:
        if module in needed and not value(run, needed[module]):
            raise Refusal(
                ("recompute_modules", needed[module]),
                f"there is no {module} to recompute; use mlp or core_attn instead",
            )
    inner = [module for module in ("moe_act", "shared_experts") if module in modules]
    if "moe" in modules and inner:
        raise Refusal(("recompute_modules",), f"moe holds {' and '.join(inner)}; drop moe or drop what it holds")


_OFFLOAD = "fine_grained_activation_offloading"
unread(
    ("offload_modules",),
    "fine_grained_activation_offloading",
    "only the offload reads these; add --fine-grained-activation-offloading",
    in_megatron=True,
)
refuse(
    "offload_has_modules",
    (_OFFLOAD, "offload_modules"),
    "say which modules: --offload-modules core_attn attn_proj expert_fc1 moe_act, say",
    when=lambda run: run.training.fine_grained_activation_offloading and not run.training.offload_modules,
)


@rule()
def offloaded_modules_are_kept(run: Run) -> None:
    """Refuse to offload what the model does not have, another module keeps, or recomputation does not keep."""
    modules = (run.training.offload_modules or ()) if run.training.fine_grained_activation_offloading else ()
    of_experts = [name for name in modules if name in ("expert_fc1", "moe_act")]
    if of_experts and run.moe.num_experts is None:
        raise Refusal(("offload_modules", "num_experts"), f"there are no experts; drop {' and '.join(of_experts)}")
    if "attn_proj" in modules and "core_attn" not in modules:
        raise Refusal(
            ("offload_modules",),
            "core_attn keeps the same tensor on the device, its output; add core_attn, or drop attn_proj",
        )
    in_fp8 = run.precision.fp8_modules if run.precision.fp8_format is not None else ()
    of_te = {
        "transformer_impl": ("attention", "qkv_linear", "attn_proj"),
        "moe_expert_backend": ("experts", "expert_fc1"),
    }
    for field in of_transformer_engine(run):
        kind, *names = of_te[field]
        stray = [name for name in names if name in modules]
        if stray and kind in in_fp8:
            raise Refusal(
                ("offload_modules", "fp8_format", field),
                f"Transformer Engine keeps other tensors than the inputs in FP8; drop {' and '.join(stray)}",
            )
    if modules and run.training.recompute_granularity == "full":
        raise Refusal(
            (_OFFLOAD, "recompute_granularity"),
            "whole layers keep their input alone; use --recompute-granularity selective, or drop the offload",
        )
    for recomputing, lost in NOT_KEPT.items():
        stray = [name for name in lost if name in modules]
        if recomputing in run.derived.recomputed_modules and stray:
            raise Refusal(
                ("recompute_modules", "offload_modules"),
                f"with {recomputing} recomputed these are not kept; drop {' and '.join(stray)}, or {recomputing}",
            )


NOT_KEPT = {"moe": ("expert_fc1", "moe_act"), "layernorm": ("qkv_linear",), "mla_up_proj": ("core_attn", "attn_proj")}
"""Recomputed modules, and the modules whose inputs are not kept then."""


refuse(
    "offload_takes_whole_layers",
    (_OFFLOAD, "overlap_moe_expert_parallel_comm"),
    "the offload follows whole layers, and that schedule computes them in parts; drop one of the two",
    when=lambda run: run.training.fine_grained_activation_offloading and run.moe.overlap_moe_expert_parallel_comm,
)
unread(
    ("attention_softmax_in_fp32",),
    "transformer_impl",
    "the local attention's softmax is always fp32; drop --no-attention-softmax-in-fp32",
    is_read=lambda run: run.model.transformer_impl != "local",
)
unread(
    ("attention_backend",),
    "transformer_impl",
    "the local attention takes the kernel of torch that fits; use --attention-backend auto",
    is_read=lambda run: run.model.transformer_impl != "local",
    in_megatron=True,
)


@rule(asks_for_package=True)
def transformer_engine_is_installed(run: Run) -> None:
    """Require that Transformer Engine is installed if a flag chooses it."""
    asking = of_transformer_engine(run)
    # One that cannot be loaded is hidden from the engine, by None in its place; what uses it says why.
    hidden = "transformer_engine" in sys.modules
    if asking and not hidden and importlib.util.find_spec("transformer_engine") is None:
        raise Refusal(
            asking,
            "Transformer Engine is not installed; install the extra [gpu], or use --transformer-impl local and"
            " --moe-expert-backend grouped_mm",
            package=True,
        )


_OVERLAP = "overlap_moe_expert_parallel_comm"


@rule()
def expert_overlap_can_work(run: Run) -> None:
    """Require what megatron-core's schedule of two micro-batches asks for, and refuse what works on whole layers."""
    if not run.moe.overlap_moe_expert_parallel_comm:
        return
    if run.parallel.expert_model_parallel_size == 1:
        raise Refusal(
            (_OVERLAP, "expert_model_parallel_size"),
            "there is no exchange to hide; use --expert-model-parallel-size 2 or more, or drop the flag",
        )
    if run.moe.moe_token_dispatcher_type not in ("alltoall", "flex"):
        raise Refusal(
            (_OVERLAP, "moe_token_dispatcher_type"),
            "the schedule takes a dispatch apart; use --moe-token-dispatcher-type alltoall or flex",
        )
    if not is_half(run):
        raise Refusal((_OVERLAP, "bf16"), "megatron-core has the schedule for half precision alone; add --bf16")
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1 and run.derived.virtual_pipeline_size is None:
        raise Refusal(
            (_OVERLAP, "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
            "over several stages it is the interleaved schedule; add --num-layers-per-virtual-pipeline-stage 1, or"
            " bars to --pipeline-model-parallel-layout",
        )
    if run.derived.predictions_pipeline_rank is not None:
        raise Refusal(
            (_OVERLAP, "pipeline_model_parallel_layout"),
            "multi-token prediction is computed with the loss; use mL for the last stage",
        )
    if (run.model.mtp_num_layers or 0) > 1 or (run.model.mtp_num_layers and stages == 1):
        raise Refusal(
            (_OVERLAP, "mtp_num_layers", "pipeline_model_parallel_size"),
            "megatron-core takes one layer of multi-token prediction, and 0.16.1 only over several stages; use"
            " --mtp-num-layers 1 with --pipeline-model-parallel-size 2 or more, or drop one of the two",
        )
    # It does not call what works on whole layers.
    if run.moe.moe_shared_expert_overlap:
        raise Refusal(
            (_OVERLAP, "moe_shared_expert_overlap"),
            "the exchange is hidden once, behind another micro-batch; drop one of the two",
        )
    if run.training.recompute_granularity == "full" or "moe" in run.derived.recomputed_modules:
        raise Refusal(
            (_OVERLAP, "recompute_granularity", "recompute_modules"),
            "a layer in parts is not recomputed as a whole; use --recompute-granularity selective, with e.g."
            " --recompute-modules moe_act layernorm",
        )
    if run.moe.moe_pad_expert_input_to_capacity:
        raise Refusal(
            (_OVERLAP, "moe_pad_expert_input_to_capacity"),
            "experts' rows are not padded between the parts of a layer; drop one of the two",
        )
    if run.derived.zero_stage >= 2:
        raise Refusal(
            (_OVERLAP, *stage_flags(run)),
            "weights are gathered when a layer is called as a whole; use --data-parallel-sharding-strategy optim",
        )
    if run.precision.keep_fp32:
        raise Refusal(
            (_OVERLAP, "keep_fp32"),
            "modules that are kept in fp32 cast what they are called with, and parts of a layer are not called so;"
            " drop one of the two",
        )
    if run.faults.loss_spike_factor is not None:
        raise Refusal(
            (_OVERLAP, "loss_spike_factor"),
            "losses per token are kept when the model is called as a whole; drop one of the two",
        )


@rule()
def delayed_gradients_can_work(run: Run) -> None:
    """Require for later gradients the schedule that finds time for them, and products that can leave them out."""
    if not run.moe.delay_wgrad_compute:
        return
    if not run.moe.overlap_moe_expert_parallel_comm:
        raise Refusal(
            ("delay_wgrad_compute", _OVERLAP),
            "there is no other micro-batch's exchange to hide behind them; add --overlap-moe-expert-parallel-comm",
        )
    if run.moe.moe_expert_backend != "grouped_mm" or run.precision.fp8_format is not None:
        raise Refusal(
            ("delay_wgrad_compute", "moe_expert_backend", "fp8_format"),
            "these products find the gradients of rows and weights together; use --moe-expert-backend grouped_mm"
            " without --fp8-format, or drop the flag",
        )


unread(
    ("cuda_graph_modules", "cuda_graph_warmup_steps"),
    "cuda_graph_impl",
    "no graph is captured; add --cuda-graph-impl local",
    at="local",
    in_megatron=True,
)


@rule()
def named_modules_can_be_captured(run: Run) -> None:
    """Refuse graphs of modules that the model does not have, or whose passes a graph cannot repeat."""
    named = run.training.cuda_graph_modules or ()
    if "moe" in named and (within := [module for module in WITHIN_MOE if module in named]):
        raise Refusal(("cuda_graph_modules",), f"moe holds {' and '.join(within)}; drop what it holds")
    if "moe_preprocess" in named and "moe_router" not in named:
        raise Refusal(("cuda_graph_modules",), "moe_preprocess goes on in the router's graph; add moe_router")
    for module in named:
        if module not in (existing := existing_modules(run)):
            raise Refusal(("cuda_graph_modules",), f"no {module} is captured in this model; use {' '.join(existing)}")
        if (found := obstacle(run, module)) is not None:
            raise Refusal(("cuda_graph_modules", found[0]), f"{found[1]}; drop {module}, or change the other setting")


refuse(
    "spikes_have_a_folder",
    ("loss_spike_factor", "fault_dir", "save"),
    "there is no folder for the batches; add --fault-dir FOLDER or --save FOLDER",
    when=lambda run: (
        run.faults.loss_spike_factor is not None
        and run.faults.fault_dir is None
        and (run.checkpoint.save is None or is_url(run.checkpoint.save))
    ),
)
