"""Rounds weights to FP8 in blocks, as DeepSeek publishes models: e4m3 numbers, and a scale for each 128 x 128 block.

The rounding is that of training in FP8 (`moe/grouped_gemm_fp8.py`): the scale is the block's largest magnitude / 448.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.hf.families import DEEPSEEK, Family
from megatron_moe.hf.folder import BLOCK
from megatron_moe.hf.mapping import Piece
from megatron_moe.moe.grouped_gemm_fp8 import E4M3, Tiles


@dataclass(frozen=True)
class RoundedWeight:
    """A weight [M, N] in FP8.

    numbers: [M, N] float8_e4m3fn. scales: [ceil(M / 128), ceil(N / 128)] fp32, by which they are multiplied.
    values: numbers times scales in bfloat16, as an importer has them. error: how much the rounding changed.
    """

    numbers: Tensor
    scales: Tensor
    values: Tensor
    error: dict[str, float]


def rounded(weight: Tensor) -> RoundedWeight:
    """Round a weight [M, N] of any floating dtype to FP8, from the values that it has."""
    high, wide = BLOCK
    tiles = Tiles.of(weight, high, wide, E4M3)
    exact, original = tiles.exact(), weight.float()
    difference = (exact - original).abs()
    largest = float(original.abs().max())
    size = float(original.norm())
    error = {
        "largest": float(difference.max()),
        "largest_number": largest,
        "relative_rms": float(difference.norm()) / size if size else 0.0,
    }
    rows, columns = weight.shape
    numbers = tiles.numbers[:rows, :columns].contiguous()
    return RoundedWeight(numbers, tiles.scales.contiguous(), exact.to(torch.bfloat16), error)


def summary(errors: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return how many weights were rounded, and the worst of their errors."""
    found = list(errors)
    worst = {name: max((error[name] for error in found), default=0.0) for name in ("largest", "relative_rms")}
    return {"weights": len(found), **worst, "block": list(BLOCK), "dtype": "float8_e4m3fn"}


def uneven_blocks(pieces: Iterable[Piece]) -> list[str]:
    """Return a note where weights end within a block; the format has scales for the rest of one, as our importer.

    transformers 5.23 divides a weight evenly among its scales instead: 192 rows of two scales become blocks of 96.
    """
    sizes = [(name, shape) for p in pieces if p.is_linear for name, shape in zip(p.hf, p.transform.hf_shapes)]
    uneven = [
        name
        for name, shape in sizes
        if any(size > edge and size % edge for size, edge in zip(shape, BLOCK, strict=True))
    ]
    if not uneven:
        return []
    return [
        f"{len(uneven)} weights in fp8, such as {uneven[0]}, end within a block of {BLOCK[0]} x {BLOCK[1]}: "
        "transformers up to 5.23 dequantises these to wrong numbers or refuses them; for it, export in bf16"
    ]


def quantization_config(family: Family, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return `quantization_config` of config.json.

    The code of DeepSeek's models knows which matrices stay as they are; for others
    they are named.
    """
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    if family.names is not DEEPSEEK:
        matrices = [piece for piece in pieces if not piece.is_linear and len(piece.transform.hf_shapes[0]) == 2]
        names = [name.removesuffix(".weight") for piece in matrices for name in piece.hf]
        config["modules_to_not_convert"] = [name for name in names if name != "model.embed_tokens"]
    return config
