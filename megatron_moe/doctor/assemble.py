"""From what every rank measured to what the whole model did, and whether ranks that share a tensor agree about it.

A tensor is put together from its cuts. Where several ranks hold the same elements (data parallel, expert data parallel,
context parallel, a weight that tensor-parallel ranks hold whole, both ends of tied embeddings) their bits must be the
same: each took the same reduced gradient and the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_moe.doctor.names import Cut, full_shape, parts

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
class Whole:
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


def assemble(records: Sequence[dict[str, Any]]) -> Whole:
    """Join the ranks' records of one layout."""
    places = [record["place"] for record in records]
    whole = Whole({}, [], set())
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


def _joined(whole: Whole, quantity: str, name: str, owners: list[Any], places: list[Any]) -> Tensor:
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
    whole: Whole, quantity: str, name: str, a: Tensor, b: Tensor, unlike: Tensor, ranks: tuple[int, int], places: Any
) -> None:
    norm = b.double().norm().clamp_min(1e-30)
    error = float(((a.double() - b.double()) * unlike).norm() / norm)
    axes = tuple(axis for axis in AXES if places[ranks[0]][f"{axis}_rank"] != places[ranks[1]][f"{axis}_rank"])
    whole.disagreements.append(Disagreement(quantity, name, step_of(quantity), error, ranks, axes))


def _joined_step(whole: Whole, number: int, steps: Sequence[dict[str, Any]], places: list[Any]) -> dict[str, Any]:
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


def _unequal(whole: Whole, quantity: str, name: str, step: int, ranks: tuple[int, int], places: Any) -> None:
    axes = tuple(axis for axis in AXES if places[ranks[0]][f"{axis}_rank"] != places[ranks[1]][f"{axis}_rank"])
    whole.disagreements.append(Disagreement(quantity, name, step, float("inf"), ranks, axes))
