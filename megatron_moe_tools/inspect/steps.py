"""Inspect steps without torch: which there are, how they were made, whether they are complete; and prune them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder, index, manifest
from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.texts import size_text

Log = Callable[[str], None]
_STEP_NAME = re.compile(r"iter_\d{7,}", re.ASCII)
_HIDDEN = re.compile(r"\.iter_\d{7,}\.(saving|deleting)", re.ASCII)
_PUT_ASIDE = re.compile(r"iter_\d{7,}\.bad\d*", re.ASCII)
_AXES = {"TP": "tp_size", "CP": "cp_size", "PP": "pp_size", "DP": "dp_size", "EP": "ep_size", "ETP": "etp_size"}
_SHOWN_VERSIONS = ("torch", "megatron-core", "python")
_BETWEEN_LINES = 5.0
"""Seconds between lines of progress."""


class DamagedError(Exception):
    """A step that is read is damaged or not complete; the exit status is 1."""


@dataclass(frozen=True)
class Folder:
    """A DIR of the command line: a folder of steps, or a single one of them."""

    root: Path
    steps: tuple[Path, ...]
    single: bool = False

    @property
    def newest(self) -> Path:
        """The newest step whose names and sizes are right.

        Raises:
            DamagedError: there is none.
        """
        for step in reversed(self.steps):
            if folder.defect(step) is None:
                return step
        reasons = "; ".join(f"{step.name}: {folder.defect(step)}" for step in self.steps) or "it holds no step"
        raise DamagedError(f"{self.root}: no step of it can be read: {reasons}")


def resolve(path: str) -> Folder:
    """Return the steps that a DIR of the command line means.

    Raises:
        ConfigError: it is neither a folder of checkpoints nor a step.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    if _STEP_NAME.fullmatch(root.absolute().name):
        return Folder(root.absolute().parent, (root.absolute(),), single=True)
    steps = tuple(folder.step_folder(root, number) for number in folder.steps(root))
    if not steps and not any((root / name).exists() for name in (folder.OWNER, folder.LATEST)):
        hint = folder.steps_below(root)
        raise ConfigError(f"{path}: is not a checkpoint folder: it holds neither iter_* nor {folder.LATEST}{hint}")
    return Folder(root, steps)


# list.


def about(step: Path) -> dict[str, Any]:
    """Return a step as plain values; `defect` says what is wrong with names, sizes and the small files."""
    facts: dict[str, Any] = {"step": int(step.name[len("iter_") :]), "folder": str(step)}
    facts["defect"] = folder.defect(step) or folder.small_files_defect(step)
    try:
        content = manifest.read(step)
        facts |= {"bytes": content.total_bytes, "files": len(content.files)}
        saved = (step / manifest.NAME).stat().st_mtime
        facts["saved"] = datetime.fromtimestamp(saved, timezone.utc).isoformat(timespec="seconds")
        if facts["defect"] is None:
            state = folder.read_json(step / folder.STATE)
            names = ("consumed_samples", "layout", "has_optimizer", "versions", "checkpoint_warnings")
            facts |= {name: state[name] for name in names if name in state}
    except (manifest.ManifestError, OSError, ConfigError):
        pass  # `defect` says it
    return facts


def list_steps(found: Folder, verify: bool, log: Log) -> tuple[list[str], dict[str, Any], bool]:
    """Return a line per step, the same as plain values, and whether all steps are good."""
    rows, lines = [], [f"{found.root}:"]
    for step in found.steps:
        facts = about(step)
        if verify and facts["defect"] is None:
            facts["defect"] = damage(step, log)
            facts["verified"] = facts["defect"] is None
        rows.append(facts)
        lines.append(_line(facts))
    result: dict[str, Any] = {"folder": str(found.root), "steps": rows}
    well = all(facts["defect"] is None for facts in rows) and bool(rows)
    if not rows:
        lines.append("  no step yet")
    if found.single:
        return lines, result, well
    hidden = sorted(entry.name for entry in found.root.iterdir() if _HIDDEN.fullmatch(entry.name))
    if hidden:
        result["hidden"] = hidden
        lines.append(f"  being written, or left by a writer that died: {', '.join(hidden)}")
    aside = sorted(entry.name for entry in found.root.iterdir() if _PUT_ASIDE.fullmatch(entry.name))
    if aside:
        result["put_aside"] = aside
        lines.append(f"  damaged, put aside when the step was saved again: {', '.join(aside)}")
    pointed = _pointer(found.root)
    newest = max((facts["step"] for facts in rows if facts["defect"] is None), default=None)
    if pointed is not None and pointed != str(newest):
        result["pointer"] = pointed
        lines.append(f"  {folder.LATEST} names step {pointed}; the newest complete step is {newest}")
        well = False
    return lines, result, well


