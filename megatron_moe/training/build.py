"""The trainer of a run, built from its plan: process groups, model, optimizer, data, and what a checkpoint holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from megatron_moe import platform
from megatron_moe.checkpoint import local, origin
from megatron_moe.checkpoint.errors import on_rank_zero
from megatron_moe.checkpoint.load import Loaded, load
from megatron_moe.checkpoint.load import verified as verified_checkpoint
from megatron_moe.checkpoint.lock import WriterLock
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.checkpoint.save import Saver, SaveTarget, lock_folder
from megatron_moe.checkpoint.state import TrainingProgress, TrainState
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.checks import chat_template
from megatron_moe.data.datasets import build_datasets, build_named
from megatron_moe.data.index_file import label_counts, label_entropy
from megatron_moe.hf.importing import fill
from megatron_moe.io.program import say
from megatron_moe.kernels import choice
from megatron_moe.model.build import build_model
from megatron_moe.model.cuda_graphs import replay_graphs
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.optim.weight_average import WeightAverage
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import RankFacts, seed_everything
from megatron_moe.precision.contract import PrecisionGuard
from megatron_moe.report.reporter import MakePageSink, Reporter
from megatron_moe.report.sink import Sink
from megatron_moe.training.node_files import require_one_view
from megatron_moe.training.plan import RunPlan, evaluates_test_split, same_data_notes
from megatron_moe.training.program import ProgramParts
from megatron_moe.training.state_checks import check_precision, damage_on_ranks
from megatron_moe.training.step_sums import max_over_ranks
from megatron_moe.training.trainer import RECORDS_KEPT, Splits, Trainer, fault_folder
from megatron_moe.training.watchdog import Leave, Watchdog


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
    page_sink: MakePageSink | None,
    parts: ProgramParts,
    leave: Leave | None = None,
) -> Trainer:
    """Build everything a run needs and load what it starts from.

    Collective over all ranks. `resources` is what is given back when the run ends; `leave` is the watchdog's.
    """
    ranks = _meet(planned.run, resources, leave)
    planned, nodes = _with_verified_start(planned, ranks)
    run = planned.run
    stage("building the model")
    built = _build_and_load(planned, ranks, parts)
    stage("building the datasets")
    progress, source = built.loaded.progress, planned.start_from.source
    # Each split with as many samples as the run will read.
    steps_left = max((run.training.train_iters or 0) - progress.iteration, 0)
    trained_on = 0 if run.training.skip_train else planned.schedule.samples_after(steps_left, progress.consumed_samples)
    evaluated = run.training.eval_iters * planned.schedule.final
    tested = evaluated if evaluates_test_split(run) else 0
    splits = _build_splits(planned, ranks, parts, trained_on, evaluated, tested, progress)
    is_writer = ranks.facts.rank == 0
    unigram_entropy, predicted_bytes = None, dict[str, int]()
    if is_writer and evaluated and parts.data is None:
        unigram_entropy, predicted_bytes = _predicted_text(planned, splits, evaluated)
    reporter = Reporter(run, is_writer=is_writer, start_iteration=progress.iteration, also=also, page_sink=page_sink)
    resources.enter_context(reporter)
    if ranks.watchdog is not None:
        resources.push(ranks.watchdog.notice)  # last, to be called first
    saver, local_saver, saved, loaded_step, resumed = None, None, None, None, {}
    start: Path | str | None = run.checkpoint.load_hf
    if source is not None:
        start = source.step
        if not (run.checkpoint.finetune or run.training.skip_train):
            resumed = source.state
        if planned.start_from.continues:
            saved, loaded_step = source.step, planned.start_from.start_iteration
    if run.checkpoint.save is not None:
        where = SaveTarget.of(run, lock=ranks.lock, loaded=loaded_step, origin=built.origin)
        saver = Saver(run, where, reporter.event, saved)
        if nodes is not None:
            local_saver = local.LocalSaver(run, where, reporter.event, nodes)
    evaluation_pending = bool(resumed.get("evaluation_owed"))
    at_start = run.training.eval_at_start and progress.iteration == 0 and not run.training.skip_train
    if evaluation_pending:  # the loaded step was saved before it; without a metrics file it is made again
        has_all = all(map(reporter.has_evaluated, splits.validation))
        evaluation_pending = bool(max_over_ranks(is_writer and not has_all)[0])
    trainer = Trainer(
        run=run,
        rank_facts=ranks.facts,
        trained=built.trained,
        schedule=planned.schedule,
        splits=splits,
        vocab_size=planned.vocab_size,
        padded_vocab_size=run.derived.padded_vocab_size(planned.vocab_size),
        program=parts.names(),
        tokenizer={**planned.tokenizer.facts(), "chat_template": chat_template(run)},
        data=planned.data,
        former_data=planned.former_data,
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
        local_saver=local_saver,
        unigram_entropy=unigram_entropy,
        predicted_bytes=predicted_bytes,
        precision_warnings=built.loaded.precision_warnings,
        checkpoint_warnings=planned.start_from.warnings,
        progress=progress,
        saved=saved,
        evaluation_pending=evaluation_pending or at_start,
        records=deque(resumed.get("records", []), maxlen=RECORDS_KEPT),
        graphs=replay_graphs(run, built.trained.model),
    )
    folder = fault_folder(run)
    if ranks.watchdog is not None:
        ranks.watchdog.on_abort = reporter.on_abort
        ranks.watchdog.folder = folder  # not earlier: a folder for checkpoints is claimed first
    if folder is not None and groups.collectives_record() is not None:
        with suppress(OSError):  # NCCL would write its flight recorder there, and makes no folder
            folder.mkdir(parents=True, exist_ok=True)
    return trainer


def _meet(run: Run, resources: ExitStack, leave: Leave | None) -> RunRanks:
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
            on_device=platform.has_cuda(),
            recorded=groups.collectives_record(),
            leave=leave,
        )
        resources.enter_context(watchdog)
    lock, lock_notes = None, list[str]()
    if run.checkpoint.save is not None:
        lock, lock_notes = lock_folder(run)
    if lock is not None:
        resources.enter_context(lock)
    return RunRanks(pg_collection, facts, watchdog, lock, lock_notes)


def _with_verified_start(planned: RunPlan, ranks: RunRanks) -> tuple[RunPlan, local.Nodes | None]:
    """Return the plan with a checkpoint whose content was verified, and the nodes where the run keeps local steps.

    It may be an earlier step than was planned, or a newer local one. Collective.
    """
    run, start_from, nodes = planned.given, planned.start_from, None
    if run.checkpoint.local_save is not None and not run.training.skip_train:
        nodes, notes = local.meet(run)
        start_from = replace(start_from, notes=(*start_from.notes, *notes))
        if run.checkpoint.ckpt_step is None:
            start_from = local.newest(run, start_from, nodes, say)
    if start_from.source is None or not start_from.source.is_local:
        start_from = verified_checkpoint(run, start_from, say)
    if start_from.source is not planned.start_from.source:
        notes = same_data_notes(planned.run, planned.data, start_from)
        planned = replace(planned, data_notes=[*planned.data_notes, *notes])
    planned = planned.with_start(start_from)
    notes = require_one_view(planned, ranks.facts)
    return replace(planned, data_notes=[*planned.data_notes, *notes]), nodes


def _build_and_load(planned: RunPlan, ranks: RunRanks, parts: ProgramParts) -> LoadedModel:
    """Build model, optimizer and schedule, and load or import the state that they start from."""
    run, source = planned.run, planned.start_from.source
    seed_everything(run)
    guard = PrecisionGuard()
    model = build_model(run, ranks.pg_collection, planned.vocab_size, guard=guard, token_loss=parts.loss)
    optimizer = build_optimizer(run, model, ranks.pg_collection, parts.optimizer)
    if run.training.skip_train:  # frozen so far; torch's kernels differ in bits for weights that require no gradient
        for chunk in model:
            chunk.requires_grad_()
    scheduler, average = build_scheduler(run, optimizer), None
    if run.optimizer.ema_decay is not None:
        average = WeightAverage(run.optimizer.ema_decay, model, optimizer)
    trained = TrainState(model, optimizer, scheduler, ranks.pg_collection, average)
    check_precision(guard, "building the optimizer", run, trained)
    loaded = Loaded(TrainingProgress(), [], [])
    if planned.imported is not None:
        filled = fill(run, planned.imported, trained, say)
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


def _predicted_text(planned: RunPlan, splits: Splits, evaluated: int) -> tuple[float | None, dict[str, int]]:
    """Return what an evaluation of each split predicts: entropy of the unnamed one's tokens, and bytes of the texts."""
    entropy, predicted_bytes = None, {}
    lengths = planned.tokenizer.byte_lengths()
    for name in splits.validation:
        dataset = splits.evaluated[name]
        counts = label_counts(dataset, getattr(dataset, "count", evaluated))
        if lengths is not None:
            predicted_bytes[name] = int(counts[: len(lengths)] @ numpy.array(lengths)[: len(counts)])
        if name == "valid":
            entropy = label_entropy(counts)
    return entropy, predicted_bytes


