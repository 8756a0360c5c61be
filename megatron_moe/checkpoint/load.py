"""Verify a step, and load it into a model, an optimizer and a schedule that are built already.

A step of a bf16 or fp16 run holds the fp32 main weight of NAME under `optimizer.state.param.NAME`; in a step of an fp32
run NAME itself is it. In a run of other dtypes weights are made from these, rounded once; main weights, moments and
fp32 state keep their bits, so that a run that changes its dtype and changes it back goes on from the state that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_moe import platform
from megatron_moe.checkpoint import dist, folder, local, manifest, optimizer
from megatron_moe.checkpoint import state as random_state
from megatron_moe.checkpoint.errors import all_gather_object, in_rounds
from megatron_moe.checkpoint.index import UntrustedError
from megatron_moe.checkpoint.plan import CheckpointPlan, CheckpointSource, other_dtypes, plan
from megatron_moe.checkpoint.state import (
    TrainingProgress,
    TrainState,
    average_shards,
    layout,
    model_shards,
    optimizer_shards,
)
from megatron_moe.checkpoint.step_reader import AVERAGE, COMMON, StepReader, read_file
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.io.object_storage import StoreError
from megatron_moe.io.texts import size_text
from megatron_moe.parallel.groups import rank_facts, seed_everything
from megatron_moe.precision.contract import declared_fp32_state

_REMADE = "weights have other dtypes than in the checkpoint: made from its fp32 main weights, rounded once"
_REFUSED, _ABSENT, _READ = 0, 1, 2
_MAIN, _MOMENT = "optimizer.state.param.", "optimizer.state.exp_avg."


def verified(run: Run, found: CheckpointPlan, report: Callable[[str], None]) -> CheckpointPlan:
    """Return the plan with a step every file of which holds what was saved. Collective over all ranks.

    Rank r hashes every world-size-th file, the largest first, before any weight is used. A damaged step is passed over
    for the newest sound one before it, unless it was asked for with `--ckpt-step`; the notes of the plan say so.

    Args:
        report: called on rank 0 with a line on the progress now and then, while a large step is read.

    Raises:
        ConfigError: on every rank: the step asked for is damaged, none is sound, or the ranks see different folders.
    """
    while True:
        mine = "no step"
        if found.source is not None:
            try:
                mine = f"step {found.source.iteration}, {manifest.read(found.source.step).digest[:12]}"
            except manifest.ManifestError as error:
                mine = str(error)
        seen = all_gather_object(mine)
        if len(set(seen)) > 1:  # machines may see different file systems
            ranks = "; ".join(f"{view} on rank {seen.index(view)}" for view in sorted(set(seen)))
            raise ConfigError(
                f"--load: the ranks see different checkpoints: {ranks}; every rank has to see the same "
                "folder: put it on a file system that all machines share, or copy it to each"
            )
        if found.source is None or not run.checkpoint.verify_checkpoint:
            return found
        step = found.source.step
        reason, note = _damage(step, report)
        if reason is None:
            return replace(found, notes=(*found.notes, note))
        replanned, refused = None, None
        try:
            replanned = plan(run, {**found.known_bad, found.source.iteration: reason})
        except ConfigError as error:
            refused = str(error)
        refusals = sorted({text for text in all_gather_object(refused) if text is not None})
        if refusals or replanned is None:
            raise ConfigError("\n".join(refusals))
        found = replanned


def _damage(step: Path, report: Callable[[str], None]) -> tuple[str | None, str]:
    """Return what is wrong with the content of a step, the same on every rank, or (None, a note on the check).

    Raises:
        ConfigError: on every rank, where an object store failed.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    files = manifest.read(step).files
    largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    outcomes = manifest.checked_content(step, largest_first[rank::world_size])
    total, done, read, seconds = sum(entry["bytes"] for entry in files.values()), 0, 0, 0.0
    outage: str | None = None  # of an object store: no damage
    reason: str | None = None

    def hashed() -> Iterator[None]:
        nonlocal done, outage
        try:
            for outcome in outcomes:
                if isinstance(outcome, str):
                    raise ConfigError(outcome)
                done += outcome
                yield
        except StoreError as error:
            outage = f"--load {step}: cannot be read: {error}"
            raise

    try:
        for read, seconds in in_rounds(hashed(), lambda: done, step):
            if rank == 0 and read < total:
                speed = size_text(int(read / seconds))
                report(f"verifying {step}: {size_text(read)} of {size_text(total)}, {speed}/s")
    except ConfigError as error:
        reason = str(error)
    if outages := sorted({text for text in all_gather_object(outage) if text is not None}):
        raise ConfigError("; ".join(outages))
    if reason is not None:
        return reason, ""
    return None, f"verified {step}: {len(files)} files, {size_text(read)} in {seconds:.1f} s"


class Loaded(NamedTuple):
    """The progress to start from, notes to report, and warnings on fp32 state that was rounded before it was saved."""

    progress: TrainingProgress
    notes: list[str]
    precision_warnings: list[str]


