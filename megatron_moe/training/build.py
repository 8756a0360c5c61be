"""The trainer of a run, built from its plan, and the start of its log.

Built are process groups, model, optimizer, data, and what a checkpoint holds. The log says what is trained, and what
the settings cost or leave out.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe import platform
from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.errors import on_rank_zero
from megatron_moe.checkpoint.load import Loaded, load
from megatron_moe.checkpoint.load import verified as verified_checkpoint
from megatron_moe.checkpoint.lock import WriterLock
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.checkpoint.save import Saver, SaveTarget, lock_folder
from megatron_moe.checkpoint.state import TrainingProgress, TrainState
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.module_names import kept_in_fp32, multiplied_in_fp8
from megatron_moe.config.schema import Run
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.index_file import label_entropy
from megatron_moe.engine import defects
from megatron_moe.hf.importing import fill
from megatron_moe.kernels import choice
from megatron_moe.model.build import build_model, count_frozen
from megatron_moe.moe.grouped_gemm_fp8 import fp8_form
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.optim.weight_average import build_average
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import RankFacts, seed_everything
from megatron_moe.platform import env_vars
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.precision.contract import PrecisionGuard
from megatron_moe.report.reporter import MakePageSink, Reporter
from megatron_moe.report.sink import Sink
from megatron_moe.training.node_files import require_one_view
from megatron_moe.training.plan import RunPlan, evaluates_test_split, same_data_notes
from megatron_moe.training.state_checks import check_precision, damage_on_ranks
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.trainer import RECORDS_KEPT, Splits, Trainer, fault_folder
from megatron_moe.training.watchdog import Watchdog


@dataclass(frozen=True)
class RunRanks:
    """The process groups, the watchdog and the checkpoint lock that the ranks share until the run ends."""

    pg_collection: Any
    facts: RankFacts
    watchdog: Watchdog | None
    lock: WriterLock | None
    """The lock of the folder of `--save`, on rank 0."""
    lock_notes: list[str]


@dataclass(frozen=True)
class LoadedModel:
    """Model, optimizer and schedule with the state that they start from."""

    trained: TrainState
    guard: PrecisionGuard
    loaded: Loaded
    """What came from a checkpoint or an imported folder; empty for a fresh model."""
    origin: Provenance
    """What the steps keep of the source that the model was imported from."""
    origin_notes: list[str]


def build_trainer(
    planned: RunPlan,
    resources: ExitStack,
    also: Sequence[Sink],
    stage: Callable[[str], None],
    page_sink: MakePageSink | None = None,
) -> Trainer:
    """Build everything a run needs and load what it starts from.

    Collective over all ranks. `resources` is what is given back when the run ends.
    """
    ranks = _meet(planned.run, resources)
    # A checkpoint whose content was verified; it may be an earlier step than was planned.
    start_from = verified_checkpoint(planned.run, planned.start_from, _say)
    if start_from.known_bad:
        notes = same_data_notes(planned.run, planned.data, start_from)
        planned = replace(planned, data_notes=[*planned.data_notes, *notes])
    planned = planned.with_start(start_from)
    planned = replace(planned, data_notes=[*planned.data_notes, *require_one_view(planned, ranks.facts)])
    run = planned.run
    stage("building the model")
    built = _build_and_load(planned, ranks)
    stage("building the datasets")
    progress, source = built.loaded.progress, planned.start_from.source
    # Each split with as many samples as the run will read.
    steps_left = max((run.training.train_iters or 0) - progress.iteration, 0)
    trained_on = planned.schedule.samples_after(steps_left, progress.consumed_samples)
    evaluated, tested = run.training.eval_iters * planned.schedule.final, 0
    if evaluates_test_split(run):
        tested = evaluated
    splits = Splits(
        *build_datasets(run, planned.tokenizer, trained_on, evaluated, tested, pg_collection=ranks.pg_collection)
    )
    is_writer = ranks.facts.rank == 0
    reporter = Reporter(run, is_writer=is_writer, start_iteration=progress.iteration, also=also, page_sink=page_sink)
    resources.enter_context(reporter)
    if ranks.watchdog is not None:
        resources.push(ranks.watchdog.notice)  # last, to be called first
    saver, saved, loaded_step, resumed = None, None, None, {}
    start: Path | str | None = run.checkpoint.load_hf
    if source is not None:
        start = source.step
        if not run.checkpoint.finetune:
            resumed = source.state
        if planned.start_from.continues:
            saved, loaded_step = source.step, planned.start_from.start_iteration
    if run.checkpoint.save is not None:
        where = SaveTarget.of(run, lock=ranks.lock, loaded=loaded_step, origin=built.origin)
        saver = Saver(run, where, reporter.event, saved)
    evaluation_pending = bool(resumed.get("evaluation_owed"))
    if evaluation_pending:  # the loaded step was saved before it; without a metrics file it is made again
        is_missing = is_writer and not reporter.has_evaluated("valid")
        evaluation_pending = bool(max_over_ranks(is_missing)[0])
    trainer = Trainer(
        run=run,
        rank_facts=ranks.facts,
        trained=built.trained,
        schedule=planned.schedule,
        splits=splits,
        vocab_size=planned.vocab_size,
        padded_vocab_size=run.derived.padded_vocab_size(planned.vocab_size),
        tokenizer={
            "type": planned.tokenizer.name,
            "sha256": planned.tokenizer.sha256,
            "eod": planned.tokenizer.eod,
            "bos": planned.tokenizer.bos,
        },
        data=planned.data,
        reporter=reporter,
        started_from=start,
        build_notes=[
            *ranks.lock_notes,
            *planned.data_notes,
            *planned.start_from.notes,
            *built.loaded.notes,
            *built.origin_notes,
        ],
        has_own_sinks=bool(max_over_ranks(len(also))[0]),
        guard=built.guard,
        watchdog=ranks.watchdog,
        saver=saver,
        unigram_entropy=_unigram_entropy(planned, ranks, splits),
        precision_warnings=built.loaded.precision_warnings,
        checkpoint_warnings=planned.start_from.warnings,
        progress=progress,
        saved=saved,
        evaluation_pending=evaluation_pending,
        records=deque(resumed.get("records", []), maxlen=RECORDS_KEPT),
    )
    folder = fault_folder(run)
    if ranks.watchdog is not None:
        ranks.watchdog.on_abort = reporter.on_abort
        ranks.watchdog.folder = folder  # not earlier: a folder for checkpoints is claimed first
    if folder is not None and groups.collectives_record() is not None:
        with suppress(OSError):  # NCCL would write its flight recorder there, and makes no folder
            folder.mkdir(parents=True, exist_ok=True)
    return trainer


def _meet(run: Run, resources: ExitStack) -> RunRanks:
    """Initialize the process groups, start the watchdog and lock the folder of `--save` against other runs."""
    pg_collection = groups.initialize(run, fault_folder(run))
    facts = groups.rank_facts()
    if not platform.has_cuda():
        resources.enter_context(choice.same_on_all_ranks())
    watchdog = None
    if run.faults.watchdog:
        watchdog = Watchdog(
            groups.side_store(),
            facts.rank,
            facts.world_size,
            60 * run.parallel.distributed_timeout_minutes,
            prefix=f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            on_device=platform.has_cuda(),
            recorded=groups.collectives_record(),
        )
        resources.enter_context(watchdog)
    lock, lock_notes = None, list[str]()
    if run.checkpoint.save is not None:
        lock, lock_notes = lock_folder(run)
    if lock is not None:
        resources.enter_context(lock)
    return RunRanks(pg_collection, facts, watchdog, lock, lock_notes)


def _build_and_load(planned: RunPlan, ranks: RunRanks) -> LoadedModel:
    """Build model, optimizer and schedule, and load or import the state that they start from."""
    run, source = planned.run, planned.start_from.source
    seed_everything(run)
    guard = PrecisionGuard()
    model = build_model(run, ranks.pg_collection, planned.vocab_size, guard=guard)
    optimizer = build_optimizer(run, model, ranks.pg_collection)
    scheduler, average = build_scheduler(run, optimizer), build_average(run, model, optimizer)
    trained = TrainState(model, optimizer, scheduler, ranks.pg_collection, average)
    check_precision(guard, "building the optimizer", run, trained)
    loaded = Loaded(TrainingProgress(), [], [])
    if planned.imported is not None:
        filled = fill(run, planned.imported, trained, _say)
        if average is not None:
            average.restart()
        loaded = Loaded(TrainingProgress(), [*planned.imported.notes, *filled.notes], filled.precision_warnings)
        _check_loaded(f"--load-hf {run.checkpoint.load_hf}", run, trained, guard, ranks)
    elif source is not None:
        loaded = load(run, source, trained)
        _check_loaded(f"--load {source.step}", run, trained, guard, ranks)
    comes_from, notes = Provenance(), list[str]()
    if planned.imported is not None:
        comes_from, notes = on_rank_zero(planned.imported.origin) or (comes_from, notes)
    elif source is not None:
        comes_from, notes = on_rank_zero(lambda: origin.of_step(source.step, source.state)) or (comes_from, notes)
    return LoadedModel(trained, guard, loaded, comes_from, notes)


def _check_loaded(start: str, run: Run, trained: TrainState, guard: PrecisionGuard, ranks: RunRanks) -> None:
    """Check the dtypes and the values of the state that a run starts from."""
    check_precision(guard, start, run, trained)
    if (damage := damage_on_ranks(trained, ranks.facts)) is not None:
        raise ConfigError(f"{start}: {damage}; start from another step, or from a sound copy")


def _unigram_entropy(planned: RunPlan, ranks: RunRanks, splits: Splits) -> float | None:
    """Return the entropy in nats per token of the tokens that the validation predicts, under their own frequencies.

    Computed where rank 0 reads; None where there is no validation, and on the other ranks.
    """
    evaluations = planned.run.training.eval_iters
    if ranks.facts.rank != 0 or not evaluations or splits.valid is None:
        return None
    return label_entropy(splits.valid, evaluations * planned.schedule.final)


def _say(line: str) -> None:
    print(line, flush=True)


def report_start(trainer: Trainer) -> None:
    """Report the run's facts and notes. Collective over all ranks."""
    run = trainer.run
    trainer.reporter.start(_facts(trainer))
    if trainer.started_from is not None:
        trainer.reporter.event("loaded", f"read {trainer.started_from}", shown=False, path=str(trainer.started_from))
    kernels = []
    if not platform.has_cuda():
        kernels.append("CPU kernels: C")
        if (reason := choice.why_no_c()) is not None:
            kernels = [f"CPU kernels: torch's operations, not C ({reason})"]
    warnings = {*trainer.precision_warnings, *trainer.checkpoint_warnings}
    for note in (
        *run.warnings,
        *platform.unusable_libraries(),
        *trainer.build_notes,
        *_precision_notes(run),
        *_frozen_notes(trainer, trainer.trained.pg_collection),
        *_sharding_notes(run, trainer.rank_facts.world_size),
        *_offload_notes(run),
        *_expert_notes(trainer),
        *kernels,
        *defects.start_lines(defects.engine_version()),
    ):
        trainer.reporter.event("warning" if note in warnings else "message", note)


