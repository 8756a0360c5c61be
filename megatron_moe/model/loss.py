"""The output layer and the loss: logits, cross entropy per token (fused or not), and its sum for the schedules.

The table is padded so that every tensor-parallel rank has an equal share. Columns of padding are no tokens: if they
took part in the softmax, the loss would depend on their number, and so on the layout.

The fused cross entropy is computed without the logits, which exist as tiles of [chunk of tokens, block of rows]:

    logits = hidden weight^T        loss = log(sum(exp(logits))) - logits[label]

Its forward pass keeps the maximum and the sum of exponentials of each token, found on the way over the blocks; the
backward pass computes each tile again, turns it into its own gradient in place and multiplies on. Both passes take the
weight block by block in the outer loop, so that a half-precision weight is widened, and its gradient summed over all
tokens in fp32 and rounded once, one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.parallel.collectives import all_gather_rows, shared_by_ranks, sum_over_ranks
from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.precision.contract import PrecisionError, returns_wider
from megatron_moe.precision.main_grad import add_product, main_grad_of, no_gradient

# An fp32 tile of 32 MiB: narrower and shorter ones were slower on a CPU, larger ones not faster.
BLOCK_ROWS = 8192
DEFAULT_CHUNK_TOKENS = 1024


class OutputLayer(CopiesShareGroups, ColumnParallelLinear):
    """The engine's output layer, which gives columns of padding the least number of their dtype as logit.

    Its exponential is 0 next to any token's. It is not -inf, so that a search for non-finite numbers finds errors
    alone.

    Attributes:
        vocab_size: columns of the whole layer that are tokens.
    """

    vocab_size: int

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear, vocab_size: int) -> None:
        """Turn an output layer that GPTModel has built into one of this class, which differs in the forward pass.

        GPTModel does not take the class of its output layer.
        """
        layer.__class__ = cls
        layer.vocab_size = vocab_size

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logits [S, B, V / TP], None) for hidden states [S, B, H]; [S, B, V] where the output is gathered."""
        logits, bias = super().forward(input_, weight, runtime_gather_output)
        whole = logits.shape[-1] != self.output_size_per_partition
        first = 0 if whole else self.tp_group.rank() * self.output_size_per_partition
        tokens = max(self.vocab_size - first, 0)
        return (_without_padding(logits, tokens) if tokens < logits.shape[-1] else logits), bias


def _without_padding(logits: Tensor, tokens: int) -> Tensor:
    return _WithoutPadding.apply(logits, tokens)


class _WithoutPadding(torch.autograd.Function):
    """A function that writes the least number into the columns from `tokens` on, in place to save memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        ctx.mark_dirty(logits)
        logits[..., tokens:] = torch.finfo(logits.dtype).min
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad[..., ctx.tokens :] = 0  # the softmax leaves 0 there; a function of the logits of another kind may not
        return grad, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    weight_name: str = "output_layer.weight",
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
        weight_name: the weight's name in an error.
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
            f"fused cross entropy: hidden states are {hidden.dtype} and {weight_name} is {weight.dtype}; both must be "
            f"of one dtype: cast the hidden states to {weight.dtype} before the output layer, or keep it in "
            f"{hidden.dtype}"
        )
    first_row = 0 if group is None else dist.get_rank(group) * weight.shape[0]
    rows = weight.shape[0] if vocab_size is None else min(max(vocab_size - first_row, 0), weight.shape[0])
    size = chunk_tokens or DEFAULT_CHUNK_TOKENS
    return _LinearCrossEntropy.apply(hidden, weight, labels - first_row, rows, group, size, fused_gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        group: ProcessGroup | None,
        chunk_tokens: int,
        fused_gradient: bool,
    ) -> Tensor:
        tiles = _Tiles(hidden.detach(), weight.detach()[:rows], labels, chunk_tokens)
        maximum, exp_sum, label_logit = _statistics(tiles)
        owned = (tiles.labels >= 0) & (tiles.labels < rows)
        if group is not None and group.size() > 1:
            own_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            exp_sum *= torch.exp(own_maximum - maximum)
        # From here on logits are relative to the maximum: the difference of two large numbers is never formed.
        label_logit = torch.where(owned, label_logit - maximum, 0)
        if group is not None and group.size() > 1:
            sums = torch.stack((exp_sum, label_logit))
            dist.all_reduce(sums, group=group)
            exp_sum, label_logit = sums
        ctx.save_for_backward(hidden, weight, tiles.labels, maximum, exp_sum)
        ctx.parameter = weight
        ctx.rows, ctx.chunk_tokens, ctx.fused_gradient = rows, chunk_tokens, fused_gradient
        return torch.log(exp_sum) - label_logit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, labels, maximum, exp_sum = ctx.saved_tensors
        tiles = _Tiles(hidden, weight[: ctx.rows], labels, ctx.chunk_tokens)
        grad_hidden = tiles.wide_zeros(hidden.shape) if ctx.needs_input_grad[0] else None
        total = main_grad_of(ctx.parameter) if ctx.fused_gradient and ctx.needs_input_grad[1] else None
        grad_weight = torch.empty_like(weight) if total is None and ctx.needs_input_grad[1] else None
        if grad_weight is not None:
            grad_weight[ctx.rows :] = 0
        for rows in tiles.blocks():
            block = tiles.widened(weight[rows])
            # In fp32 the block's gradient is summed in place, in half precision in a buffer of its own.
            block_grad = None if total is None else total[rows]
            if grad_weight is not None:
                in_place = grad_weight.dtype == tiles.dtype
                block_grad = grad_weight[rows].zero_() if in_place else tiles.wide_zeros(block.shape)
            for tokens in tiles.chunks():
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


def _statistics(tiles: _Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Return per token, of this rank's logits, the maximum, sum(exp(logits - maximum)), and the label's logit or 0."""
    count = tiles.labels.shape[0]
    maximum = tiles.wide_zeros((count,)).fill_(-torch.inf)
    exp_sum, label_logit = tiles.wide_zeros((count,)), tiles.wide_zeros((count,))
    for rows in tiles.blocks():
        block = tiles.widened(tiles.weight[rows])
        for tokens in tiles.chunks():
            tile = tiles.logits(tokens, block)
            add_statistics(tile, tiles.columns(rows, tokens), maximum[tokens], exp_sum[tokens], label_logit[tokens])
    return maximum, exp_sum, label_logit


