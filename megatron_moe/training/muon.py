"""Muon: momentum whose matrices are orthogonalized, for the hidden layers; AdamW for all other weights.

An update of a matrix [m, n] is the momentum with its singular values mapped to numbers near 1, times a factor that
gives it the size of an update of AdamW's (arXiv:2502.16982), so that one learning rate and one weight decay serve both.

To the engine the optimizer looks like any Adam. In a step, `orthogonalize_gradients` replaces the gradient of every
matrix by its update, which takes all ranks; then the engine has each optimizer update its weights, which takes none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config.run_flags import OptimizerConfig
from megatron_moe.config.schema import Run
from megatron_moe.model.initialize import Split, placement
from megatron_moe.platform.adam import Adam
from megatron_moe.training.matrix_exchange import ROUND_NUMEL, MatrixBlock, MatrixExchange, Part, whole_shape
from megatron_moe.training.orthogonalization import orthogonalized, steps_of

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
        self.after_update: dict[Tensor, Callable[[Tensor], None]] = {}
        """Weight, or its shard -> what is done to it after each update."""

    def leave_to_muon(self, weight: Tensor) -> None:
        """Take a weight, or the shard of one, for a matrix: its gradient will be its update."""
        self.matrices.add(weight)

    def allocate(self) -> None:
        """Allocate the state of all weights, zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state_of(param)

    @torch.no_grad()
    def add_gradients(self, beta: float, *, nesterov: bool) -> None:
        """Add the gradients of matrices to their momenta, and put what is orthogonalized in the gradients' places."""
        matrices = [param for group in self.param_groups for param in self._matrices_in(group)]
        if matrices:
            grads = [param.grad for param in matrices]
            momenta = [self.state[param]["exp_avg"] for param in matrices]
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


class MatrixLayout(NamedTuple):
    """How a weight is made of matrices.

    split: over the tensor-parallel ranks. stacked: whether each index of the first axis is a block by itself, whose
    axes `split` counts. matrices: see `MatrixBlock`.
    """

    split: Split
    stacked: bool
    matrices: Callable[[Tensor], list[Tensor]]


def _one(whole: Tensor) -> list[Tensor]:
    return [whole]


def _each(whole: Tensor) -> list[Tensor]:
    return list(whole.unbind(0))


def _halves(whole: Tensor) -> list[Tensor]:
    return list(whole.chunk(2))


def _queries_keys_values(whole: Tensor, groups: int, head: int) -> list[Tensor]:
    """Return the views [g, q x d, H], [g, d, H] and [g, d, H] of the projection of g query groups, [g (q + 2) d, H]."""
    of_group = whole.view(groups, -1, whole.shape[-1])
    return list(of_group.split([of_group.shape[1] - 2 * head, head, head], 1))


