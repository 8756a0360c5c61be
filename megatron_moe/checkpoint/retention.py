"""Which steps stay and which go, and going: at every instant a complete step is there. No torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.checkpoint import folder
from megatron_moe.checkpoint.durable import sync_folder
from megatron_moe.checkpoint.manifest import structure_defect

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
    sync_folder(step.parent)
    shutil.rmtree(hidden)
