"""Muon: momentum whose matrices are orthogonalized, for the hidden layers; AdamW for all other weights.

An update of a matrix [m, n] is the momentum with its singular values mapped to numbers near 1, times a factor that
gives it the size of an update of AdamW's (arXiv:2502.16982), so that one learning rate and one weight decay serve both.

To the engine the optimizer looks like any Adam. In a step, `Orthogonalizer.apply` replaces the gradient of every matrix
by its update, which takes all ranks; then the engine has each optimizer update its weights, which takes none.

The Newton-Schulz iteration makes U p(S / |M|) V^T of M = U S V^T, where |M| is the Frobenius norm and p the composition
of one odd polynomial of degree 5 per step: x (a + b x^2 + c x^4). `p` alone says how near to 1 a singular value comes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.run_flags import OptimizerConfig
from megatron_moe.engine.adam import Adam
from megatron_moe.engine.optimizer import OwnedPart
from megatron_moe.model.matrices import MatrixLayout, flops_of_block, sizes_of
from megatron_moe.optim.adam import MOMENTS, PrecisionAwareAdam, adam_update, pieces, rounding_at
from megatron_moe.optim.matrix_exchange import MatrixBlock, MatrixExchange, Part
from megatron_moe.platform.cpu_half_gemm import multiply_in_fp32
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.precision.contract import mixes_dtypes
from megatron_moe.precision.packed_state import (
    AdamState,
    AdamStep,
    StochasticRounding,
    pack_main,
    unpacked_main,
    unpacked_moment,
)

Coefficients = tuple[float, float, float]

# a, b, c of each step; of a longer iteration the last ones go on.
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, "Muon" (2024); Moonlight's (arXiv:2502.16982).
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Per step, by Jiacheng You for modded-nanogpt (2025); Megatron-LM's default.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def steps_of(kind: str, count: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of `count` steps of a kind."""
    known = COEFFICIENTS[kind]
    return tuple(known[min(step, len(known) - 1)] for step in range(count))


@torch.no_grad()
@mixes_dtypes("matrices are scaled in fp32 and iterated in the dtype that is asked for")
def orthogonalized(matrices: Tensor, steps: Sequence[Coefficients], dtype: torch.dtype) -> Tensor:
    """Return the matrices with their singular values mapped to numbers near 1.

    The scale of a matrix is of no account, down to numbers that fp32 cannot square. A matrix of zeros stays one.

    Args:
        matrices: [N, m, n], floating.
        steps: see `steps_of`.
        dtype: bf16 or fp32, of the iteration. In bf16 each product adds in fp32 and is rounded once.

    Returns:
        [N, m, n] in `dtype`.
    """
    wide = matrices.to(torch.float32, copy=True)
    for order in (math.inf, 2):  # what is squared is at most 1
        norm = torch.linalg.vector_norm(wide, order, dim=(1, 2), keepdim=True)
        wide.div_(norm.masked_fill(norm == 0, 1))
    x = wide.to(dtype)
    del wide
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT  # the products with the shorter side are the smaller ones
    for a, b, c in steps:
        gram = _product(x, x.mT)
        polynomial = _product(gram, gram, gram, b, c)
        x = _product(polynomial, x, x, a)
    return x.mT if transposed else x


