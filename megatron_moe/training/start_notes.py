"""The start of a run's log: what is trained, and what its settings cost or leave out."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.config import rules
from megatron_moe.config.cuda_graphs import captured_modules, existing_modules, obstacle
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.latent_exchange import exchange_cost
from megatron_moe.config.module_names import kept_in_fp32, multiplied_in_fp8
from megatron_moe.config.rules.rule import spelled
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.engine import defects
from megatron_moe.io.texts import listed
from megatron_moe.kernels import choice
from megatron_moe.model.build import count_frozen
from megatron_moe.moe.grouped_gemm_fp8 import fp8_form
from megatron_moe.platform import env_vars, hardware
from megatron_moe.training.trainer import Trainer


def report_start(trainer: Trainer) -> None:
    """Report the run's facts and notes. Collective over all ranks."""
    run, ranks = trainer.run, trainer.rank_facts
    facts: dict[str, Any] = {
        "device": str(platform.device()),
        "ranks": ranks.world_size,
        "layout": (
            f"TP {ranks.tp_size}, CP {ranks.cp_size}, PP {ranks.pp_size}, DP {ranks.dp_size}, EP {ranks.ep_size}, "
            f"ETP {ranks.etp_size}"
        ),
        "dtype": run.derived.params_dtype_name,
        "parameters": run.derived.parameter_count(trainer.padded_vocab_size),
        "active_parameters": run.derived.active_parameter_count(trainer.padded_vocab_size),
        "vocabulary": trainer.padded_vocab_size,
        "global_batch_size": trainer.schedule.final,
        "tokens_per_step": trainer.schedule.final * run.model.seq_length,
        "start_iteration": trainer.progress.iteration,
        "train_iters": run.training.train_iters,
    }
    if trainer.unigram_entropy is not None:
        facts["unigram_entropy"] = trainer.unigram_entropy
    trainer.reporter.start(facts)
    if trainer.started_from is not None:
        trainer.reporter.event("loaded", f"read {trainer.started_from}", shown=False, path=str(trainer.started_from))
    kernels = []
    if platform.has_cuda():
        kernels.append(f"CUDA's allocator: {env_vars.allocator_setting() or 'as torch sets it, with fixed segments'}")
    else:
        kernels.append("CPU kernels: C")
        if (reason := choice.why_no_c()) is not None:
            kernels = [f"CPU kernels: torch's operations, not C ({reason})"]
    warnings = {*trainer.precision_warnings, *trainer.checkpoint_warnings}
    frozen = []
    if (patterns := run.optimizer.freeze) and not run.training.skip_train:
        number, every = count_frozen(trainer.trained.model, trainer.trained.pg_collection), facts["parameters"]
        frozen.append(
            f"--freeze {' '.join(patterns)}: {number:,} of {every:,} parameters are frozen: no gradient, no "
            "moments, no weight decay, and no share of the gradient's norm; the expert bias of a frozen router stays "
            "too"
        )
    for note in (
        *run.warnings,
        *platform.unusable_libraries(),
        *trainer.build_notes,
        *_rate_notes(trainer),
        *_precision_notes(run),
        *frozen,
        *_document_notes(trainer),
        *_sharding_notes(run, ranks.world_size),
        *_overlap_notes(run, ranks.world_size),
        *_expert_notes(trainer),
        *_graph_notes(run),
        *kernels,
        *defects.start_lines(defects.engine_version()),
    ):
        trainer.reporter.event("warning" if note in warnings else "message", note)


def _rate_notes(trainer: Trainer) -> list[str]:
    """Say of a run that has loaded something whether its learning rate's schedule begins or goes on."""
    if trainer.started_from is None or trainer.run.training.skip_train:
        return []
    schedule = trainer.trained.scheduler
    unit = "sequences" if schedule.in_samples else "iterations"
    position, warmup, end = schedule.num_steps, schedule.lr_warmup_steps, schedule.lr_decay_steps
    begun, where = schedule.begun["iteration"], "a schedule begins"
    if position == 0 and begun:
        where = f"a new schedule begins after iteration {begun:,}"
    elif position > 0:
        where = f"goes on after {position:,} {unit} of the schedule"
        if begun:
            where += f" that began after iteration {begun:,}"
    phase = "no warm-up"
    if position < warmup:
        phase = f"warm-up until {warmup:,.0f}"
    elif position >= end and schedule.lr_decay_style != "constant":
        phase = f"over at {end:,}; --lr-restart-at {trainer.progress.iteration} begins another"
    elif warmup:
        phase = "warm-up over"
    return [f"learning rate: {where} ({phase}); {schedule.get_lr({}):.6g} now"]


