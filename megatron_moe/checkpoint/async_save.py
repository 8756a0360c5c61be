"""Saving at once, or in the background while the run trains on.

In the background, a thread on each rank copies what the next update will change, and then writes; the update waits for
the copy. A thread on rank 0 publishes. The threads do not communicate with other ranks: that happens at step
boundaries, in one small reduction while a save is pending, so that all ranks agree on when a step is written and the
collectives of different ranks do not mix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.checkpoint.errors import SaveError
from megatron_moe.checkpoint.save import SaveBuffers, Saving, Target, begin
from megatron_moe.checkpoint.state import Trained, TrainingProgress
from megatron_moe.config.schema import Run
from megatron_moe.io.texts import size_text


class Saver:
    """The saver of one run's steps, one after the other. All methods are collective.

    Args:
        report: called on rank 0 with each event: its kind ("saved", "warning", "message"), its text, and facts by name.
        latest: the step that the run continues, if any.

    With `--on-save-error stop`, the default, each method raises SaveError on every rank where a step could not be
    saved; with `continue` the error is reported, and the run goes on without that step.
    """

    def __init__(self, run: Run, target: Target, report: Callable[..., None], latest: Path | None = None) -> None:
        self._run = run
        self._target = target
        self._report = report
        self._memory = SaveBuffers()
        self._pending: _Pending | None = None
        self.latest = latest
        """The last step that is complete on disk."""
        self.error: SaveError | None = None
        """Why the last step that was to be saved was not."""

    def save(self, trained: Trained, progress: TrainingProgress, facts: dict[str, Any]) -> bool:
        """Save a step, or begin to; an earlier one is finished first. Parameters have to be gathered.

        Returns:
            Whether the step is saved, or being saved in the background.
        """
        self.finish()
        self.error = None
        started, background = time.monotonic(), self._run.checkpoint.async_save
        try:
            memory = self._memory if background else None
            saving = begin(self._run, trained, progress, self._target, facts=facts, memory=memory)
        except SaveError as error:
            return self._failed(error)
        self._pending = _Pending(saving, started, background)
        if background:
            self._pending.blocked = time.monotonic() - started
            return True
        return self.finish() is not None

    def wait_until_copied(self) -> None:
        """Wait, before weights, moments or main weights change, until a pending save has copied them."""
        if self._pending is not None:
            self._pending.saving.copied.wait()

    def poll(self) -> Path | None:
        """Move a pending save on if all ranks are ready; return the step if it is saved. Call it at step boundaries."""
        if self._pending is None or not _all(self._pending.idle):
            return None
        return self._move_on(self._pending)

    def finish(self) -> Path | None:
        """Wait for a pending save; return the step if it was saved."""
        step = None
        while self._pending is not None:
            self._pending.wait()
            step = self._move_on(self._pending)
        return step

    @property
    def pending(self) -> bool:
        """Whether a step is being saved in the background."""
        return self._pending is not None

    def _move_on(self, pending: _Pending) -> Path | None:
        """Agree on what the idle ranks did, and begin the next part; return the step after the last one."""
        try:
            if not pending.move_on():
                return None
        except SaveError as error:
            self._failed(error)
            return None
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        saving = pending.saving
        self.latest = saving.step
        self._report(
            "saved", f"saved {saving.step} ({pending.times()})", path=str(saving.step), seconds=pending.seconds()
        )
        for note in saving.notes:
            self._report("message", note)
        return saving.step

    def _failed(self, error: SaveError) -> bool:
        self._pending, self.error = None, error
        if self._run.checkpoint.on_save_error == "stop":
            raise error
        self._report("warning", f"CHECKPOINT ERROR: {error}; going on (--on-save-error continue)")
        return False


class _Pending:
    """A save that has begun: it writes, then publishes, in the caller's thread or in one of its own."""

    def __init__(self, saving: Saving, started: float, background: bool) -> None:
        self.saving = saving
        self.blocked: float | None = None
        self._started = started
        self._background = background
        self._publishing = False
        self._thread: threading.Thread | None = None
        self._do(saving.write)

    def idle(self) -> bool:
        """Return whether this rank has done its part."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank has done its part."""
        if self._thread is not None:
            self._thread.join()

    def move_on(self) -> bool:
        """Begin the next part, when all ranks are idle; return True if there is none. Collective."""
        if self._publishing:
            self.saving.conclude()
            return True
        self.saving.exchange()
        self._publishing = True
        self._do(self.saving.publish)
        return False

    def times(self) -> str:
        """Return how much was written and how long it took, for the log."""
        whole = f"{size_text(self.saving.num_bytes)} in {self.seconds():.1f} s"
        return whole if self.blocked is None else f"{whole}, of which training waited {self.blocked:.2f} s"

    def seconds(self) -> float:
        """Return the time since the save has begun."""
        return time.monotonic() - self._started

    def _do(self, work: Callable[[], None]) -> None:
        if not self._background:
            work()
            return
        # A process that has to end at once does not wait: the hidden folder is not read.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()


def _all(mine: Callable[[], bool]) -> bool:
    """Return whether `mine` is true on every rank. Collective."""
    votes = torch.tensor(int(mine()), device=platform.device())
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN)
    return bool(votes.item())
