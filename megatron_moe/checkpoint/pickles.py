"""Reading the pickles of a step under restriction, before the engine opens them; and one tensor's own archive."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint import index
from megatron_moe.checkpoint.index import StepIndex, StoredBytes, UntrustedError
from megatron_moe.io.hashing import FileEntry

COMMON = "common.pt"
LARGEST = 2 * 2**30
"""The largest file of plain values that is read, in bytes."""


def check(step: Path, files: Mapping[str, FileEntry]) -> StepIndex:
    """Read whatever the engine reads without restriction: the index, the values it lists, the common file.

    Tensors are not read here: torch reads them under restriction itself.

    Raises:
        UntrustedError: naming the file and what it holds.
    """
    content = index.read(step, files)
    for key, place in content.values.items():
        read_value(step, key, place)
    if COMMON in files:
        read_file(step, COMMON)
    return content


def read_file(step: Path, name: str) -> Any:
    """Return the tensors and plain values of a file that torch.save wrote, on the CPU.

    Raises:
        UntrustedError: it holds anything else, cannot be read, or is too large.
    """
    with open(step / name, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UntrustedError(f"{name} has more than {LARGEST} bytes")
    return _loaded(data, name)


def read_value(step: Path, key: str, place: StoredBytes) -> Any:
    """Return a value of a data file: tensors and plain values, on the CPU.

    Raises:
        UntrustedError: it holds anything else, or cannot be read.
    """
    with open(step / place.file, "rb") as file:
        file.seek(place.offset)
        return _loaded(file.read(place.length), f"{key} in {place.file}")


def _loaded(data: bytes, where: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a pickle or an archive made for it can raise
        raise UntrustedError(f"{where} is damaged or harmful: {words(error)}") from None


def words(error: BaseException) -> str:
    """Return torch's reason for refusing a file, without its advice on how to read it all the same."""
    lines = str(error).splitlines() or [""]
    wanted = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    kind = "" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: "
    return f"{kind}{(wanted or lines)[0].strip()[:200]}"


PER_PART = 2048
"""An upper bound of the bytes that torch's archive adds to a tensor in a data file, for estimates."""


def by_itself(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the same memory, but not as a view of a larger one.

    An archive holds all of the memory that a tensor is a view of, and torch's writer would copy such a tensor first.
    """
    value = value.detach()
    if value.is_cuda or not value.numel() or value.untyped_storage().nbytes() == value.nbytes:
        return value
    content = value.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(value.dtype).view(value.shape)