def _heads(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return views [w, H] of a projection to heads [n sum(widths), H], for each w of each head."""
    of_head = whole.view(-1, sum(widths), whole.shape[-1])
    return [part for head in of_head.unbind(0) for part in head.split(list(widths))]


def _head_widths(run: Run) -> dict[str, tuple[int, ...]]:
    """Return projection to attention heads -> the rows of each matrix of a head."""
    m = run.model
    if not m.multi_latent_attention:
        return {"linear_qkv": (run.derived.head_size,)}
    query, key_value = (m.qk_head_dim + m.qk_pos_emb_head_dim,), (m.qk_head_dim, m.v_head_dim)
    return {"linear_q_proj": query, "linear_q_up_proj": query, "linear_kv_up_proj": key_value}


def matrices_of(run: Run, chunk: torch.nn.Module) -> dict[str, MatrixLayout]:
    """Return the weights of an unwrapped chunk that Muon updates, by name.

    They are the matrices of attention, of dense layers, of experts and of the merge for further predictions. The router
    and the gate of a shared expert, which are no maps between hidden states, tables, norms and biases are AdamW's.
    """
    found: dict[str, MatrixLayout] = {}
    widths = _head_widths(run) if run.optimizer.muon_split_qkv_per_head else {}
    for name, (_, split) in placement(chunk).items():
        module, parameter = name.split(".")[-2:]
        if parameter == "weight" and (module.startswith("linear_") or module == "eh_proj"):
            found[name] = MatrixLayout(split, False, _one)
            if split.stride == 2:
                found[name] = MatrixLayout(split, False, _halves)
            elif module in widths:
                found[name] = MatrixLayout(split, False, partial(_heads, widths=widths[module]))
            elif module == "linear_qkv" and run.optimizer.muon_split_qkv:
                groups, head = run.derived.num_query_groups, run.derived.head_size
                found[name] = MatrixLayout(split, False, partial(_queries_keys_values, groups=groups, head=head))
    for name, _ in chunk.named_parameters():
        if name.endswith("experts.weight1"):
            found[name] = MatrixLayout(Split(1), True, _each)
        elif name.endswith("experts.weight2"):
            found[name] = MatrixLayout(Split(1), True, _one)
    return {name: layout for name, layout in found.items() if chunk.get_parameter(name).requires_grad}


def mark_matrices(run: Run, chunks: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, MatrixLayout]]:
    """Give the weights of unwrapped chunks that Muon updates two attributes, and return them.

    `orthogonalized` is the number of elements of a block on this tensor-parallel rank, `iteration_flops` what a step of
    the iteration computes, over the elements of the weight on all these ranks.
    """
    found = [
        (chunk.get_parameter(name), layout) for chunk in chunks for name, layout in matrices_of(run, chunk).items()
    ]
    for weight, layout in found:
        shape = tuple(weight.shape[1 if layout.stacked else 0 :])
        tp = run.derived.expert_tensor_parallel_size if layout.stacked else run.parallel.tensor_model_parallel_size
        marked: Any = weight
        marked.orthogonalized = math.prod(shape)
        marked.iteration_flops = _flops_of_block(layout, shape, tp) / (math.prod(shape) * tp)
    return found


class MatrixWeight(NamedTuple):
    """A weight that Muon updates.

    main: what this rank updates of it, with its gradient; None: nothing. adam: the optimizer of `main`. own: the part
    of the weight that `main` is, see `OwnedPart`.
    """

    weight: torch.nn.Parameter
    layout: MatrixLayout
    main: Tensor | None
    adam: Muon | None
    own: tuple[int | None, int, int]


class Orthogonalizer:
    """Replaces the gradients of all matrices of a model by Muon's updates.

    Args:
        options: of the run.
        weights: of this rank, in the same order on all ranks that have parts of them.
        pg: the engine's process groups. Construction is collective over them.
    """

    def __init__(self, options: OptimizerConfig, weights: Sequence[MatrixWeight], pg: ProcessGroupCollection) -> None:
        self._steps = steps_of(options.muon_coefficient_type, options.muon_num_ns_steps)
        self.momentum, self._nesterov = options.muon_momentum, options.muon_nesterov
        self._factor = partial(scale, mode=options.muon_scale_mode, extra=options.muon_extra_scale_factor)
        self._adams = {id(one.adam): one.adam for one in weights if one.adam is not None}
        self._exchanges = [
            MatrixExchange(_blocks_of_all(some, dp, tp.size()), dp, tp, DTYPES[options.muon_fp32_matmul_prec])
            for some, dp, tp in (
                ([one for one in weights if not one.layout.stacked], pg.dp_cp, pg.tp),
                ([one for one in weights if one.layout.stacked], pg.expt_dp, pg.expt_tp),
            )
        ]

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
                alike[_sizes(matrix)].append(matrix)
        for (rows, columns), matrices in alike.items():
            stack = torch.stack([matrix.reshape(rows, columns) for matrix in matrices])
            results = orthogonalized(stack, self._steps, stack.dtype).mul_(self._factor(rows, columns))
            for matrix, result in zip(matrices, results):
                matrix.copy_(result.reshape(matrix.shape))


def orthogonalize_gradients(optimizer: MegatronOptimizer) -> None:
    """Replace the gradients of matrices by their updates, where the optimizer is Muon. Collective over all ranks."""
    orthogonalizer = getattr(optimizer, "orthogonalizer", None)
    if orthogonalizer is not None:
        orthogonalizer.apply()


def update_bytes(
    dtype: torch.dtype, matrices: int, largest: int, dp: int, tp: int, *, replicated: bool, wide: bool
) -> int:
    """Return about what a rank allocates to orthogonalize, as it was measured.

    Args:
        dtype: of the iteration.
        matrices: elements of all matrices on a tensor-parallel rank. largest: those of the largest block, whole.
        dp, tp: ranks of the groups. replicated: whether each data-parallel rank updates all. wide: whether products of
            bf16 numbers are in fp32.
    """
    size = dtype.itemsize
    most = max(min(matrices // dp, ROUND_NUMEL), largest)
    each = max(17.5 if wide else 0.0, 5.0 * size + (size if tp > 1 else 0))
    returned = size * (most + 2 * min(matrices, most * dp)) if replicated and dp > 1 else 0
    return max(round(each * most), returned)


def scale(rows: int, columns: int, *, mode: str, extra: float) -> float:
    """Return the factor on an orthogonalized matrix: `extra` times that of a mode of --muon-scale-mode.

    spectral: sqrt(max(m, n)), which makes the root mean square of an orthogonal matrix's elements 1 (arXiv:2502.16982).
    unit_rms_norm: sqrt(m / n), by which inputs with a root mean square of 1 change outputs as much (arXiv:2410.21265).
    shape_scaling: sqrt(max(1, m / n)), Keller Jordan's.
    """
    modes = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1, rows / columns)}
    return extra * math.sqrt(modes[mode])


# Blocks of weights.


def _blocks_of_all(weights: Sequence[MatrixWeight], dp: ProcessGroup, tp_size: int) -> list[MatrixBlock]:
    """Return the blocks of weights that are spread over a data-parallel group. Collective over it."""
    own = [tuple(one.own) for one in weights]
    everywhere: list[Any] = [None] * dp.size()
    dist.all_gather_object(everywhere, own, group=dp)
    blocks: list[MatrixBlock] = []
    for number, one in enumerate(weights):
        blocks += _blocks(one, [ranks[number] for ranks in everywhere], dp.rank(), tp_size)
    return blocks


def _blocks(one: MatrixWeight, own: Sequence[Any], dp_rank: int, tp_size: int) -> Iterator[MatrixBlock]:
    """Yield the blocks of a weight, of which each data-parallel rank updates the part in `own`."""
    shape, layout = tuple(one.weight.shape), one.layout
    inner = shape[1:] if layout.stacked else shape
    # What is cut along an axis, of a fully sharded model, is on one rank each.
    replicated = sum(end - begin for axis, begin, end in own if axis is None) > math.prod(shape)
    cost = _flops_of_block(layout, inner, tp_size)
    for index in range(shape[0]) if layout.stacked else (None,):
        shares = [_share(shape, *part, index) for part in own]
        here = shares[dp_rank]
        of_blocks = [None if share is None else share.of_block for share in shares]
        of_main = _all if here is None else here.of_main
        yield MatrixBlock(inner, layout.split, layout.matrices, cost, of_blocks, replicated, one.main, of_main)


def _flops_of_block(layout: MatrixLayout, shape: tuple[int, ...], tp_size: int) -> float:
    """Return the FLOPs of a step of the iteration over all matrices of a block, of this shape on each rank of TP."""
    whole = torch.empty(whole_shape(shape, layout.split, tp_size), device="meta")
    return sum(_flops(*_sizes(matrix)) for matrix in layout.matrices(whole))


def _sizes(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[:-1].numel(), matrix.shape[-1]


def _flops(rows: int, columns: int) -> float:
    """Return the FLOPs of a step of the iteration."""
    short, long = sorted((float(rows), float(columns)))
    return 4 * short**2 * long + 2 * short**3


class _Share(NamedTuple):
    """What a rank updates of a block: in a tensor of the block's shape, and in what it updates of the weight."""

    of_block: Part
    of_main: Part


def _share(shape: tuple[int, ...], axis: int | None, begin: int, end: int, index: int | None) -> _Share | None:
    """Return a rank's share of a block of a weight of this shape; None where it has nothing of the block.

    Args:
        axis, begin, end: the part of the weight that the rank updates, see `OwnedPart`.
        index: of the block along the first axis; None: the weight is one block.
    """
    if axis is None:
        numel = math.prod(shape if index is None else shape[1:])
        first = 0 if index is None else index * numel
        low, high = max(begin, first), min(end, first + numel)
        if low >= high:
            return None
        return _Share(partial(_flat, low - first, high - first), partial(_flat, low - begin, high - begin))
    if begin >= end or (axis == 0 and index is not None and not begin <= index < end):
        return None
    if index is None:
        return _Share(partial(_along, axis, begin, end), _all)
    if axis == 0:
        return _Share(_all, partial(_at, index - begin))
    return _Share(partial(_along, axis - 1, begin, end), partial(_at, index))


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _at(index: int, tensor: Tensor) -> Tensor:
    return tensor[index]


def _along(axis: int, begin: int, end: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(axis, begin, end - begin)


def _flat(begin: int, end: int, tensor: Tensor) -> Tensor:
    return tensor.view(-1)[begin:end]