def _precision_notes(run: Run) -> list[str]:
    """Say how this run adds where it is not the default, and where it departs from the model's dtype, a line each."""
    notes = []
    if run.training.deterministic_mode:
        settings = ", ".join(f"{name}={value}" for name, value in env_vars.deterministic_environment().items())
        notes.append(f"deterministic mode: the same ranks, devices and versions give the same bits again ({settings})")
    if run.precision.allow_tf32 and platform.has_cuda():
        notes.append("TF32: products of fp32 numbers multiply ten bits of mantissa, but for those of routers")
    elif run.precision.allow_tf32:
        notes.append("--allow-tf32 has no effect here: without a CUDA device fp32 numbers are multiplied as they are")
    if run.derived.params_dtype_name != "float32" and not run.derived.grads_in_fp32:
        short = "bf16" if run.precision.bf16 else "fp16"
        notes.append(
            f"gradients are accumulated over micro-batches and reduced over ranks in {short}: each sum is rounded"
        )
    counts: Counter[str] = Counter()
    for name in multiplied_in_fp8(run):
        form = fp8_form()
        if name.endswith(".experts"):
            if run.moe.moe_expert_backend == "te":
                form = "te"
        elif run.model.transformer_impl != "local" and not name.endswith("_down_proj"):
            form = "te"  # the down projections of latent attention are our own modules under either implementation
        counts[form] += 1
    if counts:
        p = run.precision
        forms = "; ".join(f"{counts[form]} modules {words}" for form, words in _FP8_FORMS.items() if form in counts)
        notes.append(
            f"--fp8-format {p.fp8_format}, --fp8-recipe {p.fp8_recipe}, --fp8-modules {' '.join(p.fp8_modules)}: "
            f"products in FP8 of {forms}. This was not verified on hardware that has FP8"
        )
    if kept := kept_in_fp32(run):
        notes.append(f"in fp32 by --keep-fp32: {listed(kept, 4)}")
    return notes


_FP8_FORMS = {
    "emulated": "emulated: operands are rounded to FP8 and multiplied in fp32, which shows what FP8 does to the loss "
    "and is slower than bf16",
    "triton": "by Triton's kernels",
    "scaled": "by torch's scaled product",
    "te": "by Transformer Engine",
}


def _document_notes(trainer: Trainer) -> list[str]:
    """Say how many documents a training sequence has, and what is lost to padding."""
    data, train = trainer.run.data, trainer.splits.train
    if data.program_data or train is None or not data.reset_attention_mask:
        return []
    weights = getattr(train, "weights", [1.0])  # of a blend
    documents = padding = 0.0
    for weight, member in zip(weights, getattr(train, "datasets", [train])):
        facts, share = member.facts(), weight / sum(weights)
        documents, padding = documents + share * facts.documents, padding + share * facts.padding
    counted = f"documents: {documents:.2f} of the index in a sequence on average"
    if data.document_boundaries == "eod":
        counted += ", where each end-of-document token ends one (--document-boundaries eod)"
    return [f"{counted}; {100 * padding:.2f} % of positions are padding (--packing {data.packing})"]


def _graph_notes(run: Run) -> list[str]:
    """Say what is captured in CUDA graphs, and what is not though no flag leaves it out."""
    if run.training.cuda_graph_impl == "none":
        return []
    if not platform.has_cuda():
        return ["--cuda-graph-impl local has no effect here: without a CUDA device there are no graphs"]
    notes, steps = [], run.training.cuda_graph_warmup_steps
    if captured := captured_modules(run):
        notes.append(f"CUDA graphs of {', '.join(captured)}, after {steps} steps. This was not verified on hardware")
    left_out: dict[tuple[str, str], list[str]] = {}
    for module in existing_modules(run) if run.training.cuda_graph_modules is None else ():
        if (found := obstacle(run, module)) is not None:
            left_out.setdefault(found, []).append(module)
    for (field, reason), modules in left_out.items():
        notes.append(f"no CUDA graph of {', '.join(modules)}: {spelled(run, field)}: {reason}")
    return notes


