"""The folder of checkpoints: names, which step is loaded, publishing a step, removing old ones. No torch.

    SAVE/
      .megatron_moe_checkpoints            the mark of a folder of ours
      latest_checkpointed_iteration.txt    the number of the newest step, as Megatron-LM writes it
      iter_0000050/
        *.distcp .metadata metadata.json   tensors, by the engine's dist_checkpointing
        common.pt                          the optimizer's plain values
        rng/                               random states, one file per rank
        hf/                                of an imported model: its configuration and tokenizer files, as they came
        config.json                        the run's flat configuration
        state.json                         iteration, samples, schedule, layout, versions
        manifest.json                      every other file with its size and SHA-256; written last
      .iter_0000100.saving/                a step that is being written, or whose writer died; never read

A step is written under its hidden name and renamed when all ranks are done, so a folder `iter_*` is complete by
construction; by the manifest, copies that were cut short and damaged files are found.

An object store has no rename. There a step is written under its own name, and the manifest, put last and removed first,
makes it one: `iter_*` without a manifest is never read, and removed by the next writer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import manifest
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_readable, require_store
from megatron_moe.io.files import free_bytes, remove_tree, replace_text, sync
from megatron_moe.io.hashing import FileEntry
from megatron_moe.io.object_storage import ObjectPath, StoreError
from megatron_moe.io.texts import hub_hint

LATEST = "latest_checkpointed_iteration.txt"
CONFIG = "config.json"
STATE = "state.json"
MANIFEST = manifest.NAME
WARNING = "CHECKPOINT WARNING: "
"""The beginning of notes that are repeated in the run's summary."""
OWNER = ".megatron_moe_checkpoints"
"""An empty file in every folder that a run saves to: it marks the folder as one of checkpoints before the first step.
"""
ENGINE_FORMAT = {
    "common_backend": "torch",
    "common_backend_version": 1,
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
}
"""The content of `metadata.json`, by which the engine recognizes the format."""
HAS_AVERAGE = "has_average"
"""The entry of a step's state that says whether it has the average of the weights, of `--ema-decay`."""
MADE = "made"
"""The entry of a step's state that says what other model it was made of, by upcycling or a change of experts."""
LARGEST_JSON = 64 * 2**20
"""The largest configuration or state that is read, in bytes."""

_STEP = re.compile(r"iter_(0\d{6}|[1-9]\d{6,})", re.ASCII)
_LEFT_BEHIND = re.compile(r"\.iter_\d{7,}\.(saving|deleting)")


def step_folder(root: Path, iteration: int) -> Path:
    """Return the folder of one step."""
    return root / f"iter_{iteration:07d}"


def staging_dir(root: Path, iteration: int) -> Path:
    """Return the folder in which a step is written before it is complete."""
    if isinstance(root, ObjectPath):
        return step_folder(root, iteration)
    return root / f".iter_{iteration:07d}.saving"


def steps(root: Path) -> list[int]:
    """Return the iterations that have a folder, complete or not, in ascending order; in a store, with a manifest."""
    if not root.is_dir():
        return []
    named = (entry for entry in root.iterdir() if _STEP.fullmatch(entry.name))
    return sorted(int(entry.name[len("iter_") :]) for entry in named if _is_there(entry))


def _is_there(step: Path) -> bool:
    """Return whether a step was published, whatever has become of it since."""
    return (step / MANIFEST).is_file() if isinstance(step, ObjectPath) else step.is_dir()


def small_files_defect(step: Path) -> str | None:
    """Return why a step's configuration and state cannot be used, in words that follow "it"; None if they can.

    Every rank reads these files before the others.
    """
    try:
        files = manifest.read(step).files
    except manifest.ManifestError as error:
        return str(error)
    for name in (CONFIG, STATE):
        if name not in files:
            return f"it has no {name}"
        if files[name]["bytes"] > LARGEST_JSON:
            return f"{name} has {files[name]['bytes']} bytes, more than {LARGEST_JSON}"
    return manifest.content_defect(step, (CONFIG, STATE))


