"""Publishing and removing steps: at every instant a complete step is there. No torch.

A step is written into a hidden folder (`open_hidden`). The manifest, one rename and at last the pointer make it visible
(`publish`). `Retention` says which older steps may go; `remove_surplus` removes them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint.manifest import structure_defect
from megatron_moe.io.files import free_bytes, replace_text, sync
from megatron_moe.io.hashing import FileEntry

_LEFT_BEHIND = re.compile(r"\.iter_\d{7,}\.(saving|deleting)")


def claim_root(root: Path) -> None:
    """Make the folder and mark it as a folder of checkpoints."""
    root.mkdir(parents=True, exist_ok=True)
    (root / folder.OWNER).touch()
    sync(root)


def open_hidden(root: Path, iteration: int, num_bytes: int = 0) -> Path:
    """Make an empty hidden folder for a step of at most `num_bytes`; what a writer that died left there is removed.

    A step of this number that cannot be loaded is renamed.

    Raises:
        FileExistsError: the step is there, sound: nothing is overwritten. OSError: no room, or the folder is gone.
    """
    step, hidden = folder.step_folder(root, iteration), folder.hidden_folder(root, iteration)
    shutil.rmtree(hidden, ignore_errors=True)
    if step.exists():
        defect = manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)
        if defect is None:
            raise FileExistsError(errno.EEXIST, "it is there already; checkpoints are never overwritten", str(step))
        os.rename(step, _free_name(step))
    free = free_bytes(root)
    if free is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, "there is not enough room", str(root))
    hidden.mkdir()  # not its parents: a folder that was moved away is not made anew
    (hidden / "rng").mkdir()
    return hidden


def publish(root: Path, iteration: int, files: dict[str, FileEntry]) -> Path:
    """Make a written step visible: the manifest, the disk, the rename, the pointer, in this order.

    Args:
        files: everything in the hidden folder, each on the disk already.

    Raises:
        OSError: the system refused, or the hidden folder does not hold exactly these files.
    """
    hidden, step = folder.hidden_folder(root, iteration), folder.step_folder(root, iteration)
    for part in ("rng", "hf"):
        if (hidden / part).is_dir():
            sync(hidden / part)
    manifest.write(hidden, iteration, files)
    defect = manifest.structure_defect(hidden)
    if defect is not None:
        raise OSError(f"{hidden}: {defect}; --save has to be one folder that all ranks write to")
    pointer = root / folder.LATEST
    before = pointer.read_bytes() if pointer.exists() else None
    os.rename(hidden, step)
    try:
        sync(root)
        replace_text(pointer, f"{iteration}\n", sole_writer=True)
    except OSError:
        os.rename(step, hidden)  # a step that is reported as not saved must not be there
        _restore_pointer(pointer, before)
        raise
    return step


def discard(root: Path, iteration: int) -> None:
    """Remove a step that was not published, so that a full disk does not stay full."""
    shutil.rmtree(folder.hidden_folder(root, iteration), ignore_errors=True)


def _restore_pointer(pointer: Path, before: bytes | None) -> None:
    """Restore the pointer's content, as well as a disk that fails allows it."""
    with suppress(OSError):
        if before is None:
            pointer.unlink(missing_ok=True)
        elif pointer.read_bytes() != before:
            aside = pointer.with_name(f".{pointer.name}.new")
            aside.write_bytes(before)
            os.replace(aside, pointer)


def _free_name(step: Path) -> Path:
    names = (step.with_name(f"{step.name}.bad{number or ''}") for number in range(1000))
    return next(path for path in names if not path.exists())


@dataclass(frozen=True)
class Retention:
    """The rule of `--keep-last-k` and `--save-retain-interval`: which steps stay.

    keep_last: how many of the steps that do not stay for ever; None: all. forever_every: multiples of it stay.
    """

    keep_last: int | None = None
    forever_every: int | None = None

    def surplus(self, sound: list[int], protected: Collection[int]) -> list[int]:
        """Return those of the sound steps that may go, in ascending order; not the newest and no protected one."""
        if self.keep_last is None:
            return []
        passing = [number for number in sound if not (self.forever_every and number % self.forever_every == 0)]
        going = passing[: max(0, len(passing) - self.keep_last)]
        return [number for number in going if number not in protected and number != sound[-1]]


def retention(keep_last_k: int | None, save_retain_interval: int | None) -> Retention:
    """Return the rule of the flags: `--save-retain-interval` alone keeps its multiples and the last step."""
    if keep_last_k is None and save_retain_interval is not None:
        keep_last_k = 1
    return Retention(keep_last_k, save_retain_interval)


def remove_surplus(
    root: Path, rule: Retention, protected: Collection[int], *, published: int | None = None
) -> list[str]:
    """Remove the steps that may go. A step with a defect is not counted and not removed: somebody should see it.

    Args:
        published: the step that was just saved. Later ones were found damaged when the run started: whether their
            sizes are right or not, they are not counted either.

    Returns:
        What could not be removed and why, for the log; it is tried again after the next step.
    """
    if rule.keep_last is None:
        return []
    counted = [number for number in folder.steps(root) if published is None or number <= published]
    sound = [number for number in counted if structure_defect(folder.step_folder(root, number)) is None]
    notes = []
    for number in rule.surplus(sound, protected):
        try:
            remove_step(folder.step_folder(root, number))
        except OSError as error:
            notes.append(f"step {number} is not needed any more, but could not be removed: {error}")
    return notes


def remove_left_behind(root: Path) -> list[str]:
    """Remove steps that a writer which died left half written or half deleted; the caller has to hold the lock.

    Returns:
        The names of the folders that were removed.
    """
    if not root.is_dir():
        return []
    left = sorted(entry for entry in root.iterdir() if _LEFT_BEHIND.fullmatch(entry.name))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def remove_step(step: Path) -> None:
    """Hide a step at once, then delete it, so that no reader finds a half deleted step."""
    hidden = step.with_name(f".{step.name}.deleting")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(step, hidden)
    sync(step.parent)
    shutil.rmtree(hidden)