def _facts(trainer: Trainer) -> dict[str, Any]:
    """Return what is worth knowing at the start, in the order to show."""
    run, ranks = trainer.run, trainer.rank_facts
    parameters = run.derived.parameter_count(trainer.padded_vocab_size)
    facts: dict[str, Any] = {
        "device": str(platform.device()),
        "ranks": ranks.world_size,
        "layout": (
            f"TP {ranks.tp_size}, CP {ranks.cp_size}, PP {ranks.pp_size}, DP {ranks.dp_size}, EP {ranks.ep_size}, "
            f"ETP {ranks.etp_size}"
        ),
        "dtype": run.derived.params_dtype_name,
        "parameters": parameters,
        "active_parameters": run.derived.active_parameter_count(trainer.padded_vocab_size),
        "vocabulary": trainer.padded_vocab_size,
        "global_batch_size": trainer.schedule.final,
        "tokens_per_step": trainer.schedule.final * run.model.seq_length,
        "start_iteration": trainer.progress.iteration,
        "train_iters": run.training.train_iters,
    }
    if trainer.unigram_entropy is not None:
        facts["unigram_entropy"] = trainer.unigram_entropy
    return facts


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
        shown = ", ".join(kept[:4])
        if len(kept) > 4:
            shown += f" and {len(kept) - 4} more"
        notes.append(f"in fp32 by --keep-fp32: {shown}")
    return notes


