"""Assemble the whole model's tensors and steps from the ranks' records, and compare what several ranks hold.

A tensor is assembled from its shards. Where several ranks hold the same elements (data parallel, expert data parallel,
context parallel, a weight that tensor-parallel ranks hold whole, both ends of tied embeddings) their bits must be the
same: each rank took the same reduced gradient and the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.model.initialize import global_name, placement
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.router import TopKRouter
from megatron_moe.optim.optimizer import OwnedPart

# Shards: which part of which tensor of the whole model a rank holds.


class Cut(NamedTuple):
    """One cut on the way from a full tensor to a rank's shard.

    `axis` is cut into `stride` blocks, each block into `parts` equal parts; the rank has part `part` of every block.
    """

    axis: int
    part: int
    parts: int
    stride: int


class ParameterShard(NamedTuple):
    """A parameter's name in the whole model, which no layout changes, and its cuts; none if the rank holds it whole."""

    name: str
    cuts: tuple[Cut, ...]


def unwrapped(chunk: torch.nn.Module) -> Any:
    """Return the model inside its wrappers, each of which holds what it wraps as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def parameter_shards(chunk: torch.nn.Module) -> list[tuple[ParameterShard, torch.nn.Parameter]]:
    """Return every parameter of one model chunk of this rank, wrapped or not, with its shard of the whole model.

    Raises:
        TypeError: experts' tensors have no known cut (those of a registered backend that is no GroupedExperts).
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
        found.append((ParameterShard(full_name, cuts), parameter))
    return found


def router_names(chunk: torch.nn.Module) -> list[tuple[str, TopKRouter]]:
    """Return every router of one chunk and its layer's name in the whole model, in the order of `routers`."""
    model = unwrapped(chunk)
    return [
        (global_name(model, name + ".").removesuffix(".mlp.router."), module)
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter)
    ]