def _build_splits(
    planned: RunPlan,
    ranks: RunRanks,
    parts: ProgramParts,
    trained_on: int,
    evaluated: int,
    tested: int,
    progress: TrainingProgress,
) -> Splits:
    """Build the datasets, of so many samples each."""
    run, source = planned.run, planned.start_from.source
    if run.data.data_config is not None:
        state = {}
        if source is not None and progress.consumed_samples:
            state = source.state
        train, sets = build_named(
            run,
            planned.tokenizer,
            trained_on,
            evaluated // max(run.training.eval_iters, 1),
            planned.schedule.samples_per_micro_batch * ranks.pg_collection.pp.size(),
            first=progress.consumed_samples,
            saved=state.get("sources"),
            pg_collection=ranks.pg_collection,
        )
        return Splits(train, sets)
    trained, valid, test = parts.datasets(run, planned.vocab_size, trained_on, evaluated) or build_datasets(
        run, planned.tokenizer, trained_on, evaluated, tested, pg_collection=ranks.pg_collection
    )
    return Splits(trained, {"valid": valid, "test": test})


def _check_loaded(start: str, run: Run, trained: TrainState, guard: PrecisionGuard, ranks: RunRanks) -> None:
    """Check the dtypes and the values of the state that a run starts from."""
    check_precision(guard, start, run, trained)
    if (damage := damage_on_ranks(trained, ranks.facts)) is not None:
        raise ConfigError(f"{start}: {damage}; start from another step, or from a sound copy")
