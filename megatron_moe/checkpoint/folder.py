"""The folder of checkpoints: names, the completion marker, the pointer to the latest step. No torch.

    SAVE/
      latest_checkpointed_iteration.txt    the number of the newest step, as Megatron-LM writes it
      iter_0000050/
        *.distcp .metadata metadata.json   tensors, by the engine's dist_checkpointing
        rng/rank_00000.pt                  random states, one file per rank
        config.json                        the run's flat configuration
        state.json                         iteration, samples, schedule, layout, versions
        manifest.json                      every other file with its size; written last, so it marks a complete step
      .iter_0000100.saving/                a step that is being written, or whose writer died; never read

A step is written under its hidden name and renamed when all ranks are done, so a folder `iter_*` is complete by
construction; the marker guards against copies that were cut short.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError

LATEST = "latest_checkpointed_iteration.txt"
CONFIG = "config.json"
STATE = "state.json"
MANIFEST = "manifest.json"
OWNER = ".megatron_moe_checkpoints"
"""An empty file in every folder that a run saves to: it tells the folder from a wrong path before a step is there."""

_STEP = re.compile(r"iter_(\d{7,})")


def step_folder(root: Path, iteration: int) -> Path:
    """The folder of one step."""
    return root / f"iter_{iteration:07d}"


def hidden_folder(root: Path, iteration: int) -> Path:
    """Where a step is written before it is complete."""
    return root / f".iter_{iteration:07d}.saving"


def steps(root: Path) -> list[int]:
    """Iterations that have a folder, complete or not, in ascending order."""
    if not root.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def defect(step: Path) -> str | None:
    """Why a step cannot be loaded: the marker is missing, or a file is missing or has another size. None if it can."""
    try:
        files = json.loads((step / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, the mark of a complete step"
    except (OSError, ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, size in files.items():
        path = step / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def find_step(root: Path, wanted: int | None) -> tuple[Path | None, list[str]]:
    """The step to load and what to tell about those passed over: the one wanted, else the newest complete one.

    Returns (None, notes) for a folder of ours that holds no complete step yet, and for one that is missing or empty.

    Raises:
        ConfigError: `root` is something else, or the step wanted is not there.
    """
    _check_is_root(root)
    available = steps(root)
    if wanted is not None:
        step = step_folder(root, wanted)
        reason = defect(step) if wanted in available else "there is no such step"
        if reason is not None:
            there = ", ".join(str(number) for number in available if defect(step_folder(root, number)) is None)
            raise ConfigError(f"--ckpt-step {wanted}: {reason} in {root}; complete steps: {there or 'none'}")
        return step, []
    notes = []
    for iteration in reversed(available):
        step = step_folder(root, iteration)
        reason = defect(step)
        if reason is None:
            pointer = root / LATEST
            named = pointer.read_text().strip() if pointer.is_file() else None
            if named not in (None, str(iteration)):
                notes.append(f"{pointer} names step {named}; the newest complete step is {iteration}")
            return step, notes
        notes.append(f"skipped {step}: {reason}")
    return None, notes


def _check_is_root(root: Path) -> None:
    if not root.exists():
        return
    if not root.is_dir():
        raise ConfigError(f"--load {root}: is a file; give the folder that holds iter_* folders")
    if _STEP.fullmatch(root.name) and (root / STATE).exists():
        raise ConfigError(
            f"--load {root}: is one step; give its parent and choose the step: "
            f"--load {root.parent} --ckpt-step {int(root.name[len('iter_') :])}"
        )
    names = {entry.name for entry in root.iterdir()}
    ours = any(_STEP.fullmatch(name) for name in names) or names & {OWNER, LATEST}
    if names and not ours:
        raise ConfigError(
            f"--load {root}: is not a checkpoint folder: it holds {_some(names)}, and neither iter_* nor {LATEST}; "
            "give the folder that an earlier run named with --save"
        )


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_save_root(root: Path, *, loaded_from: Path | None, start_iteration: int) -> None:
    """Refuse a folder in which this run would meet the steps of another.

    Raises:
        ConfigError: it is a file, cannot be written, or holds steps that this run does not continue.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--save {root}: is a file; name a folder")
    existing = next(parent for parent in (root, *root.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--save {root}: {existing} is not writable; name a folder that you may write to")
    later = [number for number in steps(root) if number > start_iteration]
    if not steps(root):
        return
    if loaded_from is None or loaded_from.resolve() != root.resolve():
        raise ConfigError(
            f"--save {root}: holds steps up to {steps(root)[-1]} of an earlier run; continue it with --load {root}, or "
            "save to another folder"
        )
    complete = [number for number in later if defect(step_folder(root, number)) is None]
    if complete:
        raise ConfigError(
            f"--save {root}: holds step {complete[0]}, later than step {start_iteration} where this run starts, and "
            "checkpoints are never overwritten; save to another folder, or continue from the latest step"
        )


def claim_root(root: Path) -> None:
    """Make the folder and mark it as one of ours."""
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNER).touch()


def open_hidden(root: Path, iteration: int) -> Path:
    """An empty hidden folder for a step; what a writer that died left under this name is removed.

    Raises:
        FileExistsError: the step is there already, complete.
    """
    step, hidden = step_folder(root, iteration), hidden_folder(root, iteration)
    if step.exists():
        reason = defect(step)
        if reason is None:
            raise FileExistsError(f"{step} is there already; checkpoints are never overwritten")
        os.rename(step, _free_name(step))
    shutil.rmtree(hidden, ignore_errors=True)
    (hidden / "rng").mkdir(parents=True)
    return hidden


def _free_name(step: Path) -> Path:
    candidates = (step.with_name(f"{step.name}.incomplete{number or ''}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


def publish(root: Path, iteration: int) -> Path:
    """Make a written step visible: the marker, the disk, the rename, the pointer, in this order."""
    hidden, step = hidden_folder(root, iteration), step_folder(root, iteration)
    files = sorted(path for path in hidden.rglob("*") if path.is_file())
    sizes = {path.relative_to(hidden).as_posix(): path.stat().st_size for path in files}
    write_json(hidden / MANIFEST, {"files": sizes})
    for path in (hidden / "rng", hidden):
        _sync(path)
    os.rename(hidden, step)
    _sync(root)
    _replace(root / LATEST, f"{iteration}\n")
    return step


def write_json(path: Path, value: Any) -> None:
    """Write and flush to disk a JSON file of a step that is not visible yet."""
    with open(path, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """One of the JSON files of a step."""
    return json.loads(path.read_text())


def _replace(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
