"""The plan of a run, made from flags, data and folders before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.plan import CheckpointPlan, schedule_settings
from megatron_moe.checkpoint.plan import plan as plan_checkpoint
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.fields import all_fields
from megatron_moe.config.rules.rule import set_among, spelled
from megatron_moe.config.schema import Run
from megatron_moe.config.schema import replace as replace_settings
from megatron_moe.data.checks import (
    SPLITS,
    Fingerprint,
    check_data,
    data_fingerprint,
    read_sources,
    require_same_samples,
    require_sequence,
)
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.hf.config import Import, plan_import
from megatron_moe.io.source_version import other_source
from megatron_moe.io.texts import size_text
from megatron_moe.platform import host
from megatron_moe.report.jsonl import require_metrics
from megatron_moe.report.tracker import SERVICES, require_trackers
from megatron_moe.training.batch_size import BatchSchedule, batch_schedule
from megatron_moe.training.route_files import RouteFiles, RouteShape

WORKERS_PER_CORE = 4


@dataclass(frozen=True)
class RunPlan:
    """What is known of a run before its ranks meet."""

    given: Run
    """The settings as they were given."""
    run: Run
    """With what the step to load decides of them."""
    schedule: BatchSchedule
    start_from: CheckpointPlan
    """The checkpoint to load, if there is one, as far as its small files say."""
    imported: Import | None
    """The Hugging Face folder to load, where there is no checkpoint of the training yet."""
    tokenizer: Tokenizer
    data: Fingerprint
    data_notes: list[str]
    """Notes of the checks of the data."""
    missing: list[str]
    """Notes of packages that a dry run did without."""

    def with_start(self, start_from: CheckpointPlan) -> RunPlan:
        """Return the plan with this start, which decides where the learning rate's schedule began.

        `--train-samples` ends it, whatever batches the run began with.
        """
        run, source, done = self.given, start_from.source, start_from.start_iteration
        if source is not None:
            run = replace_settings(run, **schedule_settings(run, source))
        if run.training.train_samples is not None:
            consumed = source.state["consumed_samples"] if source is not None and done else 0
            steps = self.schedule.steps_to(run.training.train_samples, consumed)
            run = replace_settings(run, train_iters=done + steps)
        return replace(self, run=run, start_from=start_from)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        return self.run.model.vocab_size or self.tokenizer.vocab_size

    @property
    def former_data(self) -> Fingerprint:
        """The files of sources that the run has no more, as the checkpoint has them: they may come back."""
        source, found = self.start_from.source, Fingerprint()
        if source is None or self.run.checkpoint.finetune:
            return found
        saved = source.state.get("data", {})
        for taken in source.state.get("sources", {}).values():
            found |= {prefix: saved[prefix] for prefix in taken["prefixes"] if prefix in saved}
        return found

    @property
    def notes(self) -> list[str]:
        """All notes of the plan, in the order to show; like neighbours among the pipeline's ranks are shown once."""
        found = list(self.run.warnings)
        if self.run.parallel.pipeline_model_parallel_layout is not None:
            ranks_of: list[tuple[str, list[int]]] = []
            for rank in range(self.run.parallel.pipeline_model_parallel_size):
                stages = self.run.derived.chunks_of_pipeline_rank(rank)
                text = " | ".join(stage.letters or "-" for stage in stages)
                if not ranks_of or ranks_of[-1][0] != text:
                    ranks_of.append((text, []))
                ranks_of[-1][1].append(rank)
            shown = []
            for text, ranks in ranks_of:
                span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
                shown.append(f"{span}: {text}")
            found.append(f"stages of the pipeline's ranks: {', '.join(shown)}")
        found += self.start_from.notes
        if self.imported is not None:
            found += self.imported.notes
        return [*found, *self.data_notes, *self.missing]


