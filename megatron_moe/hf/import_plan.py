"""Plans the import of a Hugging Face folder: whether its configuration and headers fit the run. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import settings_of
from megatron_moe.hf.families import Family
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import Mapping, mapping, require_tensors


@dataclass(frozen=True)
class Import:
    """A folder that fits the run according to its headers and configuration."""

    folder: HFFolder
    family: Family
    table: Mapping
    copies: list[str]
    """Names that the folder contains in addition to the table's, equal to others."""
    dropped: list[str]
    notes: list[str]

    @property
    def state(self) -> dict[str, object]:
        """Part of the import that every step of the training saves, for an export."""
        return {"family": self.family.name, "copies": self.copies, "dropped": self.dropped}

    def origin(self) -> tuple[Provenance, list[str]]:
        """Return `state` with the folder's small files, and notes for the user. Called on rank 0, which writes them."""
        sizes = {name: self.folder.identities[name].size for name in self.folder.companions}
        files, notes = origin.read(sizes, self.folder.companion, self.folder.path)
        return Provenance(self.state, files), notes


def plan_import(run: Run) -> Import:
    """Check that the folder of `--load-hf` fits the run, from its headers; allocate nothing.

    Raises:
        ConfigError: the folder is malformed, of a family that is not supported, or does not have the run's tensors.
    """
    where = f"--load-hf {run.checkpoint.load_hf}"
    folder = HFFolder.open(Path(run.checkpoint.load_hf or ""), "--load-hf")
    architecture = settings_of(folder, where)
    table = mapping(run, architecture.family.names)
    copies, dropped = require_tensors(table, folder.shapes(), where)
    return Import(folder, architecture.family, table, copies, dropped, [*folder.notes, *architecture.notes])
