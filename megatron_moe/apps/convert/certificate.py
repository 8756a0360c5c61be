"""What a conversion vouches for: every tensor of both sides by name, shape, dtype and hash, and that none is left out.

A row is one block of ours and the tensors of the folder that belong to it:

    {"native": {"key", "start", "shape", "dtype", "sha256"}, "transform": "ExpertGateUp", "cast": null,
     "hf": [{"name", "shape", "dtype", "sha256"}, ...]}

Hashes are of the bytes as each side stores them. Where a side was cast, dequantised or cut on its way, it also has
`sha256_as_written`: of what the other side, transformed back, has to be equal to.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe import __version__
from megatron_moe.checkpoint import index
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import replace_text

NAME = "conversion_certificate.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BLOCK = 1 << 20
"""Elements that are looked at together."""

Row = dict[str, Any]


def non_finite(tensor: Tensor) -> int:
    """How many numbers are not finite; memory for a small part of them."""
    flat, count = tensor.reshape(-1), 0
    for block in flat.split(_BLOCK) if flat.numel() else ():
        low, high = torch.aminmax(block)  # NaN is both
        if not (math.isfinite(low) and math.isfinite(high)):
            count += block.numel() - int(torch.isfinite(block).sum())
    return count


def require_finite(tensor: Tensor, name: str, where: str) -> None:
    """Refuse numbers that are none.

    Raises:
        ConfigError: naming the tensor and how many.
    """
    if count := non_finite(tensor):
        raise ConfigError(
            f"{where}: tensor {name} holds {count} of {tensor.numel()} numbers that are not finite (NaN or Inf); a "
            "model that has them is damaged: bring the file back from its source"
        )


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another dtype; widening is exact.

    Raises:
        ConfigError: a number is too large for it.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if count := non_finite(result):
        raise ConfigError(
            f"--dtype: tensor {name} holds {count} numbers that are too large for {dtype_name(dtype)} (largest "
            f"{float(tensor.abs().max()):.4g}); --dtype bf16 or fp32 holds them"
        )
    return result


def hf_entry(name: str, shape: Shape, dtype: torch.dtype, digest: str) -> Row:
    """One tensor of a folder in a row."""
    return {"name": name, "shape": list(shape), "dtype": dtype_name(dtype), "sha256": digest}


def native_entry(key: str, start: Shape, block: Tensor) -> Row:
    """One block of ours in a row, hashed."""
    dtype, shape = dtype_name(block.dtype), list(block.shape)
    return {"key": key, "start": list(start), "shape": shape, "dtype": dtype, "sha256": sha256(block)}


def cast_name(before: str, after: str) -> str | None:
    """How a row names a change of dtype."""
    return None if before == after else f"{before} -> {after}"


def expected(entry: Row) -> str:
    """The hash that the other side, transformed back, has to have."""
    return str(entry.get("sha256_as_written", entry["sha256"]))


def require_same(found: str, wanted: str, name: str, what: str) -> None:
    """Refuse an output that is not what was meant to be written.

    Raises:
        ConfigError: naming the tensor.
    """
    if found != wanted:
        raise ConfigError(f"{name}: {what}: SHA-256 {found} instead of {wanted}; nothing was published")


def require_coverage(rows: Sequence[Row], names: Iterable[str], shapes: dict[str, Shape], where: str) -> None:
    """Every tensor of the folder stands in exactly one row, and every element of ours.

    Args:
        names: of the folder's tensors that have to be there. shapes: of ours, by key.

    Raises:
        ConfigError: listing what is not.
    """
    used = Counter(entry["name"] for row in rows for entry in row.get("hf", ()))
    wanted = set(names)
    wrong = [f"{name} is used {used[name]} times" for name in sorted(wanted | used.keys()) if used[name] != 1]
    wrong += [f"{name} is nobody's" for name in sorted(used.keys() - wanted)]
    boxes: dict[str, list[index.TensorPart]] = {}
    for row in rows:
        box = row["native"]
        part = index.TensorPart(tuple(box["start"]), tuple(box["shape"]), index.StoredBytes("", 0, 0))
        boxes.setdefault(box["key"], []).append(part)
    for key in sorted(boxes.keys() | shapes.keys()):
        parts, shape = boxes.get(key, []), shapes.get(key)
        if shape is None:
            wrong.append(f"{key} is not a tensor of the model")
            continue
        filled = sum(math.prod(part.shape) for part in parts)
        outside = any(a + n > b for part in parts for a, n, b in zip(part.start, part.shape, shape))
        if filled != math.prod(shape) or outside or index.overlap(parts):
            wrong.append(
                f"{key}: {filled} of {math.prod(shape)} elements in {len(parts)} blocks, each to be there once"
            )
    if wrong:
        raise ConfigError(listing(f"{where}: not every tensor is converted exactly once:", wrong))


def versions() -> dict[str, str]:
    """Of what took part."""
    return {
        "megatron_moe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a certificate, whole or not at all; a line per tensor."""
    tensors = content["tensors"]
    head = json.dumps({**content, "tensors": []}, indent=1, allow_nan=False)
    rows = ",\n".join(f"  {json.dumps(row, separators=(', ', ': '), allow_nan=False)}" for row in tensors)
    replace_text(path, head.replace('"tensors": []', f'"tensors": [\n{rows}\n ]') + "\n")
