"""Finds contents that no honest folder has, while its tensors are read: a broken download, an expert copied twice.

A download that broke leaves zeros, in whole tensors or from some byte on. A tensor is looked at in a few places only:
every run of zeros as long as the shortest one that counts covers one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.folder import ALLOW, CERTIFICATE, HFFolder
from megatron_moe.hf.mapping import Mapping
from megatron_moe.hf.safetensors_file import FormatError, parse_object
from megatron_moe.hf.tensors import TensorReader, to_bytes
from megatron_moe.hf.transforms import Vocabulary

_PAGE = 4096
"""Bytes of zeros that count however wide a row is: files lose whole pages of a disk."""
_MOST_PADDING = 1024
"""Rows of zeros that a vocabulary may end in: those of no token."""
_BEGIN_AT_ZERO = (".bias", ".expert_bias")
_SAMPLE = 256
"""Number of values of an expert that its fingerprint has one by one."""


class WeightCheck:
    """The check of one folder's tensors, each when it has been read.

    Args:
        reader: reads the folder.
        table: the mapping of its model.

    Raises:
        ConfigError: the folder's certificate is malformed.
    """

    def __init__(self, reader: TensorReader, table: Mapping) -> None:
        self._reader = reader
        self._checked = {
            name: isinstance(piece.transform, Vocabulary)
            for piece in table.pieces
            if not piece.key.endswith(_BEGIN_AT_ZERO)
            for name in piece.hf
        }
        experts = (piece for piece in table.pieces if ".experts.weight" in piece.key)
        self._layer = {name: piece.key.rpartition(".")[0] for piece in experts for name in piece.hf}
        self._certified = _certified(reader.folder)
        self._names: dict[tuple[str, int], str] = {}
        self.fingerprints: dict[str, int] = {}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor as the reader does, hashed where the folder has a certificate.

        Raises:
            ConfigError: it is not the tensor that the certificate names.
        """
        if not self._certified:
            return self._reader.read(name, dtype)
        tensor, digests = self._reader.read_hashed(name, dtype)
        self.require_certified(digests)
        return tensor

    def require_certified(self, digests: dict[str, str]) -> None:
        """Check stored tensors by their SHA-256 against the folder's certificate, if it has one.

        Raises:
            ConfigError: one is another; the message names its file.
        """
        for name, digest in digests.items():
            if self._certified.get(name, digest) != digest:
                raise ConfigError(
                    f"{self._where(name)}: tensor {name} is not what {CERTIFICATE} beside it lists: bring the folder "
                    f"back from its source, or remove {CERTIFICATE} if the weights were changed on purpose"
                )

    def doubt(self, name: str, tensor: Tensor, digest: str | None = None) -> str | None:
        """Return what is wrong with a tensor that `name` was read as, None if nothing is.

        Args:
            digest: its SHA-256 where that is known; otherwise experts are compared by a cheaper fingerprint.
        """
        words = self._zeros(name, tensor)
        if words is None and name in self._layer:
            if digest is None:  # 60 bits that equal tensors share: of the sum of all bytes, and of some values
                flat = tensor.reshape(-1)
                whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
                sample = flat[:: max(flat.numel() // _SAMPLE, 1)]
                digest = hashlib.sha256(whole.sum().numpy().tobytes() + to_bytes(sample)).hexdigest()
            self.fingerprints[name] = int(digest[:15], 16)
            words = self._twice(name, self.fingerprints[name], self._names)
        return None if words is None else f"{self._where(name)}: tensor {name} {words}"

    def equal_experts(self, fingerprints: dict[str, int]) -> dict[str, str]:
        """Return what is wrong with the experts of all ranks, name -> words, by their fingerprints."""
        names: dict[tuple[str, int], str] = {}
        found = ((name, self._twice(name, value, names)) for name, value in fingerprints.items())
        return {name: f"{self._where(name)}: tensor {name} {words}" for name, words in found if words is not None}

    def _twice(self, name: str, fingerprint: int, names: dict[tuple[str, int], str]) -> str | None:
        first = names.setdefault((self._layer[name], fingerprint), name)
        return None if first == name else f"equals {first}, as if one expert were there twice"

    def _where(self, name: str) -> str:
        folder = self._reader.folder
        return str(folder.path / folder.tensors[name].file)

    def _zeros(self, name: str, tensor: Tensor) -> str | None:
        is_vocabulary = self._checked.get(name)
        if is_vocabulary is None or not tensor.numel():
            return None
        rows = tensor.shape[0] if tensor.dim() == 2 else 1
        width = tensor.numel() // rows
        least = min(_PAGE // tensor.element_size(), width if rows > 1 else max(width // 8, 2))
        for first, count in _runs_of_zeros(tensor.reshape(-1), least):
            aligned = first % width == 0 and count % width == 0
            one_row = aligned and count == width and rows > 1  # of a padding token, or of a unit that has died
            padding = is_vocabulary and aligned and first + count == tensor.numel()
            if one_row or (padding and count // width <= min(_MOST_PADDING, rows // 2)):
                continue
            return f"holds {count} zeros in a row from element {first} of {tensor.numel()} on"
        return None


def refusal(words: str) -> ConfigError:
    """Return the error for what `WeightCheck.doubt` found."""
    return ConfigError(
        f"{words}: no trained model has that, a broken download or copy does; bring the file back from its source, or "
        f"take it as it is with {ALLOW}"
    )


def _runs_of_zeros(flat: Tensor, least: int) -> Iterator[tuple[int, int]]:
    """Yield first element and length of every run of at least `least` zeros in a vector."""
    end = 0
    for at in ((flat[::least] == 0).nonzero() * least).flatten().tolist():
        if at < end:
            continue
        before = flat[max(at - least, 0) : at].nonzero()
        first = max(at - least, 0) + (int(before[-1]) + 1 if len(before) else 0)
        end, step = at, least
        while end < len(flat):
            after = flat[end : end + step].nonzero()
            if len(after):
                end += int(after[0])
                break
            end, step = min(end + step, len(flat)), min(2 * step, 1 << 20)
        if end - first >= least:
            yield first, end - first


def _certified(folder: HFFolder) -> dict[str, str]:
    """Return the SHA-256 of each stored tensor that the folder's own certificate lists."""
    if CERTIFICATE not in folder.companions:
        return {}
    try:
        rows = parse_object(folder.companion(CERTIFICATE), CERTIFICATE)["tensors"]
        entries: list[dict[str, Any]] = [entry for row in rows for entry in row.get("hf", ())]
        entries += [entry["scale"] for entry in entries if "scale" in entry]
        return {entry["name"]: entry["sha256"] for entry in entries}
    except (FormatError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{folder.path / CERTIFICATE}: is no certificate of a conversion that can be read; bring it back from its "
            "source, or remove it"
        ) from None