def find_step(
    root: Path, wanted: int | None, *, known_bad: Mapping[int, str] | None = None, verify: bool = True
) -> tuple[Path | None, list[str]]:
    """Return the step to load, the one wanted or else the newest sound one, and notes on those passed over.

    Return (None, notes) for a checkpoint folder without a step, and for a folder that is missing or empty.

    Args:
        known_bad: steps whose content was found damaged, with the reason.
        verify: hash the small files too.

    Raises:
        ConfigError: `root` is something else, the step wanted is not there or not sound, the newest step is of an
            earlier format, or none of several steps is sound.
    """
    if isinstance(root, ObjectPath):
        require_store("--load", str(root))
    else:
        require_readable("--load", str(root))
    available = steps(root)
    if root.exists():  # it has to be a folder of checkpoints; what is something else is told with the way that works
        if not root.is_dir():
            raise ConfigError(f"--load {root}: is a file; give the folder that holds iter_* folders")
        owned = (root / OWNER).exists()
        for step in (*(step_folder(root, number) for number in reversed(available)), root / "release", root):
            if not owned and is_of_megatron(step):
                raise ConfigError(
                    f"--load {root}: {step.name} is a checkpoint of Megatron-LM; convert it, and load the result: "
                    f"megatron-moe convert --from megatron --to native --load {root} --save {root.name}-converted"
                )
        if _STEP.fullmatch(root.name) and (root / STATE).exists():
            raise ConfigError(
                f"--load {root}: is one step; give its parent and choose the step: "
                f"--load {root.parent} --ckpt-step {int(root.name[len('iter_') :])}"
            )
        names = sorted(entry.name for entry in root.iterdir())
        if names and not (owned or LATEST in names or any(_STEP.fullmatch(name) for name in names)):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            works = f"give the folder that an earlier run named with --save{steps_below(root)}"
            if "config.json" in names:
                works = f"a folder of Hugging Face's is where a run begins: --load-hf {root}"
            raise ConfigError(
                f"--load {root}: is not a checkpoint folder: it holds {shown}, and neither iter_* nor {LATEST}; {works}"
            )

    def reason_against(iteration: int) -> str | None:
        step, known = step_folder(root, iteration), known_bad or {}
        return known.get(iteration) or manifest.structure_defect(step) or (small_files_defect(step) if verify else None)

    if wanted is not None:
        reason = reason_against(wanted) if wanted in available else "there is no such step"
        if reason is not None:
            there = ", ".join(str(number) for number in available if number != wanted and not reason_against(number))
            raise ConfigError(f"--ckpt-step {wanted}: {reason} in {root}; other complete steps: {there or 'none'}")
        return step_folder(root, wanted), []
    notes: list[str] = []
    for iteration in reversed(available):
        step = step_folder(root, iteration)
        reason = reason_against(iteration)
        if reason is None:
            pointer = root / LATEST
            with suppress(OSError):  # it may name another step; the newest sound one is loaded all the same
                named = pointer.read_text(errors="replace").strip()[:20]
                if named != str(iteration):
                    notes.append(f"{pointer} names step {named or 'nothing'}; the newest complete step is {iteration}")
            return step, notes
        try:
            manifest.read(step)
        except manifest.OtherFormatError:
            raise ConfigError(
                f"--load {root}: step {iteration} cannot be read: {reason}; continue it with the version that saved "
                "it, or load another folder"
            ) from None
        except manifest.ManifestError:
            pass
        notes.append(f"{WARNING}step {iteration} is damaged and passed over: {reason} ({step})")
    if notes:
        head = (
            f"--load {root}: none of its {len(notes)} steps can be loaded; bring one back from a copy, or leave out "
            "--load and save to another folder to start afresh:"
        )
        raise ConfigError("\n".join([head, *(f"  {note.removeprefix(WARNING)}" for note in notes)]))
    return None, []