def load(run: Run, source: CheckpointSource, trained: TrainState) -> Loaded:
    """Fill model, optimizer, schedule and random states from a step. Collective over all ranks.

    Raises:
        ConfigError: tensors are missing, left over or of another dtype than the flags say, or the files hold code.
    """
    options = run.checkpoint
    fresh = options.finetune or source.weights_only
    with_optimizer = not (fresh or options.no_load_optim)
    goes_on = with_optimizer and trained.average is not None and bool(source.state.get(folder.HAS_AVERAGE))
    unread: tuple[str, ...] = ()
    if not with_optimizer:
        unread = ("optimizer.",)
    elif not goes_on:
        unread = (AVERAGE,)
    reader = None if source.is_local else dist.opened(source.step)
    sources: dict[str, str] = {}
    changed: list[str] = []
    if reader is not None and other_dtypes(run, source.config):
        changed.append(_REMADE)
        sources = _sources(reader)
        unread = (*unread, *sources)
    with optimizer.unpacked(trained.optimizer, keep=True) if with_optimizer else nullcontext():
        shards = model_shards(trained)
        # What the model declares as fp32 state (`expert_bias`) is read and widened, whatever it was saved as.
        declared = {tensor.data_ptr() for chunk in trained.model for _, tensor in declared_fp32_state(chunk)}
        fp32_state = frozenset(shard.key for shard in shards if shard.values.data_ptr() in declared)
        if with_optimizer:
            shards += optimizer_shards(trained)
        if goes_on:
            shards += average_shards(trained)
        rounded = dict[str, torch.dtype]()
        if reader is None:
            local.read(source.step, shards)
        else:
            rounded = dist.require_all(reader, shards, sources, allow_unread=unread, fp32_state=fp32_state)
            dist.read(reader, shards, sources)
    recorded = list(source.state.get("precision_warnings", []))
    for key, dtype in rounded.items():
        recorded.append(
            f"PRECISION WARNING: {key} is {dtype} in {source.step}, must be torch.float32: it was rounded before it "
            "was saved; loaded as it is and kept in fp32 from now on"
        )
    if with_optimizer:
        optimizer.put_plain_values(trained.optimizer, read_file(source.step, COMMON)["optimizer"])
        optimizer.gather_packed_weights(trained.model, trained.optimizer, run)
    else:
        # fp32 main weights are copies of the model's; those they were made from are gone.
        trained.optimizer.reload_model_params()
    averaged: list[str] = []
    if trained.average is not None and not goes_on:
        trained.average.restart()
        averaged = ["--ema-decay: the average begins with the loaded weights: none was loaded"]
    elif trained.average is None and source.state.get(folder.HAS_AVERAGE):
        averaged = [f"the average of the weights in {source.step} is left out: this run has no --ema-decay"]
    if fresh:
        note = f"weights from {source.step}; iteration, optimizer and schedule start fresh"
        return Loaded(TrainingProgress(), [*recorded, note, *changed], recorded)
    progress = TrainingProgress.of_state(source.state)
    trained.scheduler.load(
        source.state["scheduler"],
        committed_steps=progress.iteration - progress.skipped_iterations,
        committed_samples=progress.committed_samples,
    )
    start = "weights from" if run.training.skip_train else "continuing from"
    notes = [*recorded, f"{start} {source.step}", *changed, *averaged, *_load_random_state(run, source)]
    return Loaded(progress, notes, recorded)


def _load_random_state(run: Run, source: CheckpointSource) -> list[str]:
    """Restore this rank's random states, or make new ones and return a note; all ranks decide alike.

    A stream belongs to the rank, the layout and the kind of device that drew from it: there is no right way to give it
    to another one.
    """
    if run.checkpoint.no_load_rng:
        return []
    facts = rank_facts()
    same_layout = source.state["layout"] == layout(facts)
    path = random_state.path_of(source.step, facts.rank)
    state, outcome, same_device = None, _ABSENT, True
    if same_layout and path.is_file():
        try:
            state = random_state.read(path)
            same_device = state is not None
            outcome = _READ if same_device else _ABSENT
        except UntrustedError:
            outcome = _REFUSED
    worst = min(all_gather_object(outcome))
    if worst == _REFUSED:
        raise ConfigError(
            f"{path.parent}: refused, random states may be damaged or harmful; --no-load-rng does without them"
        )
    if worst == _READ and state is not None:
        random_state.restore(state)
        return []
    iteration = source.state["iteration"]
    seed_everything(run, iteration)
    if not same_layout:
        why = f"was saved on another layout {source.state['layout']}"
    elif not same_device:
        why = f"was saved by a run on {'a CPU' if platform.has_cuda() else 'CUDA'}, whose generators are others"
    else:
        why = "was saved without them"
    drawing = [name for name in ("hidden_dropout", "attention_dropout") if getattr(run.model, name)]
    drawing += ["moe_input_jitter_eps"] if run.moe.moe_input_jitter_eps else []
    effect = (
        f"{' and '.join(drawing)} draw other numbers from here than that run would have drawn"
        if drawing
        else "no dropout and no jitter draws from them, so that nothing changes"
    )
    return [
        f"random states of every rank are made anew from --seed {run.training.seed} and iteration {iteration}, because "
        f"the checkpoint {why}; {effect}"
    ]


def _sources(reader: StepReader) -> dict[str, str]:
    """Return, of weights and main weights, the key of the fp32 main weight in a step of other dtypes than the run's."""
    saved, found = reader.index.tensors, dict[str, str]()
    for key in saved:
        if key.startswith(_MOMENT):
            name = key.removeprefix(_MOMENT)
            main = _MAIN + name
            found[name] = found[main] = main if main in saved else name
    return found
