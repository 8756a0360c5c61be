"""Matrix products in FP8 with a scale per tile, as DeepSeek-V3 trains (arXiv 2412.19437): emulated, or on Hopper.

An operand is cut into tiles. A tile has the scale max |x| / L in fp32, with L = 448 for e4m3 and 57344 for e5m2, and
each of its numbers becomes the nearest FP8 number times that scale. The three products of y = x W^T read, for rows x
[R, in] and a matrix W [out, in] per expert (a linear layer is one expert, of all rows):

    y = x W^T        x in tiles of 1 x 128 (a row, 128 features), W in blocks of 128 x 128
    dx = dy W        dy in tiles of 1 x 128, the same blocks of W
    dW = dy^T x      dy and x in tiles of 128 x 1 (128 rows of one expert, a feature)

so that scales are constant along each 128 terms of a sum. Tiles end at the edges of a matrix and of an expert's rows:
the last one is smaller where a size is no multiple of 128, gate and up projection are two matrices, and no tile has
rows of two experts. DeepSeek keeps x in tiles of 1 x 128 for the backward pass and quantises those numbers again for
dW; here x is kept in the model's dtype, and rounded to FP8 once for each product.

Three forms compute. The emulation, on any device, rounds operands to FP8 and multiplies them by their scales, which
rounds to fp32; these numbers are multiplied and added in fp32, and the result is rounded once to the model's dtype. It
takes more time and memory than the product in bf16. The other two multiply the FP8 numbers, add 128 products, and
multiply their sum by the scales: our Triton kernels (`kernels/triton_fp8.py`, on Hopper and Blackwell), and torch's
scaled product (`torch.nn.functional.scaled_mm`, cuBLAS with these very tiles, on Hopper alone), which has no groups
with such tiles: an expert's rows are a product of their own. Numbers and scales in FP8 are the same bits in all forms.
By Triton, experts cut rows where they copy them, and the activation where they compute it (`_ExpertsByTriton`).
Products differ as two orders of addition in fp32 do, as long as the tensor cores add in fp32: Hopper's add the 128
products with fewer bits.

What is not finite stays so: a NaN or an infinity makes its whole tile NaN, and the step is not applied. A tile of zeros
becomes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.kernels.choice import has_kernel, takes_kernels, why_no_triton
from megatron_moe.moe.grouped_gemm import TransformerEngineProduct, main_grad_of, no_gradient
from megatron_moe.moe.rows import Unpacked, WeightedCopies, add_up_rows
from megatron_moe.platform import env_vars, hardware
from megatron_moe.platform.numerics import unaffected_by_autocast
from megatron_moe.platform.protocols import AutogradContext

TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# A smaller one would lose bits or be zero, and its numbers leave FP8's range.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@has_kernel("cut_into_tiles")
def cut_into_tiles(values: Tensor, high: int, wide: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers and scales of `Tiles.of`, whose arguments these are."""
    exact = values.float()
    if values.shape[-2] % high or values.shape[-1] % wide:
        exact = F.pad(exact, (0, -values.shape[-1] % wide, 0, -values.shape[-2] % high))  # zeros change no maximum
    tiles = exact.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))
    largest = tiles.abs().amax(dim=(-3, -1), keepdim=True)
    # By a tensor: CUDA multiplies by the inverse of a number, which may be another scale.
    scales = (largest / largest.new_full((), _LARGEST[dtype])).clamp_(min=_SMALLEST_SCALE)
    # A quotient exceeds FP8's largest number by fp32's rounding at most, and is rounded back to it.
    numbers = (tiles / scales).to(dtype).flatten(-2).flatten(-3, -2)
    return numbers, scales.squeeze(-1).squeeze(-2)