def matching_views(full: Tensor, local: Tensor, cuts: tuple[Cut, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of views, of a full tensor and of a rank's tensor, that hold the same elements."""
    views = [(full, local)]
    for axis, index, count, stride in cuts:
        views = [
            (block.chunk(count, axis)[index], own)
            for whole, mine in views
            for block, own in zip(whole.chunk(stride, axis), mine.chunk(stride, axis))
        ]
    return views


def full_shape(local: Tensor, cuts: tuple[Cut, ...]) -> list[int]:
    """Return the shape of the tensor that `local` was cut out of."""
    shape = list(local.shape)
    for cut in cuts:
        shape[cut.axis] *= cut.parts
    return shape


# Assembling.

_QUANTITIES = {"grad_norm": "gradient norm", "loss_scale": "loss scale"}
AXES = ("tp", "pp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True)
class Disagreement:
    """A quantity that two ranks should hold with the same bits and do not."""

    quantity: str
    name: str
    step: int
    error: float
    ranks: tuple[int, int]
    axes: tuple[str, ...]
    """Axes of the layout along which the two ranks differ."""


@dataclass
class AssembledModel:
    """The result of one layout: tensors by quantity and name, steps as one process would report them, disagreements."""

    tensors: dict[str, dict[str, Tensor]]
    steps: list[dict[str, Any]]
    cut_over_tp: set[str] = field(default_factory=set)
    disagreements: list[Disagreement] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(quantity, name) of tensors of which no rank had some element."""

    @property
    def smallest_margin(self) -> float:
        """The smallest distance of any choice of an expert from its alternative."""
        return min((layer["margin"] for step in self.steps for layer in step["layers"].values()), default=float("inf"))


def assemble(records: Sequence[dict[str, Any]]) -> AssembledModel:
    """Assemble the ranks' records of one layout."""
    coordinates = [record["place"] for record in records]
    whole = AssembledModel({}, [], set())
    for quantity in records[0]["tensors"]:
        per_rank = [record["tensors"][quantity] for record in records]
        names = dict.fromkeys(name for rank in per_rank for name in rank)
        whole.tensors[quantity] = {}
        for name in names:
            owners = [(rank, *per_rank[rank][name]) for rank in range(len(records)) if name in per_rank[rank]]
            whole.tensors[quantity][name] = _assemble_tensor(whole, quantity, name, owners, coordinates)
    for number, steps in enumerate(zip(*(record["steps"] for record in records)), start=1):
        whole.steps.append(_merge_step(whole, number, steps, coordinates))
    return whole


def step_of(quantity: str) -> int:
    """Return the step that a tensor quantity belongs to; 0 for what there was before the first."""
    last = quantity.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _assemble_tensor(
    whole: AssembledModel, quantity: str, name: str, owners: list[Any], coordinates: list[Any]
) -> Tensor:
    """Return the full tensor, given (rank, cuts, local tensor, owned part) of every rank that has some of it."""
    by_cut: dict[tuple[Cut, ...], list[Any]] = {}
    for rank, cuts, local, part in owners:
        by_cut.setdefault(tuple(Cut(*cut) for cut in cuts), []).append((rank, local, OwnedPart(*part)))
    first = owners[0]
    full = torch.full(full_shape(first[2], next(iter(by_cut))), torch.nan, dtype=first[2].dtype)
    for cuts, holders in by_cut.items():
        if cuts and len(cuts) == 1 and cuts[0].parts > 1:
            whole.cut_over_tp.add(name)
        local = torch.full_like(holders[0][1], torch.nan)
        source = torch.full(local.shape, -1, dtype=torch.int16)
        for rank, tensor, part in holders:
            mine, other, known = part.of(tensor), part.of(local), part.of(source)
            twice = known >= 0
            if bool(twice.any()):
                unlike = twice & (mine != other) & ~(mine.isnan() & other.isnan())
                if bool(unlike.any()):
                    difference = (mine.double() - other.double()) * unlike
                    error = float(difference.norm() / other.double().norm().clamp_min(1e-30))
                    ranks = (int(known[unlike][0]), rank)
                    _disagree(whole, quantity, name, step_of(quantity), error, ranks, coordinates)
            fresh = ~twice
            other.copy_(torch.where(fresh, mine, other))
            known.copy_(torch.where(fresh, torch.full_like(known, rank), known))
        if bool((source < 0).any()):
            whole.missing.append((quantity, name))
        for target, own in matching_views(full, local, cuts):
            target.copy_(own)
    return full


def _merge_step(
    whole: AssembledModel, number: int, steps: Sequence[dict[str, Any]], coordinates: list[Any]
) -> dict[str, Any]:
    """Return one step as rank 0 reports it, with the layers of all ranks; what several ranks report must be equal."""
    joined = {**steps[0], "layers": {}}
    first_rank: dict[str, int] = {}
    for rank, step in enumerate(steps):
        for key in ("loss", "tokens", "grad_norm", "committed", "loss_scale", "mtp_losses"):
            if step[key] != joined[key] and step[key] == step[key]:
                _disagree(whole, _QUANTITIES.get(key, key), "", number, math.inf, (0, rank), coordinates)
        for name, layer in step["layers"].items():
            if name not in joined["layers"]:
                joined["layers"][name], first_rank[name] = dict(layer), rank
                continue
            known, ranks = joined["layers"][name], (first_rank[name], rank)
            known["margin"] = min(known["margin"], layer["margin"])
            known["router_error"] = max(known["router_error"], layer["router_error"])
            for key, quantity in (("counts", "token counts"), ("dropped", "dropped choices")):
                if not torch.equal(known[key], layer[key]):
                    _disagree(whole, quantity, name, number, math.inf, ranks, coordinates)
            if known["expert_bias"] is not None and not torch.equal(known["expert_bias"], layer["expert_bias"]):
                _disagree(whole, "expert_bias", name, number, math.inf, ranks, coordinates)
    return joined


def _disagree(
    whole: AssembledModel,
    quantity: str,
    name: str,
    step: int,
    error: float,
    ranks: tuple[int, int],
    coordinates: list[dict[str, int]],
) -> None:
    """Record that two ranks hold a quantity with other bits."""
    a, b = coordinates[ranks[0]], coordinates[ranks[1]]
    axes = tuple(axis for axis in AXES if a[f"{axis}_rank"] != b[f"{axis}_rank"])
    whole.disagreements.append(Disagreement(quantity, name, step, error, ranks, axes))
