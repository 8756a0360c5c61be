"""Saving one step: stage, write, publish, in the same way whether the training waits for it or goes on.

    begin      all ranks   who writes what; is there room; an empty hidden folder
    write      each rank   in the background first a copy; its tensors and random states, hashed while they are written
    exchange   all ranks   everyone's hashes to rank 0, or everyone's error to all
    publish    rank 0      the small files, the manifest, the rename, the pointer, the removal of older steps
    conclude   all ranks   agreement that the step is there, or an error on all of them

`write` and `publish` call no collective: a thread runs them on each rank. In the background (`--async-save`) the run
trains on meanwhile: the thread first copies what the next update will change, and the update waits for the copy. The
ranks agree on when a step is written at step boundaries, in one small reduction while a save is pending, so that the
collectives of different ranks do not mix. Where the training waits for the step, the ranks meet every few seconds: a
disk may take longer than a collective may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.checkpoint import folder, optimizer, writer
from megatron_moe.checkpoint import state as random_state
from megatron_moe.checkpoint.errors import (
    ROUND_SECONDS,
    SaveError,
    all_gather_object,
    attempted,
    gathered,
    on_rank_zero,
    refusal,
)
from megatron_moe.checkpoint.lock import WriterLock, acquire
from megatron_moe.checkpoint.origin import FOLDER as ORIGIN
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.checkpoint.sharded import Shard
from megatron_moe.checkpoint.state import (
    TrainingProgress,
    TrainState,
    average_shards,
    layout,
    model_shards,
    optimizer_shards,
)
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten
from megatron_moe.io.files import write_bytes, write_json
from megatron_moe.io.hashing import FileEntry
from megatron_moe.io.object_storage import location
from megatron_moe.io.texts import size_text
from megatron_moe.model.fully_sharded import local
from megatron_moe.parallel.groups import rank_facts


@dataclass(frozen=True)
class SaveTarget:
    """The folder that a run saves to, and what every save there needs.

    lock: rank 0's. loaded: the step of this folder that the run started from. origin: what every step keeps of the
    source that the model was imported from; its files are on rank 0.
    """

    root: Path
    rule: folder.Retention
    lock: WriterLock | None = None
    loaded: int | None = None
    origin: Provenance = field(default_factory=Provenance)

    @classmethod
    def of(
        cls, run: Run, *, lock: WriterLock | None = None, loaded: int | None = None, origin: Provenance | None = None
    ) -> SaveTarget:
        """Return the target of the flags `--save`, `--keep-last-k` and `--save-retain-interval`."""
        options = run.checkpoint
        rule = folder.retention(options.keep_last_k, options.save_retain_interval)
        return cls(location(options.save or ""), rule, lock, loaded, origin or Provenance())


@dataclass
class CheckpointSave:
    """One step that is being saved, on one rank. The methods are called in the order of the module's docstring."""

    target: SaveTarget
    iteration: int
    staged: writer.Staged
    random_states: dict[str, Any] | None
    small_files: dict[str, Any]
    """File name -> its JSON; rank 0 writes them."""
    rank: int
    num_bytes: int
    """The size of the step over all ranks."""
    notes: list[str] = field(default_factory=list)
    """Notes to report when the step is saved; on rank 0."""
    _written: writer.Written | None = None
    _all_written: list[writer.Written] | None = None
    _failure: Exception | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the step no longer uses memory that the training changes."""
    started: float = 0.0
    """The time at which the training asked for it."""
    blocked: float | None = None
    """The seconds that training waited for it; None where it waits for all of it."""
    publishing: bool = False
    thread: threading.Thread | None = None
    """The thread that writes, then the one that publishes."""

    @property
    def step(self) -> Path:
        """The step's folder, once it is published."""
        return folder.step_folder(self.target.root, self.iteration)

    @property
    def hidden(self) -> Path:
        """The hidden folder in which the step is being written."""
        return folder.staging_dir(self.target.root, self.iteration)

    def write(self) -> None:
        """Write this rank's files. Not collective; an error is kept for `exchange`."""
        self._written, self._failure = attempted(self._write)

    def _write(self) -> writer.Written:
        try:
            self.staged.copy_rest()
        finally:
            self.copied.set()
        written = writer.write(self.staged, self.hidden)
        written.files |= self._write_random_states()
        return written

    def _write_random_states(self) -> dict[str, FileEntry]:
        if self.random_states is None:
            return {}
        path = random_state.path_of(self.hidden, self.rank)
        entry = write_bytes(path, writer.serialized(self.random_states))
        return {path.relative_to(self.hidden).as_posix(): entry}

    def _write_small_files(self) -> dict[str, FileEntry]:
        files = {name: write_json(self.hidden / name, value) for name, value in self.small_files.items()}
        return files | self.target.origin.write(self.hidden)

    def exchange(self) -> None:
        """Send the entries of every rank's files to rank 0. Collective.

        Raises:
            SaveError: on every rank, where some rank could not write; nothing of the step is left.
        """
        with self.all_or_nothing():
            self._all_written = gathered(self._written, self._failure, self.reason)

    def publish(self) -> None:
        """Make the step visible, on rank 0. Not collective; an error is kept for `conclude`."""
        if self.rank == 0:
            _, self._failure = attempted(self._publish)

    def _publish(self) -> None:
        assert self._all_written is not None, "every rank has written"
        hidden, root = self.hidden, self.target.root
        files: dict[str, FileEntry] = writer.finish(self.staged, hidden, self._all_written)
        files |= self._write_small_files()
        if self.target.lock is not None:
            self.target.lock.check()
        folder.publish(root, self.iteration, files)
        protected = () if self.target.loaded is None else (self.target.loaded,)
        self.notes += folder.remove_surplus(root, self.target.rule, protected, published=self.iteration)

    def conclude(self) -> Path:
        """Return the step's folder on all ranks, when they have agreed that it is there. Collective.

        Raises:
            SaveError: on every rank, where the step could not be published.
        """
        with self.all_or_nothing():
            gathered(None, self._failure, self.reason)
        return self.step

    def discard(self) -> None:
        """Remove what is there of a step that is not saved."""
        if self.rank == 0 and (self.target.lock is None or self.target.lock.is_held()):
            folder.discard(self.target.root, self.iteration)

    def reason(self, error: OSError) -> str:
        """Return the message of an error of the system."""
        return refusal(error, self.target.root, self.num_bytes)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Remove the step after any error in the block, so that a full disk does not stay full."""
        try:
            yield
        except Exception as error:
            self.discard()
            if isinstance(error, SaveError):
                text = f"step {self.iteration} was not saved: {error}; earlier steps in {self.target.root} stay"
                raise SaveError(text) from error
            raise


def lock_folder(run: Run) -> tuple[WriterLock | None, list[str]]:
    """Make the folder of `--save` and lock it against other runs. Collective.

    Returns:
        The lock, on rank 0, and notes: a dead run's lock taken over, half-written steps removed.

    Raises:
        ConfigError: on every rank, where another run writes there, or the folder cannot be written.
    """
    root = location(run.checkpoint.save or "")

    def locked() -> tuple[WriterLock | None, list[str]]:
        lock = None
        try:
            folder.claim_root(root)
            lock, notes = acquire(root)
            if left := folder.remove_left_behind(root):
                notes.append(f"removed what an earlier run left half written in {root}: {', '.join(left)}")
            return lock, notes
        except OSError as error:
            if lock is not None:
                lock.release()
            raise ConfigError(f"--save {root}: cannot be written: {error}") from error

    return on_rank_zero(locked) or (None, [])


def begin(
    run: Run,
    trained: TrainState,
    progress: TrainingProgress,
    where: SaveTarget,
    *,
    facts: dict[str, Any],
    memory: writer.Buffers | None = None,
) -> CheckpointSave:
    """Begin to save the step of `progress`: collect what the rest needs of the present state. Collective.

    Parameters have to be gathered (`training.evaluate.gathered_parameters`). fp32 state is written as fp32.

    Args:
        facts: plain values to keep in the step's state, such as versions.
        memory: copy the state to host memory, into this where it fits, so that the training may go on meanwhile; None
            writes the live tensors. `CheckpointSave.write` copies tensors that change in the optimizer's update alone,
            and then sets `copied`: until then there must be no update.

    Raises:
        SaveError: on every rank, where there is no room, or a sound step of this number: it is not overwritten.
    """
    iteration, rank = progress.iteration, rank_facts().rank
    shards, common, steady, private = collected(run, trained)
    staged = writer.stage(shards, common, buffers=memory, steady=steady, private=private)
    random_states, small_files = state_facts(run, trained, progress, where, facts)
    total = torch.tensor(staged.num_bytes + where.origin.num_bytes, dtype=torch.int64, device=platform.device())
    torch.distributed.all_reduce(total)
    saving = CheckpointSave(
        where,
        iteration,
        staged,
        random_states,
        small_files if rank == 0 else {},
        rank,
        int(total.item()),
    )

    def make_room() -> None:
        if where.lock is not None:
            where.lock.check()
        folder.open_hidden(where.root, iteration, saving.num_bytes)

    with saving.all_or_nothing():
        on_rank_zero(make_room, saving.reason)
    return saving


def collected(run: Run, trained: TrainState) -> tuple[list[Shard], dict[str, Any], set[int], set[int]]:
    """Return this rank's shards, what is no tensor, and the storages that are steady and private (`writer.stage`)."""
    shards, common = model_shards(trained), dict[str, Any]()
    steady, private = changed_by_updates(run, trained), set[int]()
    if run.checkpoint.no_save_optim:
        return shards, common, steady, private
    with optimizer.unpacked(trained.optimizer, keep=False):
        updated = optimizer_shards(trained)
    private = {shard.values.untyped_storage().data_ptr() for shard in updated} - steady
    common["optimizer"] = optimizer.plain_values(trained.optimizer)
    shards += updated
    if trained.average is not None:
        shards += average_shards(trained)
    return shards, common, steady, private