def _require_whole_nodes(run: Run, ranks_here: int | None) -> None:
    """Refuse `--moe-alltoall-by-node` where the EP ranks, which are neighbours, are not those of several nodes."""
    ranks = run.parallel.expert_model_parallel_size
    if ranks_here is None:
        raise ConfigError(
            "--moe-alltoall-by-node: LOCAL_WORLD_SIZE is missing, and with it which ranks share a node; start the ranks"
            " with torchrun, or drop the flag"
        )
    if ranks <= ranks_here or ranks % ranks_here:
        why = "no token leaves its node" if ranks <= ranks_here else "nodes would have unequally many of them"
        raise ConfigError(
            f"--moe-alltoall-by-node, --expert-model-parallel-size {ranks}: with {ranks_here} ranks on a node "
            f"(LOCAL_WORLD_SIZE) {why}; use an --expert-model-parallel-size of {2 * ranks_here} or another multiple of "
            f"{ranks_here}, or drop the flag"
        )


def check_start(run: Run, world_size: int, ranks_here: int | None) -> None:
    """Check what a run needs of this machine and of its files, without torch and without reading whole files.

    `pretrain` checks the same once more, when torch is loaded, and what takes longer. ranks_here: how many of the ranks
    this machine has; None where that is not known.

    Raises:
        ConfigError: the run cannot start, as `plan_run` says, or for a limit of this machine.
    """
    if run.parallel.distributed_backend == "nccl" and host.cannot_have_a_gpu(os.environ):
        raise ConfigError(
            "--distributed-backend nccl: needs a CUDA device and this machine has none; leave the flag out or use gloo"
        )
    if run.moe.moe_alltoall_by_node:
        _require_whole_nodes(run, ranks_here)
    require_profiler(run, has_gpu=not host.cannot_have_a_gpu(os.environ))
    if run.logging.metrics_file is not None:
        require_metrics(Path(run.logging.metrics_file))
    planned = plan_run(run, world_size, deep=False)
    # Worker processes and weights that are certainly too many for this machine.
    workers, most = run.data.num_workers * (ranks_here or 1), max(16, WORKERS_PER_CORE * host.cores())
    if workers > most:
        raise ConfigError(
            f"--num-workers {run.data.num_workers}: makes {workers} processes on this machine of {host.cores()} "
            f"cores; use at most --num-workers {most // (ranks_here or 1)}, or 0"
        )
    if not host.cannot_have_a_gpu(os.environ) or ranks_here != world_size:
        return  # the memory that counts is a device's, or partly another machine's
    padded = run.derived.padded_vocab_size(planned.vocab_size)
    needed, there = run.derived.training_bytes(padded), host.total_bytes()
    # The hidden states of one micro-batch, which every training step has in memory.
    width = 4 if run.derived.params_dtype_name == "float32" else 2
    needed += run.training.micro_batch_size * run.model.seq_length * run.model.hidden_size * width
    held = "" if run.training.skip_train else " with gradients and optimizer state"
    if needed > there:
        raise ConfigError(
            f"--num-layers {run.model.num_layers}, --hidden-size {run.model.hidden_size}: "
            f"{run.derived.parameter_count(padded):,} parameters{held}, and the hidden states of one micro-batch, "
            f"--micro-batch-size {run.training.micro_batch_size} x --seq-length {run.model.seq_length}, take "
            f"{size_text(needed)} and this machine has {size_text(there)}; use a smaller model (--preset tiny), or see "
            "what it takes with megatron-moe plan"
        )


def require_profiler(run: Run, *, has_gpu: bool) -> None:
    """Refuse CUDA's profiler without a GPU."""
    if run.logging.profile and not run.logging.use_pytorch_profiler and not has_gpu:
        raise ConfigError("--profile: records by CUDA's profiler, and there is no GPU; add --use-pytorch-profiler")


