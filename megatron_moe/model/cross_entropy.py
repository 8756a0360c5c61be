"""The cross entropy of each token: of logits, or of hidden states and the output layer's weight (fused).

The fused one is computed without the logits, which exist as tiles of [chunk of tokens, block of rows]:

    logits = hidden weight^T        loss = log(sum(exp(logits))) - logits[label]

Its forward pass keeps the maximum and the sum of exponentials of each token, found on the way over the blocks; the
backward pass computes each tile again, turns it into its own gradient in place and multiplies on. Both passes take the
weight block by block in the outer loop, so that a half-precision weight is widened, and its gradient summed over all
tokens in fp32 and rounded once, one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.moe.grouped_gemm import add_product, main_grad_of, no_gradient
from megatron_moe.platform.protocols import AutogradContext
from megatron_moe.precision.contract import PrecisionError

# An fp32 tile of 32 MiB: narrower and shorter ones were slower on a CPU, larger ones not faster.
BLOCK_ROWS = 8192
DEFAULT_CHUNK_TOKENS = 1024
# Of logits that are there: what fits a processor's cache, and what keeps a GPU busy.
_NUMBERS_OF_TILE = {"on a CPU": 2**20, "elsewhere": 2**24}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    vocab_size: int | None = None,
    fused_gradient: bool = False,
) -> Tensor:
    """Return the cross entropy of each token, in nats.

    A label outside [0, V) has no logit, as in the engine's loss: its loss must have no weight afterwards. Products add
    in fp32 (fp64 for fp64), logits and softmax are not rounded to half precision, each gradient is rounded once.

    Args:
        hidden: [T, H], the same on every rank of the group.
        weight: [V / size of the group, H], this rank's rows, in the dtype of `hidden`.
        labels: [T], int64.
        group: the ranks over which the vocabulary is split, in the order of their rows; None if it is not split.
        chunk_tokens: tokens per tile; default 1024, which makes an fp32 tile of at most 32 MiB.
        vocab_size: V, if the rows from there on are padding: they take no part, and their gradient is 0.
        fused_gradient: whether the weight's gradient is added to its fp32 sum, where it has one, without a rounding.

    Returns:
        [T], fp32 (fp64 for fp64), the same on every rank. Gradients: of `hidden`, the share of this rank's rows,
        which the caller sums over the group; of `weight`, the whole.

    Raises:
        PrecisionError: hidden and weight are of different dtypes.
    """
    if hidden.dtype != weight.dtype:
        raise PrecisionError(
            f"fused cross entropy: hidden states are {hidden.dtype} and output_layer.weight is {weight.dtype}; both "
            f"must be of one dtype: cast the hidden states to {weight.dtype} before the output layer, or keep it in "
            f"{hidden.dtype}"
        )
    first_row = 0 if group is None else dist.get_rank(group) * weight.shape[0]
    rows = weight.shape[0] if vocab_size is None else min(max(vocab_size - first_row, 0), weight.shape[0])
    size = chunk_tokens or DEFAULT_CHUNK_TOKENS
    return _LinearCrossEntropy.apply(hidden, weight, labels - first_row, rows, group, size, fused_gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        group: ProcessGroup | None,
        chunk_tokens: int,
        fused_gradient: bool,
    ) -> Tensor:
        tiles = _Tiles(hidden.detach(), weight.detach()[:rows], labels, chunk_tokens)
        statistics = _Statistics.zeros(labels, tiles.dtype)
        for block_rows in tiles.blocks:
            block = tiles.widened(tiles.weight[block_rows])
            for tokens in tiles.chunks:
                add_statistics(tiles.logits(tokens, block), tiles.columns(block_rows, tokens), *statistics.of(tokens))
        losses = statistics.losses((labels >= 0) & (labels < rows), group)
        ctx.save_for_backward(hidden, weight, labels, statistics.maximum, statistics.exp_sum)
        ctx.parameter = weight
        ctx.rows, ctx.chunk_tokens, ctx.fused_gradient = rows, chunk_tokens, fused_gradient
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: AutogradContext, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, labels, maximum, exp_sum = ctx.saved_tensors
        tiles = _Tiles(hidden, weight[: ctx.rows], labels, ctx.chunk_tokens)
        grad_hidden = tiles.wide_zeros(hidden.shape) if ctx.needs_input_grad[0] else None
        total = main_grad_of(ctx.parameter) if ctx.fused_gradient and ctx.needs_input_grad[1] else None
        grad_weight = torch.empty_like(weight) if total is None and ctx.needs_input_grad[1] else None
        if grad_weight is not None:
            grad_weight[ctx.rows :] = 0
        for rows in tiles.blocks:
            block = tiles.widened(weight[rows])
            # In fp32 the block's gradient is summed in place, in half precision in a buffer of its own.
            block_grad = None if total is None else total[rows]
            if grad_weight is not None:
                in_place = grad_weight.dtype == tiles.dtype
                block_grad = grad_weight[rows].zero_() if in_place else tiles.wide_zeros(block.shape)
            for tokens in tiles.chunks:
                tile = gradient_of_tile(
                    tiles.logits(tokens, block),
                    tiles.columns(rows, tokens),
                    maximum[tokens],
                    exp_sum[tokens],
                    grad[tokens],
                    tiles.operand_dtype,
                )
                if grad_hidden is not None:
                    add_product(grad_hidden[tokens], tile, block)
                if block_grad is not None:
                    add_product(block_grad, tile.t(), tiles.hidden[tokens])
            if grad_weight is not None and block_grad is not None and not in_place:
                grad_weight[rows] = block_grad
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        grad_weight = grad_weight if total is None else no_gradient(weight)
        return grad_hidden, grad_weight, None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the cross entropy of each token, in nats; the backward pass writes the gradient over the logits.

    It is computed in fp32 (fp64 for fp64), a tile at a time, and keeps nothing but the logits: the engine's loss keeps
    a softmax in fp32.

    Args:
        logits: [T, V / size of the group], contiguous, this rank's columns.
        labels, group: see `linear_cross_entropy`.

    Returns:
        [T], fp32 (fp64 for fp64), the same on every rank.
    """
    first_column = 0 if group is None else dist.get_rank(group) * logits.shape[1]
    return _CrossEntropy.apply(logits, labels - first_column, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, labels: Tensor, group: ProcessGroup | None) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        statistics = _Statistics.zeros(labels, wide)
        for tokens, tile in _tiles_of(logits, wide):
            add_statistics(tile, labels[tokens], *statistics.of(tokens))
        losses = statistics.losses((labels >= 0) & (labels < logits.shape[1]), group)
        ctx.save_for_backward(logits, labels, statistics.maximum, statistics.exp_sum)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, maximum, exp_sum = ctx.saved_tensors
        for tokens, tile in _tiles_of(logits, maximum.dtype):
            of_tokens = (labels[tokens], maximum[tokens], exp_sum[tokens], grad[tokens])
            logits[tokens] = gradient_of_tile(tile, *of_tokens, logits.dtype)
        return logits, None, None