def _product(left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return beta x added + alpha x left right for batches of matrices, rounded once."""
    if multiply_in_fp32(left):
        wide = None if added is None else added.float()
        return _product(left.float(), right.float(), wide, beta, alpha).to(left.dtype)
    if added is None:
        return torch.bmm(left, right)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


# ---- The optimizer of a rank.

DTYPES = {"medium": torch.bfloat16, "highest": torch.float32}
"""Values of --muon-fp32-matmul-prec -> the dtype of the iteration."""


class Muon(Adam):
    """An AdamW that leaves some weights to Muon.

    state, of a matrix: `exp_avg`, the momentum, a mean of gradients; `exp_avg_sq` is a tensor of zeros without memory,
    for what the engine does with all states alike. Of other weights, see `Adam`.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.matrices: set[Tensor] = set()
        """The weights, or shards of them, that are left to Muon: their gradients will be their updates."""
        self.after_update: dict[Tensor, Callable[[Tensor], None]] = {}
        """Weight, or its shard -> what is done to it after each update."""
        self.momentum = 0.0
        """The decay of a matrix's momentum."""

    @torch.no_grad()
    def add_gradients(self, beta: float, *, nesterov: bool) -> None:
        """Add the gradients of matrices to their momenta, and put what is orthogonalized in the gradients' places."""
        grads, momenta = [], []
        for group in self.param_groups:
            for param in self._matrices_in(group):
                grads.append(param.grad)
                momenta.append(self.state[param]["exp_avg"])
        if grads:
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            if nesterov:
                torch._foreach_lerp_(grads, momenta, beta)
            else:
                torch._foreach_copy_(grads, momenta)

    def _matrices_in(self, group: dict[str, Any]) -> list[Any]:
        return [param for param in group["params"] if param in self.matrices and param.grad is not None]

    def _step_group(self, group: dict[str, Any]) -> None:
        self._update_matrices(self._matrices_in(group), 1 - group["lr"] * group["weight_decay"], group["lr"])
        super()._step_group({**group, "params": [param for param in group["params"] if param not in self.matrices]})
        for param in group["params"]:
            if param in self.after_update:
                self._finish(param)

    def _update_matrices(self, updated: list[Any], keep: float, rate: float) -> None:
        if updated:
            torch._foreach_mul_(updated, keep)
            torch._foreach_add_(updated, [param.grad for param in updated], alpha=-rate)

    def _finish(self, param: Tensor) -> None:
        self.after_update[param](param)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        if param in self.matrices and not self.state[param]:
            self.state[param]["exp_avg"] = self._zeros_like(param)
            self._drop_second_moment(param)
        return super()._state_of(param)

    def _drop_second_moment(self, param: Tensor) -> None:
        self.state[param]["exp_avg_sq"] = torch.zeros((), device=param.device).expand(param.shape)

    @contextmanager
    def unpacked(self, *, keep: bool) -> Iterator[None]:
        """Give matrices a second moment in memory for the block, where state is loaded into memory (`keep`)."""
        try:
            if keep:
                for param in self.matrices:
                    self.state[param]["exp_avg_sq"] = self._zeros_like(param)
            yield
        finally:
            for param in self.matrices:
                self._drop_second_moment(param)


class PackedMuon(Muon, PrecisionAwareAdam):
    """An AdamW of the precision-aware form that leaves some weights to Muon.

    state: see `PrecisionAwareAdam`; a matrix has no second moment.
    """

    unpacked = PrecisionAwareAdam.unpacked

    def moments_of(self, param: Tensor) -> tuple[str, ...]:
        """Return the moments that a weight has: of a matrix the momentum alone."""
        return MOMENTS[:1] if param in self.matrices else MOMENTS

    def first_beta(self, param: Tensor, group: dict[str, Any]) -> float:
        """Return the decay of a parameter's first moment; a matrix has Muon's."""
        return self.momentum if param in self.matrices else super().first_beta(param, group)

    @torch.no_grad()
    def add_gradients(self, beta: float, *, nesterov: bool) -> None:
        """Add the gradients of matrices to their momenta, and put what is orthogonalized in the gradients' places."""
        for group in self.param_groups:
            for param in self._matrices_in(group):
                grad, rounding = param.grad.view(-1), self._rounding(param, group)
                momentum = self._stored(param)._replace(weight=None, low_bits=None, carry_bits=None)
                for begin, end, near in self._near(momentum, param):
                    _add_packed(grad[begin:end], near, beta, nesterov, rounding_at(rounding, begin))

    def _update_matrices(self, updated: list[Any], keep: float, rate: float) -> None:
        for param in updated:
            update = param.grad.view(-1)
            for begin, end, near in self._near(self._main_alone(param), param):
                _update_packed(update[begin:end], near, keep, rate)

    @mixes_dtypes("main weights in fp32 are packed")
    def _finish(self, param: Tensor) -> None:
        if param not in self.packed:
            return super()._finish(param)
        main = self.main_param(param)
        self.after_update[param](main)
        for begin, end, near in self._near(self._main_alone(param), param):
            for first, last in pieces(end - begin, main):
                pack_main(main.view(-1)[begin + first : begin + last], near.part(first, last))

    def _main_alone(self, param: Tensor) -> AdamState:
        """Return what is stored of a main weight, without its moments."""
        none = self._no_moment(param)
        return self._stored(param)._replace(moments=(none, none), exponents=(None, None))


@mixes_dtypes("a momentum that is stored in fewer bytes is unpacked to fp32, updated, and packed")
def _add_packed(
    grad: Tensor, state: AdamState, beta: float, nesterov: bool, rounding: StochasticRounding | None
) -> None:
    """Add a gradient, fp32 [n], to a first moment, and put what is orthogonalized of them in its place.

    What is stored is updated by AdamW's kernel, which computes the same mean, as that of weights that do not move.
    """
    step = AdamStep(lr=0.0, betas=(beta, 0.0), eps=1.0, weight_decay=0.0, number=1)
    weights = second = grad[:0]
    for begin, end in pieces(grad.numel(), grad):
        piece, part = grad[begin:end], state.part(begin, end)
        stored, exponents = part.moments[0], part.exponents[0]
        momentum = unpacked_moment(stored, exponents).lerp_(piece, 1 - beta)
        if stored.dtype != torch.float32:
            if not begin:
                weights, second = torch.zeros_like(piece), torch.zeros_like(piece)
            moments = stored, second[: end - begin]
            still = AdamState(weights[: end - begin], None, None, None, moments, (exponents, None))
            drawn = rounding_at(rounding, begin)
            adam_update([piece], [still], step, None if drawn is None else [drawn])
        if nesterov:
            piece.lerp_(momentum, beta)
        else:
            piece.copy_(momentum)


@mixes_dtypes("main weights that are stored in fewer bytes are unpacked to fp32, updated, and packed")
def _update_packed(update: Tensor, state: AdamState, keep: float, rate: float) -> None:
    """Multiply main weights by `keep`, and subtract `rate` times an update, fp32 [n]."""
    for begin, end in pieces(update.numel(), update):
        part = state.part(begin, end)
        main = unpacked_main(part) if part.main is None else part.main
        main.mul_(keep).add_(update[begin:end], alpha=-rate)
        if part.main is None:
            pack_main(main, part)


# ---- All matrices of a model, spread over ranks.


class MatrixWeight(NamedTuple):
    """A weight that Muon updates.

    main: what this rank updates of it, with its gradient; None: nothing. adam: the optimizer of `main`. own: the part
    of the weight that `main` is.
    """

    weight: torch.nn.Parameter
    layout: MatrixLayout
    main: Tensor | None
    adam: Muon | None
    own: OwnedPart


class Orthogonalizer:
    """Replaces the gradients of all matrices of a model by Muon's updates.

    weights: of this rank, in the same order on all ranks that have parts of them. Construction is collective.
    """

    def __init__(self, options: OptimizerConfig, weights: Sequence[MatrixWeight], pg: ProcessGroups) -> None:
        self._steps = steps_of(options.muon_coefficient_type, options.muon_num_ns_steps)
        self.momentum, self._nesterov = options.muon_momentum, options.muon_nesterov
        self._factor = partial(scale, mode=options.muon_scale_mode, extra=options.muon_extra_scale_factor)
        self._adams = {id(one.adam): one.adam for one in weights if one.adam is not None}
        for adam in self._adams.values():
            adam.momentum = self.momentum
        dtype, self._exchanges = DTYPES[options.muon_fp32_matmul_prec], []
        for stacked, dp, tp in ((False, pg.dp_cp, pg.tp), (True, pg.expt_dp, pg.expt_tp)):
            some = [one for one in weights if one.layout.stacked == stacked]
            of_ranks: list[Any] = [None] * dp.size()
            dist.all_gather_object(of_ranks, [tuple(one.own) for one in some], group=dp)
            blocks: list[MatrixBlock] = []
            for one, parts in zip(some, zip(*of_ranks), strict=True):
                blocks += _blocks(one, parts, dp.rank(), tp.size())
            self._exchanges.append(MatrixExchange(blocks, dp, tp, dtype))

    @torch.no_grad()
    def apply(self) -> None:
        """Add the gradients to the momenta, and put the updates in the gradients' places. Collective."""
        for adam in self._adams.values():
            adam.add_gradients(self.momentum, nesterov=self._nesterov)
        for exchange in self._exchanges:
            exchange.run(self._of_gradient, self._compute, self._of_gradient)

    def _of_gradient(self, block: MatrixBlock) -> Tensor:
        assert block.main is not None and block.main.grad is not None
        return block.of_main(block.main.grad)

    def _compute(self, blocks: list[tuple[MatrixBlock, Tensor]]) -> None:
        alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for block, whole in blocks:
            for matrix in block.matrices(whole):
                alike[sizes_of(matrix)].append(matrix)
        for (rows, columns), matrices in alike.items():
            stack = torch.stack([matrix.reshape(rows, columns) for matrix in matrices])
            results = orthogonalized(stack, self._steps, stack.dtype).mul_(self._factor(rows, columns))
            for matrix, result in zip(matrices, results):
                matrix.copy_(result.reshape(matrix.shape))


def scale(rows: int, columns: int, *, mode: str, extra: float) -> float:
    """Return the factor on an orthogonalized matrix: `extra` times that of a mode of --muon-scale-mode.

    spectral: sqrt(max(m, n)), which makes the root mean square of an orthogonal matrix's elements 1 (arXiv:2502.16982).
    unit_rms_norm: sqrt(m / n), by which inputs with a root mean square of 1 change outputs as much (arXiv:2410.21265).
    shape_scaling: sqrt(max(1, m / n)), Keller Jordan's.
    """
    modes = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1, rows / columns)}
    return extra * math.sqrt(modes[mode])


