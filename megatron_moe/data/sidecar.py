"""The sidecar `PREFIX.json` of `PREFIX.bin` and `PREFIX.idx`: what was written, with which tokenizer.

With it, the start of a run detects data of another tokenizer, ids beyond the vocabulary, and files that changed after
they were written.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """A description of one indexed dataset: sizes in bytes, hashes in hex, `min_id` and `max_id` inclusive."""

    format: int
    tokens: int
    documents: int
    min_id: int
    max_id: int
    dtype: str
    tokenizer_type: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int
    append_eod: bool
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def sidecar_path(prefix: str) -> str:
    """Return the path of a dataset's sidecar, `PREFIX.json`."""
    return f"{prefix}.json"


def read_sidecar(prefix: str) -> Sidecar | None:
    """Return the sidecar of a dataset, or None where there is none.

    Raises:
        ConfigError: the file exists but is not a sidecar that this version reads.
    """
    path = sidecar_path(prefix)
    if not os.path.exists(path):
        return None
    advice = "write the dataset again, or move the file away to have the data scanned instead"
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {advice}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"{path}: format {found!r}, this version reads {FORMAT}; {advice}")
    kinds = {"int": int, "str": str, "bool": bool}
    for f in dataclasses.fields(Sidecar):
        if f.name not in values:
            raise ConfigError(f"{path}: {f.name} is missing; {advice}")
        if type(values[f.name]) is not kinds[str(f.type)]:
            raise ConfigError(f"{path}: {f.name} is {values[f.name]!r}, which is no {f.type}; {advice}")
    return Sidecar(**{f.name: values[f.name] for f in dataclasses.fields(Sidecar)})
