"""The grouped products of the experts in FP8 with a scale per tile, as DeepSeek-V3 trains (arXiv 2412.19437), emulated.

An operand is cut into tiles. A tile has the scale max |x| / L in fp32, with L = 448 for e4m3 and 57344 for e5m2, and
each of its numbers becomes the nearest FP8 number times that scale. The three products of y = x W^T read, for rows x
[R, in] and a matrix W [out, in] per expert:

    y = x W^T        x in tiles of 1 x 128 (a row, 128 features), W in blocks of 128 x 128
    dx = dy W        dy in tiles of 1 x 128, the same blocks of W
    dW = dy^T x      dy and x in tiles of 128 x 1 (128 rows of one expert, a feature)

so that scales are constant along each 128 terms of a sum. Tiles end at the edges of a matrix and of an expert's rows:
the last one is smaller where a size is no multiple of 128, gate and up projection are two matrices, and no tile has
rows of two experts. DeepSeek keeps x in tiles of 1 x 128 for the backward pass and quantises those numbers again for
dW; here x is kept in the model's dtype, and rounded to FP8 once for each product.

This is an emulation: operands are rounded to FP8 and multiplied by their scales, which rounds to fp32, and these
numbers are multiplied and added in fp32; the result is rounded once to the model's dtype. An FP8 kernel multiplies the
FP8 numbers, adds 128 products, and multiplies their sum by the scales. The two differ as two orders of addition in fp32
do, as long as that kernel adds in fp32: Hopper's tensor cores add with fewer bits between the promotions of DeepSeek's
kernels. It takes more time and memory than the product in bf16.

What is not finite stays so: a NaN or an infinity makes its whole tile NaN, and the step is not applied. A tile of zeros
becomes zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.moe.grouped_gemm import added_to_main_grad
from megatron_moe.platform.isolation import unaffected_by_autocast
from megatron_moe.precision.main_grad import no_gradient

TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# A smaller one would lose bits or be zero, and its numbers leave FP8's range.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def rounded_to_fp8(values: Tensor, high: int, wide: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return what is left of numbers in FP8: each as the nearest FP8 number times its tile's scale.

    Args:
        values: [..., M, N] in any floating dtype; its last two dimensions are cut into tiles.
        high, wide: the size of a tile; the last ones of a dimension may be smaller.
        dtype: `E4M3` or `E5M2`.

    Returns:
        [..., M, N] in fp32.
    """
    rows, columns = values.shape[-2:]
    exact = values.float()
    if rows % high or columns % wide:
        exact = F.pad(exact, (0, -columns % wide, 0, -rows % high))  # zeros change no maximum
    tiles = exact.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))
    largest = tiles.abs().amax(dim=(-3, -1), keepdim=True)
    scales = (largest / _LARGEST[dtype]).clamp_(min=_SMALLEST_SCALE)
    # A quotient exceeds FP8's largest number by fp32's rounding at most, and is rounded back to it.
    steps = (tiles / scales).to(dtype)
    found = steps.float().mul_(scales).flatten(-2).flatten(-3, -2)
    return found[..., :rows, :columns]


@dataclass(frozen=True)
class TokenTiles:
    """The places of rows, grouped by expert, in tiles of 128 rows that each have rows of one expert.

    Attributes:
        slots: [R] int64, the place of each row among those of all tiles.
        places: the rows of all tiles, an upper bound that follows from shapes alone.
    """

    slots: Tensor
    places: int

    @classmethod
    def of(cls, offsets: Tensor, num_rows: int) -> TokenTiles:
        """Return the tiles of `num_rows` rows; offsets [e] are the end of each expert's."""
        ends = offsets.long()
        counts = ends.diff(prepend=ends.new_zeros(1))
        tiles = (counts + TILE - 1) // TILE
        shift = (tiles.cumsum(0) - tiles) * TILE - (ends - counts)
        row = torch.arange(num_rows, device=ends.device)
        expert = torch.searchsorted(ends, row, right=True)
        return cls(row + shift.index_select(0, expert), (num_rows // TILE + offsets.shape[0]) * TILE)

    def rounded(self, rows: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        """Return rows [R, N] in FP8 tiles of 128 x 1, as fp32."""
        placed = rows.new_zeros((self.places, rows.shape[1]), dtype=torch.float32)
        placed.index_copy_(0, self.slots, rows.float())
        return rounded_to_fp8(placed, TILE, 1, dtype).index_select(0, self.slots)


class _GroupedFp8(torch.autograd.Function):
    """The three products; what is kept for the backward pass are the operands in their own dtypes."""

    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offsets: Tensor, how: Fp8Product) -> Tensor:
        ctx.save_for_backward(rows, weights, offsets)
        ctx.how = how
        if rows.shape[0] == 0:  # no token chose an expert of this rank; the kernel refuses empty operands
            return rows.new_zeros((0, weights.flatten(1, -2).shape[1]))
        matrices = how.rounded(weights)
        products = F.grouped_mm(rounded_to_fp8(rows, 1, TILE), matrices.transpose(-2, -1), offs=offsets)
        return products.to(rows.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @unaffected_by_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, offsets = ctx.saved_tensors
        how = ctx.how
        if rows.shape[0] == 0:
            return torch.zeros_like(rows), torch.zeros_like(weights), None, None
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            by_matrix = grad.unflatten(1, (how.matrices, -1))
            tiles = rounded_to_fp8(by_matrix, 1, TILE, how.gradients).flatten(1)
            grad_rows = F.grouped_mm(tiles, how.rounded(weights), offs=offsets).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            token_tiles = TokenTiles.of(offsets, rows.shape[0])
            left, right = token_tiles.rounded(grad, how.gradients), token_tiles.rounded(rows)
            if added_to_main_grad(weights, left, right, offsets, how.fused):
                grad_weights = no_gradient(weights)
            else:
                products = F.grouped_mm(left.t(), right, offs=offsets)
                grad_weights = products.view(weights.shape).to(weights.dtype)
        return grad_rows, grad_weights, None, None


@dataclass(frozen=True)
class Fp8Product:
    """The grouped product in FP8 as a kernel, a `GroupedLinear`.

    Attributes:
        gradients: the FP8 dtype of the output's gradients; rows and weights are in e4m3.
        matrices: how many matrices of equal size an expert's weights are made of.
        fused: see `TorchProduct`.
    """

    gradients: torch.dtype
    matrices: int = 1
    fused: bool | None = False

    def __call__(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return the products in the dtype of the rows; the arguments are those of `GroupedLinear`."""
        return _GroupedFp8.apply(rows, weights, offsets, self)

    def rounded(self, weights: Tensor) -> Tensor:
        """Return weights [e, ..., in] in FP8 blocks that have numbers of one matrix, as [e, out, in] fp32."""
        matrices = weights.flatten(1, -2).unflatten(1, (self.matrices, -1))
        return rounded_to_fp8(matrices, TILE, TILE).flatten(1, 2)


_GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}


def fp8_products(fp8_format: str, fused: bool | None = False) -> tuple[Fp8Product, Fp8Product]:
    """Return the kernels of an expert's first product, of gate and up projection, and of its second one.

    Args:
        fp8_format: a value of `--fp8-format`.
        fused: see `TorchProduct`.
    """
    gradients = _GRADIENTS[fp8_format]
    return Fp8Product(gradients, matrices=2, fused=fused), Fp8Product(gradients, fused=fused)