# Blocks of weights.


def _blocks(one: MatrixWeight, own: Sequence[Any], dp_rank: int, tp_size: int) -> Iterator[MatrixBlock]:
    """Yield the blocks of a weight, of which each data-parallel rank updates the part in `own`."""
    shape, layout = tuple(one.weight.shape), one.layout
    inner = shape[1:] if layout.stacked else shape
    # What is cut along an axis, of a fully sharded model, is on one rank each.
    replicated = sum(end - begin for axis, begin, end in own if axis is None) > math.prod(shape)
    cost = flops_of_block(layout, inner, tp_size)
    for index in range(shape[0]) if layout.stacked else (None,):
        of_blocks: list[Part | None] = []
        of_main: Part = _all  # of which nothing is asked where this rank has nothing of the block
        for rank, part in enumerate(own):
            of_block, of_part = _share(shape, OwnedPart(*part), index) or (None, _all)
            of_blocks.append(of_block)
            if rank == dp_rank:
                of_main = of_part
        yield MatrixBlock(inner, layout.split, layout.matrices, cost, of_blocks, replicated, one.main, of_main)


def _share(shape: tuple[int, ...], own: OwnedPart, index: int | None) -> tuple[Part, Part] | None:
    """Return what a rank updates of a block: of a tensor of the block's shape, and of what it updates of the weight.

    None: nothing. own: the part of the weight that the rank updates. index: of the block along the first axis; None:
    the weight, of this shape, is one block.
    """
    axis, begin, end = own
    if axis is None:
        numel = math.prod(shape if index is None else shape[1:])
        first = 0 if index is None else index * numel
        low, high = max(begin, first), min(end, first + numel)
        if low >= high:
            return None
        return OwnedPart(None, low - first, high - first).of, OwnedPart(None, low - begin, high - begin).of
    if begin >= end or (axis == 0 and index is not None and not begin <= index < end):
        return None
    if index is None:
        return OwnedPart(axis, begin, end).of, _all
    if axis == 0:
        return _all, itemgetter(index - begin)
    return OwnedPart(axis - 1, begin, end).of, itemgetter(index)


def _all(tensor: Tensor) -> Tensor:
    return tensor