def _line(facts: dict[str, Any]) -> str:
    parts = [f"  step {facts['step']:>8}"]
    if "consumed_samples" in facts:
        parts.append(f"{facts['consumed_samples']:,} samples")
    if "bytes" in facts:
        parts.append(size_text(facts["bytes"]))
        parts.append(facts["saved"])
    if "layout" in facts:
        axes = [f"{axis}{facts['layout'][name]}" for axis, name in _AXES.items() if facts["layout"].get(name, 1) != 1]
        parts.append(" ".join(axes) or f"{facts['layout'].get('world_size', 1)} ranks")
    if "versions" in facts:
        shown = {name: facts["versions"][name] for name in _SHOWN_VERSIONS if name in facts["versions"]}
        parts.append(", ".join(f"{name} {version}" for name, version in shown.items()))
    if facts["defect"] is not None:
        condition = f"DAMAGED: {facts['defect']}"
    else:
        condition = "verified" if facts.get("verified") else "complete"
    return ", ".join(parts) + ": " + condition


def _pointer(root: Path) -> str | None:
    try:
        return (root / folder.LATEST).read_text(errors="replace").strip()[:20]
    except OSError:
        return None


# config.


def config_of(step: Path) -> dict[str, Any]:
    """Return the flat configuration of a step.

    Raises:
        DamagedError: it is damaged.
    """
    defect = folder.small_files_defect(step)
    if defect is not None:
        raise DamagedError(f"{step}: {defect}")
    return folder.read_json(step / folder.CONFIG)


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the names whose values differ, with both values; None for one that is not there."""
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name) or (name in first) != (name in second)
    }


# verify.


def damage(step: Path, log: Log, workers: int = 4) -> str | None:
    """Hash every file of a step and read its index; return what is wrong, None if nothing is."""
    defect = folder.defect(step)
    if defect is not None:
        return defect
    content = manifest.read(step)
    progress = _Progress(step, content.total_bytes, log)
    largest_first = sorted(content.files, key=lambda name: -content.files[name]["bytes"])

    def one(name: str) -> str | None:
        return manifest.content_defect(step, [name], progress.advance)

    with ThreadPoolExecutor(workers) as pool:
        defects = [found for found in pool.map(one, largest_first) if found is not None]
    if defects:
        return "; ".join(defects[:3])
    try:
        index.read(step, content.files)
    except index.UntrustedError as error:
        return str(error)
    return folder.small_files_defect(step)


class _Progress:
    """A progress report of several threads that read; it prints a line every few seconds."""

    def __init__(self, step: Path, total: int, log: Log) -> None:
        self._step, self._total, self._log = step, total, log
        self._done, self._started = 0, time.monotonic()
        self._next = self._started + _BETWEEN_LINES

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now > self._next:
            self._next = now + _BETWEEN_LINES
            speed = self._done / (now - self._started)
            left = (self._total - self._done) / max(speed, 1.0)
            self._log(
                f"{self._step}: {size_text(self._done)} of {size_text(self._total)}, {size_text(int(speed))}/s, "
                f"{left:.0f} s left"
            )


# prune.


@dataclass(frozen=True)
class Pruning:
    """The steps that stay and go, and those that are damaged, which stay too: a person should look at them."""

    stay: list[int]
    go: list[int]
    damaged: dict[int, str]


def plan_pruning(found: Folder, keep_last: int, keep_every: int | None, verify: bool, log: Log) -> Pruning:
    """Return which steps may go. At least one step that stays is good: hashed, if `verify`.

    Raises:
        DamagedError: no step that would stay is good.
    """
    good: set[int] = set()
    reading = False  # where nothing would go, nothing has to be read
    damaged = {number: reason for number in _numbers(found) if (reason := folder.defect(_step(found, number)))}
    rule = folder.Retention(keep_last, keep_every)
    while True:
        sound = [number for number in _numbers(found) if number not in damaged]
        if not sound:
            raise DamagedError(f"{found.root}: holds no step that can be loaded, so nothing is removed")
        go = rule.surplus(sound, ())
        stay = [number for number in sound if number not in go]
        # Every step that stays is read: a damaged one must not count as one of the last.
        reading = reading or (verify and bool(go))
        unread = [number for number in stay if number not in good] if reading else []
        reasons = {number: damage(_step(found, number), log) for number in unread}
        damaged |= {number: reason for number, reason in reasons.items() if reason is not None}
        good |= {number for number in unread if number not in damaged}
        if not any(reasons.values()):
            return Pruning(stay, go, damaged)


def remove(found: Folder, numbers: list[int]) -> None:
    """Remove steps, each hidden by a rename and then deleted, while the folder is locked.

    Raises:
        ConfigError: a run writes to the folder.
        OSError: a file could not be removed.
    """
    lock, _ = writer_lock.acquire(found.root)
    with lock:
        for number in numbers:
            folder.remove_step(_step(found, number))


def _numbers(found: Folder) -> list[int]:
    return [int(step.name[len("iter_") :]) for step in found.steps]


def _step(found: Folder, number: int) -> Path:
    return folder.step_folder(found.root, number)
