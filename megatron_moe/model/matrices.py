"""The weights of a model that are matrices to Muon: how each is made of matrices, and what an update of it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_moe.config.schema import Run
from megatron_moe.model.initialize import Split, placement, whole_shape


class MatrixLayout(NamedTuple):
    """How a weight is made of matrices.

    split: over the tensor-parallel ranks. stacked: whether each index of the first axis is a block by itself, whose
    axes `split` counts. matrices: see `MatrixBlock`.
    """

    split: Split
    stacked: bool
    matrices: Callable[[Tensor], Sequence[Tensor]]


def _one(whole: Tensor) -> list[Tensor]:
    return [whole]


def _queries_keys_values(whole: Tensor, groups: int, head: int) -> list[Tensor]:
    """Return the views [g, q x d, H], [g, d, H] and [g, d, H] of the projection of g query groups, [g (q + 2) d, H]."""
    of_group = whole.view(groups, -1, whole.shape[-1])
    return list(of_group.split([of_group.shape[1] - 2 * head, head, head], 1))


def _heads(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return views [w, H] of a projection to heads [n sum(widths), H], for each w of each head."""
    of_head = whole.view(-1, sum(widths), whole.shape[-1])
    return [part for head in of_head.unbind(0) for part in head.split(list(widths))]


def matrices_of(run: Run, chunk: torch.nn.Module) -> dict[str, MatrixLayout]:
    """Return the weights of an unwrapped chunk that Muon updates, by name.

    They are the matrices of attention, of dense layers, of experts and of the merge for further predictions. The router
    and the gate of a shared expert, which are no maps between hidden states, tables, norms and biases are AdamW's.
    """
    found: dict[str, MatrixLayout] = {}
    m = run.model
    widths: dict[str, tuple[int, ...]] = {}  # projection to attention heads -> the rows of each matrix of a head
    if run.optimizer.muon_split_qkv_per_head and not m.multi_latent_attention:
        widths = {"linear_qkv": (run.derived.head_size,)}
    elif run.optimizer.muon_split_qkv_per_head:
        query, key_value = (m.qk_head_dim + m.qk_pos_emb_head_dim,), (m.qk_head_dim, m.v_head_dim)
        widths = {"linear_q_proj": query, "linear_q_up_proj": query, "linear_kv_up_proj": key_value}
    for name, (_, split) in placement(chunk).items():
        module, parameter = name.split(".")[-2:]
        if parameter == "weight" and (module.startswith("linear_") or module == "eh_proj"):
            found[name] = MatrixLayout(split, False, _one)
            if split.stride == 2:
                found[name] = MatrixLayout(split, False, partial(torch.chunk, chunks=2))
            elif module in widths:
                found[name] = MatrixLayout(split, False, partial(_heads, widths=widths[module]))
            elif module == "linear_qkv" and run.optimizer.muon_split_qkv:
                groups, head = run.derived.num_query_groups, run.derived.head_size
                found[name] = MatrixLayout(split, False, partial(_queries_keys_values, groups=groups, head=head))
    for name, _ in chunk.named_parameters():
        if name.endswith("experts.weight1"):
            found[name] = MatrixLayout(Split(1), True, torch.unbind)
        elif name.endswith("experts.weight2"):
            found[name] = MatrixLayout(Split(1), True, _one)
    return {name: layout for name, layout in found.items() if chunk.get_parameter(name).requires_grad}


@dataclass(frozen=True)
class MatrixCost:
    """What Muon takes for a weight: elements of a block, and FLOPs of a step of the iteration per element.

    block_numel: on this tensor-parallel rank. flops: over the elements of the weight on all these ranks.
    """

    block_numel: int
    flops: float


_COSTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mark_matrices(run: Run, chunks: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, MatrixLayout]]:
    """Return the weights of unwrapped chunks that Muon updates, and remember what each costs (`matrix_cost`)."""
    found = []
    for chunk in chunks:
        for name, layout in matrices_of(run, chunk).items():
            weight = chunk.get_parameter(name)
            shape = tuple(weight.shape[1 if layout.stacked else 0 :])
            tp = run.derived.expert_tensor_parallel_size if layout.stacked else run.parallel.tensor_model_parallel_size
            numel = math.prod(shape)
            _COSTS[weight] = MatrixCost(numel, flops_of_block(layout, shape, tp) / (numel * tp))
            found.append((weight, layout))
    return found


def matrix_cost(weight: Tensor) -> MatrixCost | None:
    """Return what a weight that Muon updates, which has no second moment, costs it; None for any other weight."""
    return _COSTS.get(weight)


def flops_of_block(layout: MatrixLayout, shape: tuple[int, ...], tp_size: int) -> float:
    """Return the FLOPs of a step of the iteration over all matrices of a block, of this shape on each rank of TP."""
    whole = torch.empty(whole_shape(shape, layout.split, tp_size), device="meta")
    flops = 0.0
    for matrix in layout.matrices(whole):
        short, long = sorted(map(float, sizes_of(matrix)))
        flops += 4 * short**2 * long + 2 * short**3
    return flops


def sizes_of(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[:-1].numel(), matrix.shape[-1]
