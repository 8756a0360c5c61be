"""Where a rank's tensors belong in the whole model: names without layout in them, and the cuts that lead to a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.model.initialize import global_name, placement
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.router import TopKRouter


class Cut(NamedTuple):
    """One step from a full tensor to a rank's: `axis` is cut into `stride` blocks, each block into `parts` equal parts,
    and the rank has part number `part` of every block."""

    axis: int
    part: int
    parts: int
    stride: int


class Place(NamedTuple):
    """A parameter's name in the whole model, and its cuts; none for a tensor that the rank holds whole."""

    name: str
    cuts: tuple[Cut, ...]


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model in its wrappers, each of which holds what it wraps as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def parameter_places(chunk: torch.nn.Module) -> list[tuple[Place, torch.nn.Parameter]]:
    """Every parameter of one model chunk of this rank, wrapped or not, with its place in the whole model.

    Raises:
        TypeError: for experts whose tensors have no known cut (Transformer Engine's: one tensor per expert).
    """
    model = unwrapped(chunk)
    tp, whole = model.pg_collection.tp, placement(model)
    found = []
    for name, parameter in model.named_parameters():
        if name in whole:
            full_name, split = whole[name]
            cuts: tuple[Cut, ...] = () if split.axis is None else (Cut(split.axis, tp.rank(), tp.size(), split.stride),)
        else:
            experts = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(experts, GroupedExperts):
                raise TypeError(f"{name} of {type(experts).__name__}: cuts are known of GroupedExperts only")
            groups, full_name = experts.groups, global_name(model, name)
            cuts = (Cut(0, groups.ep_rank, groups.ep_size, 1), Cut(2, groups.etp_rank, groups.etp_size, 1))
        found.append((Place(full_name, cuts), parameter))
    return found


def router_names(chunk: torch.nn.Module) -> list[tuple[str, TopKRouter]]:
    """Every router of one chunk with its layer's name in the whole model, in the order of `moe.state.routers`."""
    model = unwrapped(chunk)
    return [
        (global_name(model, name + ".").removesuffix(".mlp.router."), module)
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter)
    ]


def parts(full: Tensor, local: Tensor, cuts: tuple[Cut, ...]) -> list[tuple[Tensor, Tensor]]:
    """Views of a full tensor and of a rank's tensor that hold the same elements, pair by pair."""
    views = [(full, local)]
    for axis, index, count, stride in cuts:
        views = [
            (block.chunk(count, axis)[index], own)
            for whole, mine in views
            for block, own in zip(whole.chunk(stride, axis), mine.chunk(stride, axis))
        ]
    return views


def full_shape(local: Tensor, cuts: tuple[Cut, ...]) -> list[int]:
    """Shape of the tensor that `local` was cut out of."""
    shape = list(local.shape)
    for cut in cuts:
        shape[cut.axis] *= cut.parts
    return shape
