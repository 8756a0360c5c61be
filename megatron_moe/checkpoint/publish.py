"""How a step becomes visible: a hidden folder, the manifest, one rename, the pointer last. No torch."""

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

# ---- Which steps stay and which go, and going: at every instant a complete step is there. No torch.


_LEFT_BEHIND = re.compile(r"\.iter_\d{7,}\.(saving|deleting)")


@dataclass(frozen=True)
class Retention:
    """What `--keep-last-k` and `--save-retain-interval` ask for.

    keep_last: how many of the steps that do not stay for ever; None: all. forever_every: multiples of it stay.
    """

    keep_last: int | None = None
    forever_every: int | None = None

    def surplus(self, sound: list[int], protected: Collection[int]) -> list[int]:
        """Those of the sound steps, in ascending order, that may go; never the newest and never a protected one."""
        if self.keep_last is None:
            return []
        passing = [number for number in sound if not (self.forever_every and number % self.forever_every == 0)]
        going = passing[: max(0, len(passing) - self.keep_last)]
        return [number for number in going if number not in protected and number != sound[-1]]


def retention(keep_last_k: int | None, save_retain_interval: int | None) -> Retention:
    """From the flags: `--save-retain-interval` alone keeps one step beside its multiples, as Megatron-LM does."""
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
        What could not be removed and why, for the log; it is tried again behind the next step.
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
    """Remove what writers that died have left: steps half written or half deleted. Only for the one who holds the lock.

    Returns:
        Names of the folders that are gone.
    """
    if not root.is_dir():
        return []
    left = sorted(entry for entry in root.iterdir() if _LEFT_BEHIND.fullmatch(entry.name))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def remove_step(step: Path) -> None:
    """Hide a step at once, then delete it: half of one is never to be seen."""
    hidden = step.with_name(f".{step.name}.deleting")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(step, hidden)
    sync(step.parent)
    shutil.rmtree(hidden)


# ----


def claim_root(root: Path) -> None:
    """Make the folder and mark it as one of ours."""
    root.mkdir(parents=True, exist_ok=True)
    (root / folder.OWNER).touch()
    sync(root)


def open_hidden(root: Path, iteration: int, num_bytes: int = 0) -> Path:
    """An empty hidden folder for a step of at most `num_bytes`; what a writer that died left there is removed.

    A step of this number that cannot be loaded makes way, under another name.

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
        os.rename(step, hidden)  # a step that is told as not saved is not there
        _put_back(pointer, before)
        raise
    return step


def discard(root: Path, iteration: int) -> None:
    """Remove a step that was not published: a disk that is full is not to stay full."""
    shutil.rmtree(folder.hidden_folder(root, iteration), ignore_errors=True)


def _put_back(pointer: Path, before: bytes | None) -> None:
    """What the pointer said, as well as a disk that fails allows it."""
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
