"""From what every rank measured to what the whole model did, and whether ranks that share a tensor agree about it.

A tensor is put together from its cuts. Where several ranks hold the same elements (data parallel, expert data parallel,
context parallel, a weight that tensor-parallel ranks hold whole, both ends of tied embeddings) their bits must be the
same: each took the same reduced gradient and the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.model.initialize import global_name, placement
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.router import TopKRouter

# ---- Where a rank's tensors belong in the whole model: names without layout in them, and the cuts that lead to a rank.


class Cut(NamedTuple):
    """One step from a full tensor to a rank's: `axis` is cut into `stride` blocks, each block into `parts` equal parts,
    and the rank has part number `part` of every block."""

    axis: int
    part: int
    parts: int
    stride: int


class ParameterPlace(NamedTuple):
    """A parameter's name in the whole model, and its cuts; none for a tensor that the rank holds whole."""

    name: str
    cuts: tuple[Cut, ...]


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model in its wrappers, each of which holds what it wraps as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def parameter_places(chunk: torch.nn.Module) -> list[tuple[ParameterPlace, torch.nn.Parameter]]:
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
        found.append((ParameterPlace(full_name, cuts), parameter))
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


# ----


_SAID = {"grad_norm": "gradient norm", "loss_scale": "loss scale"}
AXES = ("tp", "pp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True)
class Disagreement:
    """Two ranks that should hold the same and do not."""

    quantity: str
    name: str
    step: int
    error: float
    ranks: tuple[int, int]
    axes: tuple[str, ...]
    """Axes of the layout along which the two ranks differ."""


@dataclass
class AssembledModel:
    """One layout's result: tensors by quantity and name, steps as one rank would tell them, and disagreements."""

    tensors: dict[str, dict[str, Tensor]]
    steps: list[dict[str, Any]]
    cut_over_tp: set[str] = field(default_factory=set)
    disagreements: list[Disagreement] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(quantity, name) of tensors of which no rank had some element."""

    @property
    def smallest_margin(self) -> float:
        """How near any choice of experts came to falling otherwise."""
        return min((layer["margin"] for step in self.steps for layer in step["layers"].values()), default=float("inf"))


def assemble(records: Sequence[dict[str, Any]]) -> AssembledModel:
    """Join the ranks' records of one layout."""
    places = [record["place"] for record in records]
    whole = AssembledModel({}, [], set())
    for quantity in records[0]["tensors"]:
        held = [record["tensors"][quantity] for record in records]
        names = dict.fromkeys(name for rank in held for name in rank)
        whole.tensors[quantity] = {}
        for name in names:
            owners = [(rank, *held[rank][name]) for rank in range(len(records)) if name in held[rank]]
            whole.tensors[quantity][name] = _joined(whole, quantity, name, owners, places)
    for number, steps in enumerate(zip(*(record["steps"] for record in records)), start=1):
        whole.steps.append(_joined_step(whole, number, steps, places))
    return whole


def step_of(quantity: str) -> int:
    """The step that a tensor quantity belongs to, 0 for what there was before the first."""
    last = quantity.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _joined(whole: AssembledModel, quantity: str, name: str, owners: list[Any], places: list[Any]) -> Tensor:
    """The full tensor out of (rank, cuts, local tensor, begin, end) of every rank that has some of it."""
    by_cut: dict[tuple[Cut, ...], list[Any]] = {}
    for rank, cuts, local, begin, end in owners:
        by_cut.setdefault(tuple(Cut(*cut) for cut in cuts), []).append((rank, local, begin, end))
    first = owners[0]
    full = torch.full(full_shape(first[2], next(iter(by_cut))), torch.nan, dtype=first[2].dtype)
    for cuts, holders in by_cut.items():
        if cuts and len(cuts) == 1 and cuts[0].parts > 1:
            whole.cut_over_tp.add(name)
        local = torch.full_like(holders[0][1], torch.nan).flatten()
        source = torch.full(local.shape, -1, dtype=torch.int16)
        for rank, tensor, begin, end in holders:
            mine, known = tensor.flatten()[begin:end], source[begin:end]
            twice = known >= 0
            if bool(twice.any()):
                other = local[begin:end]
                unlike = twice & (mine != other) & ~(mine.isnan() & other.isnan())
                if bool(unlike.any()):
                    _disagree(whole, quantity, name, mine, other, unlike, (int(known[unlike][0]), rank), places)
            fresh = ~twice
            local[begin:end] = torch.where(fresh, mine, local[begin:end])
            source[begin:end] = torch.where(fresh, torch.full_like(known, rank), known)
        if bool((source < 0).any()):
            whole.missing.append((quantity, name))
        for target, own in parts(full, local.view_as(holders[0][1]), cuts):
            target.copy_(own)
    return full


def _disagree(
    whole: AssembledModel,
    quantity: str,
    name: str,
    a: Tensor,
    b: Tensor,
    unlike: Tensor,
    ranks: tuple[int, int],
    places: Any,
) -> None:
    norm = b.double().norm().clamp_min(1e-30)
    error = float(((a.double() - b.double()) * unlike).norm() / norm)
    axes = tuple(axis for axis in AXES if places[ranks[0]][f"{axis}_rank"] != places[ranks[1]][f"{axis}_rank"])
    whole.disagreements.append(Disagreement(quantity, name, step_of(quantity), error, ranks, axes))


def _joined_step(
    whole: AssembledModel, number: int, steps: Sequence[dict[str, Any]], places: list[Any]
) -> dict[str, Any]:
    """One step as rank 0 tells it, with the layers of all ranks; what ranks tell twice must be the same."""
    joined = {**steps[0], "layers": {}}
    teller: dict[str, int] = {}
    for rank, step in enumerate(steps):
        for key in ("loss", "tokens", "grad_norm", "committed", "loss_scale", "mtp_losses"):
            if step[key] != joined[key] and step[key] == step[key]:
                _unequal(whole, _SAID.get(key, key), "", number, (0, rank), places)
        for name, layer in step["layers"].items():
            if name not in joined["layers"]:
                joined["layers"][name], teller[name] = dict(layer), rank
                continue
            known, ranks = joined["layers"][name], (teller[name], rank)
            known["margin"] = min(known["margin"], layer["margin"])
            known["router_error"] = max(known["router_error"], layer["router_error"])
            for key, quantity in (("counts", "token counts"), ("dropped", "dropped choices")):
                if not torch.equal(known[key], layer[key]):
                    _unequal(whole, quantity, name, number, ranks, places)
            if known["expert_bias"] is not None and not torch.equal(known["expert_bias"], layer["expert_bias"]):
                _unequal(whole, "expert_bias", name, number, ranks, places)
    return joined


def _unequal(whole: AssembledModel, quantity: str, name: str, step: int, ranks: tuple[int, int], places: Any) -> None:
    axes = tuple(axis for axis in AXES if places[ranks[0]][f"{axis}_rank"] != places[ranks[1]][f"{axis}_rank"])
    whole.disagreements.append(Disagreement(quantity, name, step, float("inf"), ranks, axes))
