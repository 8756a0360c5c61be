"""The origin of an imported model: what every step of its training keeps of the source, so that it can be exported.

A step of such a model has `hf` in its state (the family, and what the source held besides the tensors) and the
source's small files, configuration and tokenizer among them, as `hf/NAME`. They are kept as bytes: the source may be
gone when a step is saved. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import manifest
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry
from megatron_moe.io.texts import size_text

FOLDER = "hf"
"""The folder of the small files in a step; also the key of the rest in the step's state."""
MEGATRON = "megatron"
"""The key in the state of a step that was converted from a checkpoint of Megatron-LM's."""
LARGEST = 256 * 2**20
"""How many bytes of small files are kept in total; beyond that the largest are left out, which is reported."""


@dataclass(frozen=True)
class Provenance:
    """What the steps keep of the source of an imported model.

    state: the value of the key `hf`; None for a model that was not imported. files: name -> content, on the rank that
    read them.
    """

    state: dict[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(len(content) for content in self.files.values())

    def write(self, hidden: Path) -> dict[str, FileEntry]:
        """Write the files into a step that is not visible yet, onto the disk; return their entries in its manifest.

        Raises:
            OSError: the system refused.
        """
        if self.files:
            (hidden / FOLDER).mkdir()
        return {
            f"{FOLDER}/{name}": write_bytes(hidden / FOLDER / name, content) for name, content in self.files.items()
        }


def is_of_megatron(state: Mapping[str, Any]) -> bool:
    """Return whether a step is a converted one of Megatron-LM's, with an optimizer or without."""
    return state.get(MEGATRON) is not None


def of_step(step: Path, state: Mapping[str, Any]) -> tuple[Provenance, list[str]]:
    """Return what a step keeps of the source it was imported from, and notes on it.

    Raises:
        ConfigError: the manifest or a file cannot be read, or the state is none.
    """
    about = state.get(FOLDER)
    if about is None:
        return Provenance(), []
    if not isinstance(about, dict):
        raise ConfigError(f"--load {step}: its state has {str(about)[:40]!r} for {FOLDER}, which is no object")
    prefix = f"{FOLDER}/"
    try:
        every = manifest.read(step).files
    except manifest.ManifestError as error:
        raise ConfigError(f"--load {step}: {error}") from None
    entries = {name.removeprefix(prefix): entry for name, entry in every.items() if name.startswith(prefix)}

    def content(name: str) -> bytes:
        path = step / FOLDER / name
        try:
            with path.open("rb") as file:
                found = file.read(entries[name]["bytes"] + 1)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(found).hexdigest() != entries[name]["sha256"]:
            raise ConfigError(f"{path}: is not what was saved; load another step with --ckpt-step")
        return found

    files, notes = read({name: entry["bytes"] for name, entry in entries.items()}, content, step / FOLDER)
    return Provenance(about, files), notes


def read(sizes: Mapping[str, int], content: Callable[[str], bytes], where: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return small files by name, the smallest first until there are too many bytes, and notes on the rest.

    Args:
        sizes: in bytes, by name.
        content: reads a file by its name.
        where: the folder of the files, for messages.
    """
    kept: dict[str, bytes] = {}
    notes: list[str] = []
    room = LARGEST
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if sizes[name] > room:
            notes.append(f"{where / name} is not carried along: {size_text(sizes[name])} of files")
            continue
        kept[name] = content(name)
        room -= sizes[name]
    return kept, notes
