"""The certificate of a conversion: every tensor of both sides by name, shape, dtype and hash, with none left out.

A row is one block of the native checkpoint and the tensors of the Hugging Face folder that belong to it:

    {"native": {"key", "start", "shape", "dtype", "sha256"}, "transform": "ExpertGateUp", "cast": null,
     "hf": [{"name", "shape", "dtype", "sha256"}, ...]}

Hashes are of the bytes as each side stores them. Where a tensor was cast, dequantised or cut on its way, its entry also
has `sha256_as_written`: the hash that the other side has after it is transformed back.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import operator
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint import index
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import replace_text
from megatron_moe.io.source_version import source_version

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BLOCK = 1 << 20
"""Number of elements that are checked at a time."""

Row = dict[str, Any]


def non_finite(tensor: Tensor) -> int:
    """Return how many numbers are not finite; memory is needed for a small part of them."""
    count = 0
    if not tensor.numel():
        return count
    for block in tensor.reshape(-1).split(_BLOCK):
        low, high = torch.aminmax(block)  # NaN is both
        if not (math.isfinite(low) and math.isfinite(high)):
            count += block.numel() - int(torch.isfinite(block).sum())
    return count


def taken(tensor: Tensor, dtype: torch.dtype, entry: Row, name: str, where: str) -> Tensor:
    """Return a tensor of the source, checked and cast, and complete its entry. Raises ConfigError: it is damaged."""
    if tensor.is_floating_point() and (count := non_finite(tensor)):
        raise ConfigError(
            f"{where}: tensor {name} holds {count} of {tensor.numel()} numbers that are not finite (NaN or Inf); a "
            "model that has them is damaged: bring the file back from its source"
        )
    if "sha256" not in entry:
        entry["sha256"] = sha256(tensor)
    result = cast(tensor, dtype, name)
    if entry["dtype"] != dtype_name(dtype):
        entry["sha256_as_written"] = sha256(result)
    return result


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the tensor in another dtype; widening is exact. Raises ConfigError: a number is too large for it."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if count := non_finite(result):
        raise ConfigError(
            f"--dtype: tensor {name} holds {count} numbers that are too large for {dtype_name(dtype)} (largest "
            f"{float(tensor.abs().max()):.4g}); --dtype bf16 or fp32 holds them"
        )
    return result


def native_entry(key: str, start: Shape, block: Tensor) -> Row:
    """Return a row's entry of one block of a native checkpoint, hashed."""
    dtype, shape = dtype_name(block.dtype), list(block.shape)
    return {"key": key, "start": list(start), "shape": shape, "dtype": dtype, "sha256": sha256(block)}


def cast_name(entries: Iterable[Row], dtype: torch.dtype) -> str | None:
    """Return a row's name for a change of dtype; None if there is none."""
    before, after = " and ".join(sorted(set(map(operator.itemgetter("dtype"), entries)))), dtype_name(dtype)
    return None if before == after else f"{before} -> {after}"


def expected(entry: Row) -> str:
    """Return the hash that the other side must have after it is transformed back."""
    return str(entry.get("sha256_as_written", entry["sha256"]))


def require_same(found: str, wanted: str, name: str, what: str) -> None:
    """Check that a hash is the expected one. Raises ConfigError: it is not; the message names the tensor."""
    if found != wanted:
        raise ConfigError(f"{name}: {what}: SHA-256 {found} instead of {wanted}; nothing was published")


def require_shapes(found: dict[str, Shape], wanted: dict[str, Shape], head: str, unknown: str) -> None:
    """Check that tensors are exactly the wanted ones, by name and shape. Raises ConfigError: a list after `head`.

    unknown: what the message says of a tensor that is not wanted.
    """
    wrong = list(map("missing: {}".format, sorted(wanted.keys() - found.keys())))
    wrong += map(f"{unknown}: {{}}".format, sorted(found.keys() - wanted.keys()))
    for key in sorted(found.keys() & wanted.keys()):
        if found[key] != wanted[key]:
            wrong.append(f"{key}: shape {list(found[key])}, its configuration says {list(wanted[key])}")
    if wrong:
        raise ConfigError(listing(head, wrong))


def require_coverage(rows: Sequence[Row], names: Iterable[str], shapes: dict[str, Shape], where: str) -> None:
    """Check that every tensor of the folder, and every element of the native tensors, is in exactly one row.

    names: of the folder's tensors. shapes: of the native tensors, by key. where: the source, for the ConfigError.
    """
    used, wanted = Counter[str](), set(names)
    boxes: dict[str, list[tuple[Shape, Shape]]] = {}
    for row in rows:
        native = row["native"]
        for entry in row.get("hf", ()):
            used[entry["name"]] += 1
        boxes.setdefault(native["key"], []).append((tuple(native["start"]), tuple(native["shape"])))
    wrong = list(map("{} is unexpected".format, sorted(used.keys() - wanted)))
    for name in sorted(wanted | used.keys()):
        if used[name] != 1:
            wrong.append(f"{name} is used {used[name]} times")
    for key in sorted(boxes.keys() | shapes.keys()):
        if key not in shapes:
            wrong.append(f"{key} is not a tensor of the model")
        elif defect := uncovered(boxes.get(key, ()), shapes[key]):
            wrong.append(f"{key}: {defect}")
    if wrong:
        raise ConfigError(listing(f"{where}: not every tensor is converted exactly once:", wrong))


def uncovered(boxes: Sequence[tuple[Shape, Shape]], whole: Shape) -> str | None:
    """Return what is wrong with boxes (start, shape) that are to fill a tensor; None if each element is in one."""
    parts, filled, total = [], 0, math.prod(whole)
    for start, shape in boxes:
        parts.append(index.TensorPart(start, shape, index.StoredBytes("", 0, 0)))
        filled += math.prod(shape)
        if len(shape) != len(whole) or any(map(int.__gt__, map(int.__add__, start, shape), whole)):
            return f"{list(shape)} from {list(start)} on is not within it, which has {list(whole)}"
    if filled != total or index.overlap(parts):
        return f"{filled} of {total} elements in {len(parts)} blocks, each to be there once"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the programs that a conversion depends on."""
    found = {**source_version(), "python": platform.python_version(), "torch": torch.__version__}
    return {**found, "numpy": importlib.metadata.version("numpy")}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a certificate, whole or not at all; a line per tensor."""
    tensors = content["tensors"]
    head = json.dumps({**content, "tensors": []}, indent=1, allow_nan=False)
    rows = ",\n  ".join(map(json.JSONEncoder(allow_nan=False).encode, tensors))
    replace_text(path, head.replace('"tensors": []', f'"tensors": [\n  {rows}\n ]') + "\n")
