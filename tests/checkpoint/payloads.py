"""Checkpoints made to do harm: each payload changes a sound step of one rank, and the manifest is made to fit it.

Wherever a payload's code runs, it makes a file, the sentinel.
"""

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_moe.checkpoint import manifest
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from tests.checkpoint.checkpoint_steps import saved, seal

DATA = "__0_0.distcp"


class Bomb:
    """Makes the sentinel when it is unpickled without restriction."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


def _common(step: Path, bomb: Bomb) -> None:
    (step / "common.pt").write_bytes(saved({"optimizer": bomb}))


@contextlib.contextmanager
def _changed_index(step: Path) -> Iterator[Any]:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    yield metadata
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def _metadata(step: Path, bomb: Bomb) -> None:
    with _changed_index(step) as metadata:
        metadata.planner_data = bomb


def _append(step: Path, content: bytes) -> _StorageInfo:
    with open(step / DATA, "ab") as file:
        place = _StorageInfo(DATA, file.tell(), len(content))
        file.write(content)
    return place


def _byte_object(step: Path, bomb: Bomb) -> None:
    with _changed_index(step) as metadata:
        metadata.state_dict_metadata["rerun_state"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("rerun_state")] = _append(step, saved(bomb))


def _tensor_item(step: Path, bomb: Bomb) -> None:
    with _changed_index(step) as metadata:
        for index in metadata.storage_data:
            if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
                metadata.storage_data[index] = _append(step, saved(bomb))


def _random_states(step: Path, bomb: Bomb) -> None:
    (step / "rng" / "rank_00000.pt").write_bytes(saved({"torch": bomb}))


def _zip_slip(step: Path, bomb: Bomb) -> None:
    content = io.BytesIO((step / "common.pt").read_bytes())
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr(os.path.relpath(bomb.sentinel, step), b"x")
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
    (step / "common.pt").write_bytes(content.getvalue())
    outside = step.parent / "outside.distcp"
    outside.write_bytes(saved(bomb))
    with _changed_index(step) as metadata:
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = "../outside.distcp", 0, outside.stat().st_size


def _link_out(step: Path, bomb: Bomb) -> None:
    outside = step.parent / "outside.pt"
    outside.write_bytes(saved(bomb))
    (step / "common.pt").unlink()
    (step / "common.pt").symlink_to(outside)


def _module(step: Path, bomb: Bomb) -> None:
    (step / "modeling_evil.py").write_text(f"import os\nos.system('touch {bomb.sentinel}')\n")
    config = json.loads((step / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_evil.Model"}, "trust_remote_code": True}
    (step / "config.json").write_text(json.dumps(config))


PAYLOADS: dict[str, Callable[[Path, Bomb], None]] = {
    "common.pt": _common,
    ".metadata": _metadata,
    "value in a .distcp file": _byte_object,
    "tensor in a .distcp file": _tensor_item,
    "random states": _random_states,
    "paths out of the folder": _zip_slip,
    "link out of the folder": _link_out,
    "modeling_evil.py": _module,
}
NOT_READ_BY_LOAD = {"random states"}
"""Weights alone do without random states, and load."""


def plant(name: str, step: Path, sentinel: Path) -> None:
    """Put a payload into a step, with a manifest that fits."""
    PAYLOADS[name](step, Bomb(sentinel))
    seal(step, int(step.name[len("iter_") :]))
    content = manifest.read(step)
    for path in step.rglob("*"):
        if path.is_symlink():
            entry: FileEntry = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
            manifest.write(step, content.iteration, {**content.files, path.name: entry})


def read_without_protection(step: Path) -> None:
    """What a reader does that trusts its files: every pickle is opened, every module of the step is run."""
    for path in sorted(step.rglob("*")):
        with contextlib.suppress(Exception):
            if path.suffix in (".pt", ".bin"):
                torch.load(path, weights_only=False)
            elif path.suffix == ".py":
                exec(path.read_text(), {})
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        with open(step / info.relative_path, "rb") as file:
            file.seek(info.offset)
            torch.load(io.BytesIO(file.read(info.length)), weights_only=False)