def _sharding_notes(run: Run, world_size: int) -> list[str]:
    """Say what CP ranks exchange, and where a flag of sharding or offloading has no effect, a line each."""
    notes: list[str] = []
    if exchange := run.derived.mla_cp_exchange:
        cost = exchange_cost(run, run.derived.params_dtype_name)
        notes.append(
            f"--mla-cp-exchange {exchange}: context-parallel ranks exchange {getattr(cost, exchange):,} numbers of a "
            f"token and layer (latent: {cost.latent:,}, expanded: {cost.expanded:,})"
        )
    stage, size = run.derived.zero_stage, run.parallel.zero_hpz_partition_size
    if stage >= 2 and run.moe.num_experts is not None and run.derived.expert_data_parallel_size(world_size) == 1:
        notes.append(
            f"ZeRO stage {stage}: there is one copy of each expert (expert-DP 1), and so nothing of the experts to "
            "share; the other weights are sharded"
        )
    if stage >= 2 and size == run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size:
        notes.append(
            f"--zero-hpz-partition-size {size}: these are all ranks that share weights, as without the flag; with the "
            "ranks of one machine, the backward pass gathers within it"
        )
    if run.training.fine_grained_activation_offloading and not platform.has_cuda():
        notes.append(
            "--fine-grained-activation-offloading has no effect here: without a CUDA device, memory is the host's"
        )
    return notes


_HIDING_WORK = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "gradient_accumulation_fusion",
    "moe_shared_expert_overlap",
)


def _overlap_notes(run: Run, world_size: int) -> list[str]:
    """Name the flags that hide or save work, which several data-parallel GPUs could use and the run has not set."""
    ranks = run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size
    if ranks == 1 or not platform.has_cuda():
        return []
    given, defaults, found = flatten(run), flatten(Run()), []
    for name in _HIDING_WORK:
        if given[name] != defaults[name]:
            continue
        with suppress(ConfigError):  # what this run refuses is not proposed
            candidate = replace(run, **{name: True})
            rules.check(candidate, world_size)
            run = candidate
            found.append(f"--{name.replace('_', '-')}")
    if not found:
        return []
    return [f"off, and worth a try on {ranks} data-parallel GPUs: {', '.join(found)}"]


def _expert_notes(trainer: Trainer) -> list[str]:
    """Say what settings of the experts cost or leave out, a line each."""
    run = trainer.run
    moe = run.moe
    notes: list[str] = []
    if moe.num_experts is None:
        return notes
    if moe.moe_router_force_load_balancing:
        notes.append(
            "WARNING: --moe-router-force-load-balancing sends tokens to experts ROUND ROBIN: times are worth "
            "something, losses are not, and no model is trained"
        )
    if moe.moe_expert_backend == "grouped_mm" and platform.has_streams():
        dtype = run.derived.params_dtype_name
        if run.derived.fp8_format_of_experts is None and not hardware.has_grouped_kernel(getattr(torch, dtype)):
            notes.append(
                f"--moe-expert-backend grouped_mm: torch has no grouped kernel for {dtype} on this device. It waits "
                "for the counts and multiplies expert by expert, which is slow; the kernel needs --bf16 and compute "
                "capability 9.x or 10.x"
            )
    if moe.moe_shared_expert_overlap and not platform.has_cuda():
        notes.append("--moe-shared-expert-overlap has no effect here: without a CUDA device there are no streams")
    if moe.overlap_moe_expert_parallel_comm and not platform.has_cuda():
        notes.append(
            "--overlap-moe-expert-parallel-comm has no effect here: without a CUDA device there are no streams, and "
            "micro-batches run one after the other"
        )
    if "global_aux_loss" in moe.moe_router_load_balancing_type and trainer.schedule.final_micro_batches > 1:
        if moe.moe_global_aux_loss_counts == "batch":
            notes.append(
                "global_aux_loss counts the whole global batch before each step, which costs one more forward pass: a "
                "third more than forward and backward alone; --moe-global-aux-loss-counts running does without"
            )
        else:
            notes.append(
                "global_aux_loss goes by the micro-batches so far in a step (--moe-global-aux-loss-counts running): "
                "its gradient depends on the micro-batch size and the number of ranks"
            )
    if moe.moe_input_jitter_eps is not None:
        notes.append("--moe-input-jitter-eps draws other noise on another layout, as dropout does")
    return notes
