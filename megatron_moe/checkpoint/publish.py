"""How a step becomes visible: a hidden folder, the manifest, one rename, the pointer last. No torch."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_moe.checkpoint import durable, folder, manifest
from megatron_moe.checkpoint.manifest import Entry


def claim_root(root: Path) -> None:
    """Make the folder and mark it as one of ours."""
    root.mkdir(parents=True, exist_ok=True)
    (root / folder.OWNER).touch()
    durable.sync_folder(root)


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
    free = durable.free_bytes(root)
    if free is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, "there is not enough room", str(root))
    hidden.mkdir()  # not its parents: a folder that was moved away is not made anew
    (hidden / "rng").mkdir()
    return hidden


def publish(root: Path, iteration: int, files: dict[str, Entry]) -> Path:
    """Make a written step visible: the manifest, the disk, the rename, the pointer, in this order.

    Args:
        files: everything in the hidden folder, each on the disk already.

    Raises:
        OSError: the system refused, or the hidden folder does not hold exactly these files.
    """
    hidden, step = folder.hidden_folder(root, iteration), folder.step_folder(root, iteration)
    for part in ("rng", "hf"):
        if (hidden / part).is_dir():
            durable.sync_folder(hidden / part)
    manifest.write(hidden, iteration, files)
    defect = manifest.structure_defect(hidden)
    if defect is not None:
        raise OSError(f"{hidden}: {defect}; --save has to be one folder that all ranks write to")
    pointer = root / folder.LATEST
    before = pointer.read_bytes() if pointer.exists() else None
    os.rename(hidden, step)
    try:
        durable.sync_folder(root)
        durable.replace_text(pointer, f"{iteration}\n")
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