_FP8_FORMS = {
    "emulated": "emulated: operands are rounded to FP8 and multiplied in fp32, which shows what FP8 does to the loss "
    "and is slower than bf16",
    "scaled": "by torch's scaled product",
    "te": "by Transformer Engine",
}


def _frozen_notes(trainer: Trainer, groups_of_ranks: ProcessGroups) -> list[str]:
    """Say how many parameters of the whole model are frozen. Collective over all ranks where there are any."""
    patterns = trainer.run.optimizer.freeze
    if not patterns:
        return []
    number = count_frozen(trainer.trained.model, groups_of_ranks)
    every = trainer.run.derived.parameter_count(trainer.padded_vocab_size)
    return [
        f"--freeze {' '.join(patterns)}: {number:,} of {every:,} parameters are frozen: no gradient, no "
        "moments, no weight decay, and no share of the gradient's norm; the expert bias of a frozen router stays too"
    ]


def _sharding_notes(run: Run, world_size: int) -> list[str]:
    """Say where the layout leaves a sharding flag without an effect, a line each."""
    notes: list[str] = []
    if run.derived.zero_stage < 2:
        return notes
    if run.moe.num_experts is not None and run.derived.expert_data_parallel_size(world_size) == 1:
        notes.append(
            f"ZeRO stage {run.derived.zero_stage}: there is one copy of each expert (expert-DP 1), and so nothing of "
            "the experts to share; the other weights are sharded"
        )
    size = run.parallel.zero_hpz_partition_size
    if size == run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size:
        notes.append(
            f"--zero-hpz-partition-size {size}: these are all ranks that share weights, as without the flag; with the "
            "ranks of one machine, the backward pass gathers within it"
        )
    return notes


def _offload_notes(run: Run) -> list[str]:
    """Say where no activation is offloaded."""
    if not run.training.fine_grained_activation_offloading or platform.has_cuda():
        return []
    return ["--fine-grained-activation-offloading has no effect here: without a CUDA device, memory is the host's"]


def _expert_notes(trainer: Trainer) -> list[str]:
    """Say what settings of the experts cost or leave out, a line each."""
    moe = trainer.run.moe
    notes: list[str] = []
    if moe.num_experts is None:
        return notes
    if moe.moe_router_force_load_balancing:
        notes.append(
            "WARNING: --moe-router-force-load-balancing sends tokens to experts ROUND ROBIN: times are worth "
            "something, losses are not, and no model is trained"
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