@has_kernel("triton_loss")
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


@has_kernel("triton_loss")
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
    result, and without bf16 instructions fp32 is faster as well (`platform/half_products.py`). CUDA has one.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.half_operands = hidden.dtype != self.dtype and not platform.on_cpu(hidden)
        self.hidden, self.weight, self.labels = self.widened(hidden), weight, labels
        self.chunk_tokens = max(1, min(chunk_tokens, hidden.shape[0]))
        self._tile = torch.empty(0, dtype=self.dtype, device=hidden.device)

    def widened(self, operand: Tensor) -> Tensor:
        """Return an operand of a product in the dtype that this device needs."""
        return operand if self.half_operands else operand.to(self.dtype)

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of a tile as an operand of a product."""
        return self.hidden.dtype if self.half_operands else self.dtype

    def wide_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.hidden.device)

    def blocks(self) -> Iterator[slice]:
        """Return the blocks of the weight's rows."""
        total = self.weight.shape[0]
        return (slice(start, min(start + BLOCK_ROWS, total)) for start in range(0, total, BLOCK_ROWS))

    def chunks(self) -> Iterator[slice]:
        """Return the chunks of the tokens."""
        total = self.labels.shape[0]
        return (slice(start, min(start + self.chunk_tokens, total)) for start in range(0, total, self.chunk_tokens))

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


@returns_wider("the loss per token is fp32")
class OutputLayerWithLoss(OutputLayer):
    """An output layer that computes the loss itself when it is given labels.

    The loss is computed inside this layer's forward pass because with `--overlap-param-gather` the engine waits for a
    layer's weight where that layer is called.
    """

    chunk_tokens: int | None = None
    fused_gradient: bool = False

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logits [S, B, V / TP], None) for hidden states [S, B, H]; with labels, (losses, None).

        Args:
            input_: hidden states; this rank's part of the sequence under sequence parallelism.
            weight: the embedding table, if the output layer shares it.
            labels: [B, S], of the whole sequence.

        Returns:
            losses: [B, S] fp32, per token.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        spread = all_gather_rows if self.sequence_parallel else shared_by_ranks
        hidden = spread(input_, self.tp_group)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight if weight is None else weight,
            labels.transpose(0, 1).reshape(-1),
            self.tp_group,
            self.chunk_tokens,
            vocab_size=self.vocab_size,
            fused_gradient=self.fused_gradient,
        )
        return losses.view(hidden.shape[:2]).transpose(0, 1).contiguous(), None


class FusedLoss:
    """A mixin before the engine's GPTModel that computes the loss in the output layer."""

    def fuse_loss(self, chunk_tokens: int | None, fused_gradient: bool) -> None:
        """Turn the output layer, if this pipeline stage has it, into an `OutputLayerWithLoss`.

        GPTModel does not take the class of its output layer; the forward pass alone differs.

        Args:
            chunk_tokens, fused_gradient: see `linear_cross_entropy`.
        """
        if self.post_process:  # type: ignore[attr-defined]
            layer = self.output_layer  # type: ignore[attr-defined]
            layer.__class__ = OutputLayerWithLoss
            layer.chunk_tokens, layer.fused_gradient = chunk_tokens, fused_gradient

    def token_losses(self: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy [B, S] fp32 of the output layer on hidden states [S, B, H] against labels [B, S]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        losses, _ = self.output_layer(hidden, weight=weight, labels=labels)
        return losses

    def _postprocess(self: Any, hidden_states: Tensor, *, labels: Tensor | None, **rest: Any) -> Tensor:
        """Return logits without labels and losses with them: the engine's last step of a forward pass."""
        if labels is None or not self.post_process or self.config.mtp_num_layers:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)  # type: ignore[misc]
        return self.token_losses(hidden_states, labels)


def loss_func(
    loss_mask: Tensor, output: Tensor, shared_by: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: [B, S], 1 for tokens that count; a rank's own part of the sequence under context parallelism.
        output: [B, S] cross entropy per token, in nats.
        shared_by: the context-parallel ranks, where the loss is a mean over a micro-batch. The mean is over the tokens
            of all these ranks, whose numbers may differ: their tokens are added up (a collective), and because the
            gradients of these ranks will be averaged, each rank's sum is multiplied by the number of ranks.

    Returns:
        The sum (fp32 scalar), the number of tokens (int scalar), and for the logs {"lm loss": fp32 [sum, tokens]} of
        this rank alone. With three values the schedule divides by the tokens itself, or leaves that to the end of the
        step for a loss per token; with two it would also multiply by the context-parallel size.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum()
    # The schedule divides `total` in place; the logged value must not follow.
    logged = torch.stack((total.detach().clone(), tokens))
    if shared_by is not None and shared_by.size() > 1:
        total, tokens = total * shared_by.size(), sum_over_ranks(tokens, shared_by)
    return total, tokens.to(torch.int), {"lm loss": logged}