def step_of(path: Path, ckpt_step: int | None, flag: str = "--load") -> tuple[Path, list[str]] | None:
    """Return the step that a path and `--ckpt-step` name, and notes; None for a folder that is no checkpoint.

    Args:
        path: a run's folder, or one step of it.
        flag: the flag that named the path, for messages.

    Raises:
        ConfigError: there is no such folder or step, or none is sound.
    """
    require_readable(flag, str(path))
    if path.is_file():
        raise ConfigError(f"{flag} {path}: is a file; name the folder of a run, of a step or of a model")
    if not path.is_dir():
        raise ConfigError(f"{flag} {path}: there is no such folder{hub_hint(str(path))}")
    name = path.absolute().name
    is_step = _STEP.fullmatch(name) is not None and (path / STATE).exists()
    if not (is_step or steps(path) or (path / OWNER).exists() or (path / LATEST).exists()):
        return None
    root, wanted = (path.absolute().parent, int(name[5:])) if is_step else (path, ckpt_step)
    if is_step and ckpt_step not in (None, wanted):
        raise ConfigError(f"--ckpt-step {ckpt_step}: {flag} {path} is step {wanted}; leave one of them out")
    step, notes = find_step(root, wanted)
    if step is None:
        raise ConfigError(f"{flag} {path}: has no step yet")
    return step, notes


def is_of_megatron(step: Path) -> bool:
    """Return whether a folder is one step of Megatron-LM's: it has tensors, and none of the small files of ours."""
    if not step.is_dir() or any((step / name).exists() for name in (MANIFEST, STATE, CONFIG)):
        return False
    return (step / ".metadata").is_file() or any(entry.name.startswith("mp_rank_") for entry in step.iterdir())


def steps_below(root: Path) -> str:
    """Return, to end a refusal of `root`, which folder in it has steps; empty where none has."""
    with suppress(OSError):  # missing, a file, or not readable, which the refusal is about
        for entry in sorted(root.iterdir()):
            if steps(entry):
                return f"; {entry} has steps"
    return ""