def state_facts(
    run: Run, trained: TrainState, progress: TrainingProgress, where: SaveTarget, facts: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return this rank's random states, and the content of a step's JSON files by name."""
    about = {
        **asdict(progress),
        "scheduler": trained.scheduler.state_dict(),
        "has_optimizer": not run.checkpoint.no_save_optim,
        folder.HAS_AVERAGE: trained.average is not None and not run.checkpoint.no_save_optim,
        "layout": layout(rank_facts()),
        **facts,
    }
    if where.origin.state is not None:
        about[ORIGIN] = where.origin.state
    random_states = None if run.checkpoint.no_save_rng else random_state.current()
    return random_states, {folder.CONFIG: flatten(run), folder.STATE: about}


def changed_by_updates(run: Run, trained: TrainState) -> set[int]:
    """Return the addresses of the storages that nothing changes before the optimizer's next update.

    Buffers such as expert_bias, which moves with the gradients, are not among them; nor are weights that the next
    forward pass gathers, though it would gather the same values.
    """
    steady: list[torch.Tensor] = []
    if not run.parallel.overlap_param_gather:
        steady += [local(weight) for chunk in trained.model for weight in chunk.parameters()]
    for part in getattr(trained.optimizer, "chained_optimizers", [trained.optimizer]):
        for group in part.param_groups:
            steady += group["params"]
        for values in part.state.values():
            steady += [value for value in values.values() if isinstance(value, torch.Tensor)]
    if trained.average is not None:
        steady += [weight.values for weight in trained.average.weights]
    return {tensor.untyped_storage().data_ptr() for tensor in steady}


class Saver:
    """The saver of one run's steps, one after the other. All methods are collective.

    Args:
        report: called on rank 0 with each event: its kind ("saved", "warning", "message"), its text, and facts by name.
        latest: the step that the run continues, if any.
        begin_step: `begin`, or what begins a local step, which is always written in the background.

    With `--on-save-error stop`, the default, each method raises SaveError on every rank where a step could not be
    saved; with `continue`, and for a local step, the error is reported, and the run goes on without that step.
    """

    def __init__(
        self,
        run: Run,
        target: SaveTarget,
        report: Callable[..., None],
        latest: Path | None = None,
        begin_step: Callable[..., CheckpointSave] = begin,
    ) -> None:
        self._run = run
        self._target = target
        self._report = report
        self._begin = begin_step
        self._background = run.checkpoint.async_save or begin_step is not begin
        self._stops = run.checkpoint.on_save_error == "stop" and begin_step is begin
        self._memory: writer.Buffers = {}
        self._pending: CheckpointSave | None = None
        self.latest = latest
        """The last step that is complete on disk."""
        self.error: SaveError | None = None
        """Why the last step that was to be saved was not."""
        self.moved: Callable[[], None] = lambda: None
        """Called on every rank while all wait for a step, when some rank has written more of it."""

    def save(self, trained: TrainState, progress: TrainingProgress, facts: dict[str, Any]) -> bool:
        """Save a step, or begin to; an earlier one is finished first. Parameters have to be gathered.

        Returns:
            Whether the step is saved, or being saved in the background.
        """
        self.finish()
        self.error = None
        started, background = time.monotonic(), self._background
        try:
            memory = self._memory if background else None
            saving = self._begin(self._run, trained, progress, self._target, facts=facts, memory=memory)
        except SaveError as error:
            return self._failed(error)
        saving.started = started
        self._do(saving, saving.write)
        self._pending = saving
        if background:
            saving.blocked = time.monotonic() - started
            return True
        return self.finish() is not None

    def wait_until_copied(self) -> None:
        """Wait, before weights, moments or main weights change, until a pending save has copied them."""
        if self._pending is not None:
            self._pending.copied.wait()

    def poll(self) -> Path | None:
        """Move a pending save on if all ranks are ready; return the step if it is saved. Call it at step boundaries."""
        if self._pending is None:
            return None
        thread = self._pending.thread
        is_idle = thread is None or not thread.is_alive()
        everywhere = torch.tensor(int(is_idle), device=platform.device())
        torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN)
        return self._move_on(self._pending) if everywhere.item() else None

    def finish(self) -> Path | None:
        """Wait for a pending save; return the step if it was saved."""
        step = None
        while self._pending is not None:
            self._wait(self._pending)
            step = self._move_on(self._pending)
        return step

    def _wait(self, saving: CheckpointSave) -> None:
        """Wait until all ranks' threads are idle. Collective."""
        written, thread, everywhere = 0, saving.thread, False
        while not everywhere:
            if thread is not None:
                thread.join(ROUND_SECONDS)
            is_idle = thread is None or not thread.is_alive()
            ranks = all_gather_object((is_idle, saving.staged.written_bytes))
            everywhere = all(idle for idle, _ in ranks)
            if sum(count for _, count in ranks) > written:
                written = sum(count for _, count in ranks)
                self.moved()

    @property
    def pending(self) -> bool:
        """Whether a step is being saved in the background."""
        return self._pending is not None

    def _move_on(self, saving: CheckpointSave) -> Path | None:
        """Agree on what the idle ranks did, and begin the next part; return the step after the last one."""
        try:
            if not saving.publishing:
                saving.exchange()
                saving.publishing = True
                self._do(saving, saving.publish)
                return None
            saving.conclude()
        except SaveError as error:
            self._failed(error)
            return None
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self.latest = saving.step
        seconds = time.monotonic() - saving.started
        took = f"{size_text(saving.num_bytes)} in {seconds:.1f} s"
        if saving.blocked is not None:
            took += f", of which training waited {saving.blocked:.2f} s"
        self._report("saved", f"saved {saving.step} ({took})", path=str(saving.step), seconds=seconds)
        for note in saving.notes:
            self._report("message", note)
        return saving.step

    def _do(self, saving: CheckpointSave, work: Callable[[], None]) -> None:
        # A process that has to end at once does not wait: the staging folder is not read.
        saving.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        saving.thread.start()

    def _failed(self, error: SaveError) -> bool:
        self._pending, self.error = None, error
        if self._stops:
            raise error
        self._report("warning", f"CHECKPOINT ERROR: {error}; going on")
        return False