def plan_run(run: Run, world_size: int, *, deep: bool | None = None) -> RunPlan:
    """Read the folders, the tokenizer and the data of a run, and plan it; change nothing.

    Args:
        deep: whether files of the data are read as a whole; default: in the process of rank 0. False leaves out whether
            they are those that the checkpoint was trained on, too.

    Raises:
        ConfigError: one of them does not fit the flags.
    """
    missing = rules.missing_packages(run, world_size) if run.logging.dry_run else []
    if run.training.skip_train:
        run = without_training(run)
    try:
        require_trackers(run)
    except MissingPackage as error:
        if not run.logging.dry_run:
            raise
        missing.append(str(error))
    if run.moe.moe_enable_routing_replay is not None:
        RouteFiles(Path(run.moe.moe_enable_routing_replay), RouteShape.from_run(run))
    schedule = batch_schedule(run, world_size)
    start_from = plan_checkpoint(run)
    # A step that training has saved since goes before the folder that the training began with.
    is_imported = run.checkpoint.load_hf is not None and start_from.source is None
    imported = plan_import(run) if is_imported else None
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    run.derived.padded_vocab_size(run.model.vocab_size or tokenizer.vocab_size)  # refused here where it does not fit
    data_notes = check_data(run, tokenizer, deep=deep)
    if evaluates_test_split(run):
        require_sequence(read_sources(run.data), SPLITS.index("test"), run.model.seq_length)
    data = data_fingerprint(run, deep=deep)
    if deep is not False:
        data_notes += same_data_notes(run, data, start_from)
    planned = RunPlan(
        given=run,
        run=run,
        schedule=schedule,
        start_from=start_from,
        imported=imported,
        tokenizer=tokenizer,
        data=data,
        data_notes=data_notes,
        missing=[f"WARNING: not on this machine, and a run needs it: {text}" for text in missing],
    ).with_start(start_from)
    if planned.run.optimizer != run.optimizer:
        rules.check(planned.run, world_size)  # the checkpoint's schedule fits the run
    return planned


_OF_TRAINING = (
    "save",
    "lr_restart_at",
    "ema_decay",
    "loss_spike_factor",
    "profile",
    "tensorboard_dir",
    "moe_routing_trace_path",
    "moe_enable_routing_replay",
    "moe_routing_replay_missing",
    "moe_routing_replay_counts",
    *SERVICES,
)


def without_training(run: Run) -> Run:
    """Return what `--skip-train` makes of a run: weights alone are loaded, and nothing is saved.

    All are frozen until the optimizer is built, so that neither gradients nor its state are allocated. As in
    Megatron-LM, what follows a run's steps (TensorBoard, W&B, MLflow) gets nothing.
    """
    unused = set_among(run, _OF_TRAINING)
    changes: dict[str, Any] = {name: all_fields()[name].default for name in unused} | {"freeze": ("*",)}
    if run.checkpoint.load is not None:
        changes |= {"no_load_optim": True, "no_load_rng": True}
    alone = replace_settings(run, **changes)
    if not unused:
        return alone
    note = f"--skip-train leaves out {', '.join(spelled(run, name) for name in unused)}"
    return replace(alone, warnings=(*run.warnings, note))


def same_data_notes(run: Run, data: Fingerprint, start_from: CheckpointPlan) -> list[str]:
    """Refuse to continue on other data than the checkpoint was trained on; return notes where that is accepted.

    Raises:
        ConfigError: the data differ.
    """
    source = start_from.source
    if source is None or source.weights_only or run.checkpoint.finetune or run.training.skip_train:
        return []
    if origin.is_of_megatron(source.state):
        samples = source.state["consumed_samples"]
        return [
            f"{source.step} is Megatron-LM's, whose data are not known: samples go on at number {samples} of this run"
        ]
    saved, notes = source.state.get("data", {}), []
    if run.data.mock_data and (other := other_source(source.state.get("versions", {}))):
        notes.append(f"WARNING: --mock-data: {source.step} is of another version, which may draw other tokens: {other}")
    return notes + require_same_samples(run, data, source.config, saved, str(source.step), source.state.get("sources"))


def evaluates_test_split(run: Run) -> bool:
    """Return whether the run evaluates a test split: it was named, or `--split` gives it a share."""
    if run.training.eval_iters == 0 or run.data.mock_data or run.data.program_data:
        return False
    shares = [float(share) for share in (run.data.split or "").split(",") if share]
    return run.data.test_data_path is not None or (len(shares) > 2 and shares[2] > 0)