@dataclass(frozen=True)
class Tiles:
    """Matrices in FP8, with zeros up to whole tiles.

    Attributes:
        numbers: [..., M', N'] in FP8; M' and N' are M and N rounded up to whole tiles.
        scales: [..., M' / high, N' / wide] fp32.
        shape: (M, N), without the zeros.
    """

    numbers: Tensor
    scales: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, values: Tensor, high: int, wide: int, dtype: torch.dtype = E4M3) -> Tiles:
        """Return what is left of numbers in FP8: each as the nearest FP8 number times its tile's scale.

        Args:
            values: [..., M, N] in any floating dtype; its last two dimensions are cut into tiles.
            high, wide: the size of a tile; the last ones of a dimension may be smaller.
            dtype: `E4M3` or `E5M2`.
        """
        rows, columns = values.shape[-2:]
        return cls(*cut_into_tiles(values, high, wide, dtype), (rows, columns))

    def exact(self) -> Tensor:
        """Return the numbers times their scales, [..., M, N] in fp32."""
        down, across = self.scales.shape[-2:]
        tiles = self.numbers.float().unflatten(-1, (across, -1)).unflatten(-3, (down, -1))
        values = tiles.mul_(self.scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
        return values[..., : self.shape[0], : self.shape[1]]


def rounded_to_fp8(values: Tensor, high: int, wide: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return what is left of numbers [..., M, N] in FP8, in fp32; the arguments are those of `Tiles.of`."""
    return Tiles.of(values, high, wide, dtype).exact()


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

    def placed(self, rows: Tensor) -> Tensor:
        """Return rows [R, N] at their places, [places, N], with zeros elsewhere."""
        return rows.new_zeros((self.places, rows.shape[1])).index_copy_(0, self.slots, rows)

    def taken(self, placed: Tensor) -> Tensor:
        """Return the rows [R, N] of what is at their places."""
        return placed.index_select(0, self.slots)

    def rounded(self, rows: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        """Return rows [R, N] in FP8 tiles of 128 x 1, as fp32."""
        return self.taken(rounded_to_fp8(self.placed(rows), TILE, 1, dtype))


class _Emulated:
    """The three products by the emulation. Rows are [R, in], matrices [e, P, out, in], gradients [R, P x out].

    Args:
        offsets: see `GroupedLinear`. num_rows: R.
        weights: what the matrices are views of.
    """

    def __init__(self, offsets: Tensor, num_rows: int, weights: Tensor) -> None:
        self.offsets, self.num_rows = offsets, num_rows

    def results(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return y, [R, P x out]."""
        blocks = rounded_to_fp8(matrices, TILE, TILE).flatten(1, 2)
        return self._product(rounded_to_fp8(rows, 1, TILE), blocks.transpose(-2, -1)).to(rows.dtype)

    def grad_rows(self, grad: Tensor, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dx, [R, in]."""
        tiles = rounded_to_fp8(grad.unflatten(1, matrices.shape[1:3]), 1, TILE, dtype).flatten(1)
        return self._product(tiles, rounded_to_fp8(matrices, TILE, TILE).flatten(1, 2)).to(grad.dtype)

    def grad_matrices(
        self, grad: Tensor, rows: Tensor, shape: torch.Size, dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        """Return dW, [e, P, out, in]; or add it to `total`, [e, P x out, in] fp32, and return that."""
        tiles = TokenTiles.of(self.offsets, self.num_rows)
        left, right = tiles.rounded(grad, dtype).t(), tiles.rounded(rows)
        one = self.offsets.shape[0] == 1
        products = left @ right if one else F.grouped_mm(left, right, offs=self.offsets)
        if total is not None:
            return total.add_(products.view(total.shape))
        return products.view(shape).to(rows.dtype)

    def _product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return each expert's rows times its matrix; torch's product of groups takes whole 16 bytes, `mm` any."""
        return rows @ matrices[0] if len(matrices) == 1 else F.grouped_mm(rows, matrices, offs=self.offsets)


_kept: dict[tuple[int, bool], tuple[Tensor, tuple[Tensor, Tensor]]] | None = None
"""Weights and their blocks, by the weight's id and whether they are turned; None: blocks are not kept."""


@contextmanager
def blocks_kept(kept: bool) -> Iterator[None]:
    """Let Triton's kernels cut a weight into blocks once within the block, which changes none, if `kept`.

    The micro-batches of a step share them: they take 2 bytes for each number of a weight, forward and backward, where
    cutting them each time takes as long as a quarter of the product.
    """
    global _kept
    _kept = {} if kept else None
    try:
        yield
    finally:
        _kept = None


class _ByTriton:
    """The three products by our kernels, which read the offsets on the device. Arguments are those of `_Emulated`."""

    def __init__(self, offsets: Tensor, num_rows: int, weights: Tensor) -> None:
        from megatron_moe.kernels import triton_activation, triton_fp8  # where there is Triton

        self.offsets, self.weights, self.kernels, self.activation = offsets, weights, triton_fp8, triton_activation
        self._columns: tuple[Tensor, Any] | None = None

    def results(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """See `_Emulated.results`."""
        return self.results_of(self.kernels.cut_rows(rows.unsqueeze(1), E4M3), matrices, rows.dtype)

    def results_of(self, cut: Any, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return y of rows that are cut, in a dtype."""
        return self.kernels.multiply(cut, self._blocks(matrices), self.offsets, tuple(matrices.shape[1:3]), dtype)

    def grad_rows(self, grad: Tensor, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """See `_Emulated.grad_rows`."""
        rows = grad.unflatten(1, matrices.shape[1:3])
        if self.weights.requires_grad:  # `grad_matrices` follows
            columns, cut = self.kernels.cut_columns(rows, self.offsets, dtype, with_rows=True)
            self._columns = grad, columns
        else:
            cut = self.kernels.cut_rows(rows, dtype)
        return self.grad_rows_of(cut, matrices, grad.dtype)

    def grad_rows_of(self, cut: Any, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dx of gradients that are cut, in a dtype."""
        blocks = self._blocks(matrices, turned=True)
        return self.kernels.multiply(cut, blocks, self.offsets, (1, matrices.shape[3]), dtype)

    def grad_matrices(
        self, grad: Tensor, rows: Tensor, shape: torch.Size, dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        """See `_Emulated.grad_matrices`."""
        if self._columns is not None and self._columns[0] is grad:
            left = self._columns[1]
        else:
            (left,) = self.kernels.cut_columns(grad.unsqueeze(1), self.offsets, dtype)
        (right,) = self.kernels.cut_columns(rows.unsqueeze(1), self.offsets, E4M3)
        return self.grad_matrices_of(left, right, shape, rows.dtype, total)

    def grad_matrices_of(
        self, left: Any, right: Any, shape: torch.Size, dtype: torch.dtype, total: Tensor | None
    ) -> Tensor:
        """Return dW of gradients and rows whose columns are cut, in a dtype; or add it to `total`."""
        experts = self.offsets.shape[0], -1, shape[-1]
        found = total if total is not None else self.weights.new_empty(shape, dtype=dtype).view(experts)
        self.kernels.multiply_columns(left, right, self.offsets, found, total is not None)
        return found.view(shape)

    def grad_weights(self, product: Fp8Product, left: Any, right: Any, weights: Tensor) -> Tensor:
        """Return what is handed on as the gradient of the weights, which it may be added for to their sum."""
        total = product.sum_of(self.weights)
        found = self.grad_matrices_of(left, right, weights.shape, weights.dtype, total)
        return found if total is None else no_gradient(weights)

    def _blocks(self, matrices: Tensor, turned: bool = False) -> tuple[Tensor, Tensor]:
        # A graph cuts what its weights will be when it runs.
        if _kept is None or hardware.is_captured(matrices) or not isinstance(self.weights, torch.nn.Parameter):
            return self.kernels.cut_matrices(matrices, turned)
        key = id(self.weights), turned
        if key not in _kept:
            _kept[key] = self.weights, self.kernels.cut_matrices(matrices, turned)
        return _kept[key][1]


class PaddedGroups:
    """Rows, grouped by expert, at places of their own: each expert's start at a whole tile, with zeros up to the next.

    Args:
        offsets: [e] on the host, the end of each expert's rows.

    Attributes:
        spans: the first place of each expert, and the first after it.
    """

    def __init__(self, offsets: Tensor) -> None:
        ends = [0, *offsets.tolist()]
        starts = [0]
        for start, end in pairwise(ends):
            starts.append(starts[-1] + end - start + (start - end) % TILE)
        self.spans: Sequence[tuple[int, int]] = list(pairwise(starts))
        self._offsets, self._num_rows = offsets, ends[-1]
        self._tiles: TokenTiles | None = None

    def placed(self, rows: Tensor) -> Tensor:
        """Return rows [R, N] at their places, [places, N], with zeros between."""
        places = self.spans[-1][1]
        if len(self.spans) == 1:
            return F.pad(rows, (0, 0, 0, places - self._num_rows))
        return self._tiles_on(rows).placed(rows)[:places]

    def taken(self, placed: Tensor) -> Tensor:
        """Return the rows [R, N] from their places."""
        return placed[: self._num_rows] if len(self.spans) == 1 else self._tiles_on(placed).taken(placed)

    def _tiles_on(self, rows: Tensor) -> TokenTiles:
        if self._tiles is None:
            self._tiles = TokenTiles.of(self._offsets.to(rows.device), self._num_rows)
        return self._tiles


class _Scaled:
    """The three products by torch's scaled product, one for each expert with rows.

    Arguments are those of `_Emulated`; the offsets are on the host.
    """

    def __init__(self, offsets: Tensor, num_rows: int, weights: Tensor) -> None:
        self.groups = PaddedGroups(offsets)

    def results(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """See `_Emulated.results`."""
        left, right = Tiles.of(self.groups.placed(rows), 1, TILE), Tiles.of(matrices, TILE, TILE)
        numbers, scales = right.numbers.flatten(1, 2), right.scales.flatten(1, 2)
        found = self._by_expert(left, numbers, scales, rows.dtype)
        found = found.unflatten(1, (matrices.shape[1], -1))[..., : matrices.shape[2]].flatten(1)
        return self.groups.taken(found)

    def grad_rows(self, grad: Tensor, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """See `_Emulated.grad_rows`."""
        tiles = Tiles.of(self.groups.placed(grad).unflatten(1, matrices.shape[1:3]).transpose(0, 1), 1, TILE, dtype)
        # [P, places, out'] -> [places, P x out']: sums run over all matrices of an expert
        numbers, scales = (one.transpose(0, 1).flatten(1) for one in (tiles.numbers, tiles.scales))
        blocks = Tiles.of(matrices, TILE, TILE)
        # cuBLAS reads both operands along the terms of a sum
        turned, turned_scales = (one.flatten(1, 2).mT.contiguous() for one in (blocks.numbers, blocks.scales))
        left = Tiles(numbers, scales, (numbers.shape[0], numbers.shape[1]))
        return self.groups.taken(self._by_expert(left, turned, turned_scales, grad.dtype)[:, : matrices.shape[3]])

    def grad_matrices(
        self, grad: Tensor, rows: Tensor, shape: torch.Size, dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        """See `_Emulated.grad_matrices`; it adds to no `total`, see `fp8_products`."""
        assert total is None
        left = Tiles.of(_wide_enough(self.groups.placed(grad)).t(), 1, TILE, dtype)
        right = Tiles.of(_wide_enough(self.groups.placed(rows)).t(), 1, TILE)
        found = rows.new_zeros((len(self.groups.spans), left.shape[0], right.shape[0]))
        for expert, (start, end) in enumerate(self.groups.spans):
            if start == end:
                continue
            places, tiles = slice(start, end), slice(start // TILE, end // TILE)
            found[expert] = scaled_product(
                left.numbers[:, places], left.scales[:, tiles], right.numbers[:, places], right.scales[:, tiles],
                1, rows.dtype,
            )  # fmt: skip
        return found[:, : grad.shape[1], : rows.shape[1]].reshape(shape)

    def _by_expert(self, left: Tiles, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return left [places, K] times the transpose of each expert's numbers [e, N, K], in blocks."""
        found = left.numbers.new_zeros((left.numbers.shape[0], numbers.shape[1]), dtype=dtype)
        for expert, (start, end) in enumerate(self.groups.spans):
            if start < end:
                rows = slice(start, end)
                found[rows] = scaled_product(
                    left.numbers[rows], left.scales[rows], numbers[expert], scales[expert], TILE, dtype
                )
        return found


def _wide_enough(rows: Tensor) -> Tensor:
    """Return rows [R, N] with N a multiple of 16, which cuBLAS asks of each dimension."""
    return F.pad(rows, (0, -rows.shape[1] % 16))


def scaled_product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, high: int, dtype: torch.dtype
) -> Tensor:
    """Return left right^T by torch's scaled product, which adds in fp32 and rounds once.

    Args:
        left: [M, K] in FP8, in tiles of 1 x 128, with M a multiple of 16 and K of 128; left_scales: [M, K / 128] fp32.
        right: [N, K] in FP8, in tiles of `high` x 128, with N a multiple of 16; right_scales: [N / high, K / 128] fp32.
        high: 1 or 128.
        dtype: bf16, of the result [M, N].
    """
    if E5M2 in (left.dtype, right.dtype):
        # Torch's function refuses e5m2 with these tiles; the operation beneath takes it, by the shapes of the scales.
        by_row = right_scales.repeat_interleave(high, dim=0)
        operands = left.contiguous(), right.contiguous().t()
        return torch._scaled_mm(*operands, _in_columns(left_scales), by_row.t().contiguous(), out_dtype=dtype)
    one_row, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    scales = _in_columns(right_scales)
    if high == TILE:  # a block's scales lie along the sum, which is rounded up to four of them
        scales = F.pad(right_scales, (0, -right_scales.shape[1] % 4)).t()
    return F.scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        _in_columns(left_scales),
        one_row,
        scales,
        block if high == TILE else one_row,
        output_dtype=dtype,
    )


def _in_columns(scales: Tensor) -> Tensor:
    """Return scales [M, K / 128] with strides (1, M), which cuBLAS reads."""
    return scales.t().contiguous().t()


class _GroupedFp8(torch.autograd.Function):
    """The three products; what is kept for the backward pass are the operands in their own dtypes."""

    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: AutogradContext, rows: Tensor, weights: Tensor, offsets: Tensor, product: Fp8Product) -> Tensor:
        ctx.save_for_backward(rows, weights, offsets)
        ctx.product, ctx.parameter = product, weights
        matrices = product.matrices_of(weights)
        if rows.shape[0] == 0:  # no token chose an expert of this rank; the kernels refuse empty operands
            return rows.new_zeros((0, matrices.shape[1] * matrices.shape[2]))
        return _FORMS[product.form](offsets, rows.shape[0], weights).results(rows, matrices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, offsets = ctx.saved_tensors
        if rows.shape[0] == 0:
            return torch.zeros_like(rows), torch.zeros_like(weights), None, None
        product: Fp8Product = ctx.product
        products = _FORMS[product.form](offsets, rows.shape[0], ctx.parameter)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = products.grad_rows(grad, product.matrices_of(weights), product.gradients)
        if ctx.needs_input_grad[1]:
            total = product.sum_of(ctx.parameter)
            grad_weights = products.grad_matrices(grad, rows, weights.shape, product.gradients, total)
            if total is not None:
                grad_weights = no_gradient(weights)
        return grad_rows, grad_weights, None, None


_WITH_KERNELS = (9, 10)  # Hopper, and Blackwell with tensor memory
_Form = _Emulated | _ByTriton | _Scaled
_FORMS: dict[str, type[_Form]] = {"emulated": _Emulated, "triton": _ByTriton, "scaled": _Scaled}
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}
"""--fp8-format -> the dtype of the outputs' gradients; rows and weights are in e4m3."""


@dataclass(frozen=True)
class Fp8Product:
    """The grouped product in FP8 as a kernel, a `GroupedLinear`.

    Attributes:
        gradients: the FP8 dtype of the output's gradients; rows and weights are in e4m3.
        matrices: how many matrices of equal size an expert's [out, in] is made of.
        form: "emulated", "triton", or "scaled", by torch's scaled product, which takes the offsets on the host.
        fused: whether the weights' gradients are added to their fp32 sums unrounded; not by the scaled product.
    """

    gradients: torch.dtype
    matrices: int = 1
    form: str = "emulated"
    fused: bool = False

    def __call__(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Return the products in the dtype of the rows; the arguments are those of `GroupedLinear`."""
        return _GroupedFp8.apply(rows, weights, offsets, self)

    def matrices_of(self, weights: Tensor) -> Tensor:
        """Return stacked weights [e, ..., in], or a layer's [out, in], as the matrices of experts, [e, P, out, in]."""
        stack = weights.unsqueeze(0) if weights.dim() == 2 else weights.flatten(1, -2)
        return stack.unflatten(1, (self.matrices, -1))

    def sum_of(self, parameter: Tensor) -> Tensor | None:
        """Return the fp32 sum of a weight's gradients that they are added to, [e, P x out, in], or None."""
        total = main_grad_of(parameter) if self.fused else None
        return None if total is None else self.matrices_of(total).flatten(1, 2)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x weight^T of a linear layer, [..., in] and [out, in] -> [..., out], as one expert with all rows."""
        rows = x.flatten(0, -2)
        device = "cpu" if self.form == "scaled" else x.device
        offsets = torch.full((1,), rows.shape[0], dtype=torch.int32, device=device)
        return self(rows, weight, offsets).unflatten(0, x.shape[:-1])


class _Given:
    """What experts are given: rows in their order, or rows and a step that copies them, see `ExpertInput`."""

    def __init__(self, rows: Tensor, probs: Tensor, copies: WeightedCopies | Unpacked | None) -> None:
        self.copies, self.rows, self.probs, self.num_rows = copies, rows, probs, rows.shape[0]
        self.source: Tensor | None = None
        if copies is not None:
            self.rows, self.probs, _, self.source, self.slots = copies.operands(rows, probs)
            self.num_rows = self.source.shape[0]

    def cut(self, kernels: Any) -> tuple[Any, Tensor]:
        """Return tiles of the experts' rows, and the weight of each."""
        if self.copies is None:
            return kernels.cut_rows(self.rows.unsqueeze(1), E4M3), self.probs
        return kernels.cut_copies(self.rows, self.probs, self.slots, self.num_rows)

    def results(self, results: Tensor) -> Tensor:
        """Return the results, those of each row's copies added up."""
        if self.copies is None:
            return results
        return add_up_rows(results, None, self.slots, self.copies.partial, results.shape[1])[0]

    def grads(self, grad_rows: Tensor, grad_probs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of what was given: one that is packed has both."""
        return (grad_rows, grad_probs) if self.copies is None else self.copies.backward(grad_rows, grad_probs)


class _ExpertsByTriton(torch.autograd.Function):
    """Experts whose rows, activation and gradients are cut where they are made, not written in the model's dtype first.

    What rows are copied from is kept, and the first product's results. The activation's result is computed again.
    """

    @staticmethod
    @unaffected_by_autocast
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        probs: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        offsets: Tensor,
        copies: WeightedCopies | Unpacked | None,
        products: tuple[Fp8Product, Fp8Product],
        activate_into: Callable[..., Tensor],
    ) -> Tensor:
        gate_up, down = products
        given = _Given(rows, probs, copies)
        ctx.copies, ctx.products, ctx.parameters = copies, products, (weight1, weight2)
        if given.num_rows == 0:  # no token chose an expert of this rank
            ctx.save_for_backward(rows, probs, weight1, weight2, offsets, None, None)
            return torch.zeros_like(given.rows)
        first, second = (_ByTriton(offsets, given.num_rows, parameter) for parameter in ctx.parameters)
        cut, row_probs = given.cut(first.kernels)
        kept = first.results_of(cut, gate_up.matrices_of(weight1), rows.dtype)
        ctx.save_for_backward(rows, probs, weight1, weight2, offsets, kept, row_probs)
        of_activated = partial(second.results_of, matrices=down.matrices_of(weight2), dtype=rows.dtype)
        return given.results(activate_into(second.activation.cut_activated, of_activated, kept, row_probs))

    @staticmethod
    @torch.autograd.function.once_differentiable
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, weight1, weight2, offsets, kept, row_probs = ctx.saved_tensors
        if kept is None:
            return *map(torch.zeros_like, (rows, probs, weight1, weight2)), None, None, None, None
        (gate_up, down), given = ctx.products, _Given(rows, probs, ctx.copies)
        first, second = (_ByTriton(offsets, given.num_rows, parameter) for parameter in ctx.parameters)
        kernels, source = first.kernels, given.source
        columns, cut = kernels.cut_columns(grad.unsqueeze(1), offsets, down.gradients, True, source)
        slope = second.grad_rows_of(cut, down.matrices_of(weight2), grad.dtype)
        made = first.activation.cut_activation(slope, kept, row_probs, offsets, gate_up.gradients)
        (left, cut), right, grad_probs = made
        grad_weight2 = second.grad_weights(down, columns, right, weight2)
        (right,) = kernels.cut_columns(given.rows.unsqueeze(1), offsets, E4M3, False, source)
        grad_weight1 = first.grad_weights(gate_up, left, right, weight1)
        grad_rows = first.grad_rows_of(cut, gate_up.matrices_of(weight1), grad.dtype)
        of_rows, *of_probs = given.grads(grad_rows, grad_probs)
        return of_rows, of_probs[0] if of_probs else None, grad_weight1, grad_weight2, None, None, None, None


experts_by_triton: Callable[..., Tensor] = _ExpertsByTriton.apply


def fp8_form() -> str:
    """Return how products in FP8 are computed on this machine: "triton" or "scaled" on GPUs that can, else "emulated".

    MEGATRON_MOE_FP8 chooses one of them (`platform/env_vars.py`). On another GPU it has to ask for the emulation.

    Raises:
        ConfigError: the variable asks for a form that is not here; or the device is a GPU that has none, and it does
            not ask for the emulation.
    """
    way = env_vars.chosen[env_vars.FP8]
    reasons = {"triton": why_not_by_triton(), "scaled": platform.why_no_fp8_products()}
    if reasons.get(way) is not None:
        raise ConfigError(f"{env_vars.FP8}={way}: {reasons[way]}; leave it unset, or set it to emulated")
    if way != "auto":
        return way
    for form, why in reasons.items():
        if why is None:
            return form
    if platform.has_streams():
        raise ConfigError(
            f"--fp8-format: {reasons['triton']}; drop the flag, or set {env_vars.FP8}=emulated, which shows what FP8 "
            "does to the loss and is slower than bf16"
        )
    return "emulated"


def why_not_by_triton() -> str | None:
    """Return why Triton's kernels do not multiply in FP8 here; None where they do."""
    if not platform.has_streams():
        return "there is no CUDA device"
    here = torch.empty(0, device=platform.device())
    capability = hardware.capability(here)
    if capability is not None and capability[0] not in _WITH_KERNELS:
        return "the device's compute capability is {}.{}, and the kernels of FP8 are for 9.x and 10.x".format(
            *capability
        )
    if takes_kernels(here):
        return None
    return why_no_triton() or f"{env_vars.KERNELS}={env_vars.chosen[env_vars.KERNELS]}: torch's operations compute"


def fp8_products(fp8_format: str, form: str | None = None, fused: bool = False) -> tuple[Fp8Product, Fp8Product]:
    """Return the kernels of an expert's first product, of gate and up projection, and of its second one.

    Args:
        fp8_format: a value of `--fp8-format`.
        form: see `Fp8Product`; None: `fp8_form`.
        fused: see `Fp8Product`.

    Raises:
        ConfigError: the scaled product is to add to sums.
    """
    form = form or fp8_form()
    if fused and form == "scaled":
        raise ConfigError(
            f"--gradient-accumulation-fusion, --fp8-format {fp8_format}: torch's scaled product rounds what it adds; "
            f"drop the flag, or leave {env_vars.FP8} unset where there is Triton"
        )
    gradients = GRADIENTS[fp8_format]
    return Fp8Product(gradients, 2, form, fused), Fp8Product(gradients, 1, form, fused)


class TransformerEngineFp8(TransformerEngineProduct):
    """Transformer Engine's grouped product in FP8 as a kernel, a `GroupedLinear`, with the tiles of this file.

    Each expert's rows are padded with zeros to whole tiles, and the padding's results dropped. Widths are multiples of
    128, so that Transformer Engine, which knows one matrix per expert, cuts gate and up projection as two.

    Args:
        fp8_format: a value of `--fp8-format`.

    Raises:
        ConfigError: the device has no such products.
    """

    def __init__(self, fp8_format: str) -> None:
        super().__init__()
        self.fp8_format = fp8_format
        require_fp8_of_transformer_engine("--moe-expert-backend te")

    def __call__(self, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """See `TransformerEngineProduct.__call__`."""
        groups = PaddedGroups(offsets)
        splits = [end - start for start, end in groups.spans]
        with transformer_engine_in_fp8(self.fp8_format):
            return groups.taken(self.product(groups.placed(rows), weights, splits))


def require_fp8_of_transformer_engine(flag: str) -> None:
    """Refuse a flag whose modules would multiply in FP8 by Transformer Engine on a device that cannot.

    Raises:
        ConfigError: with the reason.
    """
    why = platform.why_no_fp8_products()
    if why is not None:
        raise ConfigError(f"--fp8-format, {flag}: {why}; drop {flag}, to emulate FP8, or --fp8-format")


def transformer_engine_in_fp8(fp8_format: str) -> AbstractContextManager[None]:
    """Return a context in which Transformer Engine's modules multiply in FP8 with this file's tiles.

    Its own scales are powers of two; these are not, as DeepSeek's.
    """
    from transformer_engine.common.recipe import Float8BlockScaling, Format, QParams
    from transformer_engine.pytorch.quantization import autocast

    recipe = Float8BlockScaling(fp8_format=Format.E4M3 if fp8_format == "e4m3" else Format.HYBRID)
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, operand, QParams(power_2_scale=False, amax_epsilon=0.0))
    return autocast(enabled=True, recipe=recipe)