def _tiles_of(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield some tokens and their logits in a dtype, in a buffer that the next ones overwrite."""
    total, width = logits.shape
    size = max(1, min(total, _NUMBERS_OF_TILE["on a CPU" if platform.on_cpu(logits) else "elsewhere"] // width))
    buffer = logits.new_empty((size, width), dtype=dtype)
    for tokens in _slices(total, size):
        yield tokens, buffer[: tokens.stop - tokens.start].copy_(logits[tokens])


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class _Statistics(NamedTuple):
    """Per token [T], of this rank's logits: the maximum, sum(exp(logits - maximum)), and the label's logit or 0."""

    maximum: Tensor
    exp_sum: Tensor
    label_logit: Tensor

    @classmethod
    def zeros(cls, labels: Tensor, dtype: torch.dtype) -> _Statistics:
        """Return those of no logit."""
        exp_sum, label_logit = (torch.zeros(labels.shape, dtype=dtype, device=labels.device) for _ in range(2))
        return cls(torch.full_like(exp_sum, -torch.inf), exp_sum, label_logit)

    def of(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of some tokens, in the same memory."""
        return self.maximum[tokens], self.exp_sum[tokens], self.label_logit[tokens]

    def losses(self, owned: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return each token's loss, and change maximum and sum to those of all ranks' logits. Collective.

        Args:
            owned: [T] bool, the labels whose logits are this rank's.
        """
        maximum, exp_sum, label_logit = self
        if group is not None and group.size() > 1:
            own_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            exp_sum *= torch.exp(own_maximum - maximum)
        # From here on logits are relative to the maximum: the difference of two large numbers is never formed.
        label_logit = torch.where(owned, label_logit - maximum, 0)
        if group is not None and group.size() > 1:
            sums = torch.stack((exp_sum, label_logit))
            dist.all_reduce(sums, group=group)
            label_logit = sums[1]
            exp_sum.copy_(sums[0])
        return torch.log(exp_sum) - label_logit


@has_kernel("add_statistics")
def add_statistics(tile: Tensor, columns: Tensor, maximum: Tensor, exp_sum: Tensor, label_logit: Tensor) -> None:
    """Add a tile of logits [t, b] to the statistics [t] of its tokens, in place. The tile is overwritten.

    columns: [t] int64, each label's column in the tile; outside of it where the label is elsewhere.
    """
    here, column = _inside(tile, columns)
    label_logit += torch.where(here, tile.gather(1, column[:, None])[:, 0], 0)
    new_maximum = torch.maximum(maximum, tile.amax(dim=-1))
    exp_sum *= torch.exp(maximum - new_maximum)
    exp_sum += tile.sub_(new_maximum[:, None]).exp_().sum(dim=-1)
    maximum.copy_(new_maximum)


@has_kernel("gradient_of_tile")
def gradient_of_tile(
    tile: Tensor, columns: Tensor, maximum: Tensor, exp_sum: Tensor, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (softmax - onehot) x grad of a tile [t, b] in a dtype. The tile is overwritten; see `add_statistics`."""
    tile.sub_(maximum[:, None]).exp_().mul_((grad / exp_sum)[:, None])
    here, column = _inside(tile, columns)
    tile[torch.arange(tile.shape[0], device=tile.device), column] -= torch.where(here, grad, 0)
    return tile.to(dtype)


def _inside(tile: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return which columns are in the tile, and these (0 for the others)."""
    here = (columns >= 0) & (columns < tile.shape[1])
    return here, torch.where(here, columns, 0)


class _Tiles:
    """The tiles of the logits, and the products on them.

    On a CPU half-precision operands are widened to fp32 first: it has no product with half operands and an fp32
    result, and without bf16 instructions fp32 is faster as well (`platform/cpu_half_gemm.py`). CUDA has one.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.half_operands = hidden.dtype != self.dtype and not platform.on_cpu(hidden)
        self.operand_dtype = hidden.dtype if self.half_operands else self.dtype  # of a tile in a product
        self.hidden, self.weight, self.labels = self.widened(hidden), weight, labels
        # The blocks of the weight's rows, and the chunks of the tokens.
        self.blocks = _slices(weight.shape[0], BLOCK_ROWS)
        self.chunks = _slices(labels.shape[0], max(1, min(chunk_tokens, hidden.shape[0])))
        self._tile = torch.empty(0, dtype=self.dtype, device=hidden.device)

    def widened(self, operand: Tensor) -> Tensor:
        """Return an operand of a product in the dtype that this device needs."""
        return operand if self.half_operands else operand.to(self.dtype)

    def wide_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.hidden.device)

    def logits(self, tokens: slice, block: Tensor) -> Tensor:
        """Return the tile [chunk, block], in a buffer that the next call overwrites."""
        hidden = self.hidden[tokens]
        if self.half_operands:
            return torch.mm(hidden, block.t(), out_dtype=self.dtype)
        size = hidden.shape[0] * block.shape[0]
        if self._tile.numel() < size:
            self._tile = self._tile.new_empty(size)
        return torch.mm(hidden, block.t(), out=self._tile[:size].view(hidden.shape[0], block.shape[0]))

    def columns(self, rows: slice, tokens: slice) -> Tensor:
        """Return the labels' columns in the tile of this block, outside of it where they are elsewhere."""
        return self.labels[tokens] - rows.start