def check_save_root(
    root: Path, *, loaded_from: Path | None, start_iteration: int, known_bad: Mapping[int, str] | None = None
) -> None:
    """Refuse a folder that holds the steps of another run; damaged steps do not count.

    Args:
        known_bad: steps whose content was found damaged.

    Raises:
        ConfigError: it is a file, cannot be written, or holds steps that this run does not continue.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--save {root}: is a file; name a folder")
    if not isinstance(root, ObjectPath):
        existing = next(parent for parent in (root, *root.absolute().parents) if parent.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"--save {root}: {existing} is not writable; name a folder that you may write to")
    present = steps(root)
    if present and (loaded_from is None or loaded_from.resolve() != root.resolve()):
        raise ConfigError(
            f"--save {root}: holds steps up to {present[-1]} of an earlier run; continue it with --load {root}, or "
            "save to another folder"
        )
    for number in present:
        if number <= start_iteration or number in (known_bad or {}):
            continue
        if manifest.structure_defect(step_folder(root, number)) is not None:
            continue
        raise ConfigError(
            f"--save {root}: holds step {number}, later than step {start_iteration} where this run starts, and "
            "checkpoints are never overwritten; save to another folder, or continue from the latest step"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the JSON files of a step.

    Raises:
        ConfigError: it is missing, too large, or holds something else than an object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise ValueError(f"more than {LARGEST_JSON} bytes")
        content = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error)[:100]}") from None
    return content


# Publishing and removing steps: at every instant a complete step is there.


def claim_root(root: Path) -> None:
    """Make the folder and mark it as a folder of checkpoints."""
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNER).touch()
    sync(root)


def open_hidden(root: Path, iteration: int, num_bytes: int = 0) -> Path:
    """Make an empty hidden folder for a step of at most `num_bytes`; what a writer that died left there is removed.

    A step of this number that cannot be loaded is renamed; in a store it is copied, then removed.

    Raises:
        FileExistsError: the step is there, sound: nothing is overwritten. OSError: no room, or the folder is gone.
    """
    step, hidden = step_folder(root, iteration), staging_dir(root, iteration)
    if _is_there(step):
        if not (manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)):
            raise FileExistsError(errno.EEXIST, "it is there already; checkpoints are never overwritten", str(step))
        names = (step.with_name(f"{step.name}.bad{number or ''}") for number in range(1000))
        bad = next(path for path in names if not path.exists())
        if isinstance(step, ObjectPath) and isinstance(bad, ObjectPath):
            step.copy_files(bad)
            remove_step(step)
        else:
            os.rename(step, bad)
    remove_tree(hidden)
    free = free_bytes(root)
    if free is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, "there is not enough room", str(root))
    hidden.mkdir()  # not its parents: a folder that was moved away is not made anew
    (hidden / "rng").mkdir()
    return hidden


def publish(root: Path, iteration: int, files: dict[str, FileEntry]) -> Path:
    """Make a written step visible: the manifest, the disk, the rename, the pointer, in this order.

    In a store, where nothing is renamed, the manifest makes it visible.

    Args:
        files: everything in the hidden folder, each on the disk already.

    Raises:
        OSError: the system refused, or the hidden folder does not hold exactly these files.
    """
    hidden, step = staging_dir(root, iteration), step_folder(root, iteration)
    for part in ("rng", "hf"):
        if (hidden / part).is_dir():
            sync(hidden / part)
    if (wrong := manifest.files_defect(hidden, files)) is not None:
        raise OSError(f"{hidden}: {wrong}; --save has to be one folder that all ranks write to")
    pointer = root / LATEST
    before = pointer.read_bytes() if pointer.exists() else None
    try:
        manifest.write(hidden, iteration, files)
    except StoreError:
        (hidden / MANIFEST).unlink(missing_ok=True)  # a put that failed may have arrived all the same
        raise
    if hidden != step:
        os.rename(hidden, step)
    try:
        sync(root)
        replace_text(pointer, f"{iteration}\n", sole_writer=True)
    except OSError:  # a step that is reported as not saved must not be there
        if hidden == step:
            (step / MANIFEST).unlink()
        else:
            os.rename(step, hidden)
        with suppress(OSError):  # the pointer is restored as well as a disk that fails allows it
            if before is None:
                pointer.unlink(missing_ok=True)
            elif isinstance(pointer, ObjectPath):
                pointer.write_bytes(before)
            elif pointer.read_bytes() != before:
                aside = pointer.with_name(f".{pointer.name}.new")
                aside.write_bytes(before)
                os.replace(aside, pointer)
        raise
    return step


def discard(root: Path, iteration: int) -> None:
    """Remove a step that was not published, so that a full disk does not stay full."""
    hidden = staging_dir(root, iteration)
    with suppress(OSError):  # the next writer removes it
        if hidden != step_folder(root, iteration) or not _is_there(hidden):
            remove_tree(hidden)


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
    notes = []
    try:
        counted = [number for number in steps(root) if published is None or number <= published]
        sound = [number for number in counted if manifest.structure_defect(step_folder(root, number)) is None]
    except StoreError as error:
        return [f"steps that are not needed any more were not removed: {error}"]
    for number in rule.surplus(sound, protected):
        try:
            remove_step(step_folder(root, number))
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
    if isinstance(root, ObjectPath):
        unfinished = [step for step in root.iterdir() if _STEP.fullmatch(step.name) and not _is_there(step)]
        for step in unfinished:
            step.remove_files()
        return [step.name for step in unfinished]
    left = sorted(entry for entry in root.iterdir() if _LEFT_BEHIND.fullmatch(entry.name))
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def remove_step(step: Path) -> None:
    """Hide a step at once, then delete it, so that no reader finds a half deleted step."""
    if isinstance(step, ObjectPath):
        (step / MANIFEST).unlink(missing_ok=True)
        remove_tree(step)
        return
    hidden = step.with_name(f".{step.name}.deleting")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(step, hidden)
    sync(step.parent)
    shutil.rmtree(hidden)
