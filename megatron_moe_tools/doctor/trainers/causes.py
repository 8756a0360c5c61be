"""Mistakes of parallel training that are known, and what each of them looks like.

A row tells which weights' gradients are off, by which factor, and what makes such a factor. The factors are named, so
that "0.5 times" is told as 1 / EP where EP is 2. Where two sizes are equal, all that fit are named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe_tools.doctor.compare import EXPERT, ROUTER, Comparison, factor
from megatron_moe_tools.doctor.measure import AssembledModel, matching_views

_SHARED = re.compile(r"\.shared_experts?\.")
ALL, EXPERTS, SHARED, ROUTERS, DENSE, SOME = (
    "every weight", "routed experts", "shared experts", "routers", "all but routed experts", "some weights",
)  # fmt: skip


@dataclass
class Evidence:
    """What a layout that differs from one process shows.

    Attributes:
        comparison: all differences.
        wanted: one process.
        got: the layout.
        records: every rank's record of the layout.
        agrees_where_even: whether there is no difference when every sequence has as many trained tokens as the others.
    """

    comparison: Comparison
    wanted: AssembledModel
    got: AssembledModel
    records: list[dict[str, Any]]
    agrees_where_even: bool

    @cached_property
    def step(self) -> int:
        """The first step that differs."""
        steps = {one.step for one in self.comparison.differences} - {0}
        return min(steps, default=1)

    @cached_property
    def kinds(self) -> set[str]:
        """The quantities that differ in that step."""
        return {one.quantity.partition(",")[0] for one in self.comparison.differences if one.step == self.step}

    @cached_property
    def before_update(self) -> set[str]:
        """The quantities among them that there are before the weights change."""
        return {kind for kind in self.kinds if "weight after" not in kind}

    @cached_property
    def gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of that step: the layout's, and one process's."""
        quantity = f"gradient, step {self.step}"
        return self.got.tensors[quantity], self.wanted.tensors[quantity]

    @cached_property
    def off(self) -> set[str]:
        """Names of the weights whose gradients differ in that step, as a whole or between ranks."""
        found = set()
        for one in self.comparison.differences:
            if one.step == self.step and one.quantity.startswith(("gradient,", "copies of gradient,")):
                found.add(one.name)
        return found

    @cached_property
    def weights(self) -> str:
        """Which weights' gradients differ."""
        names = set(self.gradients[1])
        experts = set(filter(EXPERT.search, names))
        for kind, members in (
            (ALL, names),
            (EXPERTS, experts),
            (SHARED, set(filter(_SHARED.search, names))),
            (ROUTERS, set(filter(ROUTER.search, names))),
            (DENSE, names - experts),
        ):
            if members and self.off == members:
                return kind
        return SOME

    @cached_property
    def scale(self) -> float | None:
        """The factor of all gradients that are off, if there is one."""
        mine, theirs = self.gradients
        scales = []
        for name in self.off:
            one = None
            if name in mine and name in theirs and mine[name].shape == theirs[name].shape:
                one = factor(mine[name].double(), theirs[name].double())
            if one is None:
                return None
            scales.append(one)
        middle = sorted(scales)[len(scales) // 2] if scales else 1.0
        if any(not math.isclose(one, middle, rel_tol=0.01) for one in scales) or math.isclose(
            middle, 1.0, rel_tol=0.01
        ):
            return None
        return middle

    @cached_property
    def symbols(self) -> list[str]:
        """What the factor may be, of the layout's sizes."""
        sizes = {axis.upper(): number for axis, number in self.records[0]["sizes"].items() if number > 1}
        sizes["all ranks"] = len(self.records)
        found = []
        for name, number in sizes.items():
            for text, value in ((name, float(number)), (f"1 / {name}", 1 / number)):
                if self.scale is not None and math.isclose(self.scale, value, rel_tol=0.01):
                    found.append(text)
        return found

    @cached_property
    def starts_at_a_router(self) -> bool:
        """Whether the backward pass, with the same loss, meets the first wrong gradient at a router."""
        wrong = [name for name in self.gradients[1] if name in self.off]
        return bool(wrong) and ROUTER.search(wrong[-1]) is not None and "loss" not in self.kinds

    @cached_property
    def first_load_differs(self) -> bool:
        """Whether counts differ at the first router already: no other layer's output has led to other choices."""
        first = next(iter(self.wanted.steps[self.step - 1]["layers"]), "")
        differ = {one.name for one in self.comparison.differences if one.step == self.step and "counts" in one.quantity}
        return first in differ

    @cached_property
    def copies_differ(self) -> bool:
        """Whether ranks' copies of a gradient differ in that step."""
        return "copies of gradient" in self.kinds

    @cached_property
    def copies(self) -> str:
        """What ranks' copies of a gradient, which differ, add up to: one process's ("sum"), or a "multiple" of it.

        The ranks that have a copy are compared, all of them. Empty: neither.
        """
        quantity = f"gradient, step {self.step}"
        for one in self.comparison.differences:
            if not one.quantity.startswith("copies of gradient,") or one.step != self.step:
                continue
            exact = self.gradients[1][one.name].double()
            total = torch.zeros_like(exact)
            for record in self.records:
                if one.name in record["tensors"][quantity]:
                    cuts, shard, part = record["tensors"][quantity][one.name]
                    if tuple(part[1:]) != (0, shard.numel()):
                        return ""
                    for sum_there, own in matching_views(total, shard.double(), cuts):
                        sum_there += own
            scale = factor(total, exact)
            if scale is None:
                return ""
            return "sum" if math.isclose(scale, 1.0, rel_tol=0.01) else "multiple"
        return ""


class Mistake(NamedTuple):
    """A known mistake: when the evidence fits it, what it is, and where it was seen."""

    fits: Callable[[Evidence], bool]
    text: str
    seen: str = ""


def _scaled(weights: str, up: bool | None = None) -> Callable[[Evidence], bool]:
    def fits(evidence: Evidence) -> bool:
        scale = evidence.scale
        return evidence.weights == weights and scale is not None and scale != 0 and (up is None or up == (scale > 1))

    return fits


CAUSES = (
    Mistake(
        lambda seen: seen.agrees_where_even and seen.scale is None,
        "means of ranks or micro-batches are averaged, though they are over different numbers of tokens; with as many "
        "trained tokens in each sequence the layout agrees",
        "verl #5867, Megatron-LM #5798",
    ),
    Mistake(
        lambda seen: seen.copies == "sum",
        "each rank keeps its own part of the gradient: it is not summed over the ranks that hold the weight",
        "Megatron-LM #5916",
    ),
    Mistake(
        lambda seen: seen.copies == "multiple",
        "each rank keeps its own gradient: it is not averaged over the ranks that hold the weight",
    ),
    Mistake(_scaled(EXPERTS, up=False), "experts' gradients are averaged over ranks that hold other experts as well"),
    Mistake(
        _scaled(EXPERTS, up=True), "experts' gradients are summed, not averaged", "pytorch #160285, DeepSpeed #6545"
    ),
    Mistake(_scaled(SHARED, up=True), "the shared expert's output is added by each rank, or its gradient summed twice"),
    Mistake(_scaled(SHARED, up=False), "the shared expert's gradient is divided once too often"),
    Mistake(_scaled(ROUTERS), "the router's gradient is summed or averaged over the wrong group"),
    Mistake(
        _scaled(DENSE), "weights that every rank holds are summed or averaged over the wrong group, experts are not"
    ),
    Mistake(
        _scaled(ALL), "the loss's scale: gradients are divided by a wrong number of ranks, micro-batches or tokens"
    ),
    Mistake(
        lambda seen: bool(seen.before_update) and seen.before_update <= {"gradient norm", "copies of gradient norm"},
        "gradients are right, their norm is not: some are counted once per rank, or not at all, and clipping is wrong",
        "Megatron-LM #5916",
    ),
    Mistake(
        lambda seen: seen.starts_at_a_router and seen.scale is None and not seen.copies_differ,
        "an auxiliary loss: its scale, the tokens that it balances, or the group over which load is summed; or a "
        "router does not get the gradient of its experts' weights",
        "Megatron-LM #5047, #2767, transformers #48690",
    ),
    Mistake(
        lambda seen: bool(seen.kinds) and not seen.before_update,
        "gradients and their norm are right, the update is not: clipping, learning rates, weight decay or state",
    ),
    Mistake(
        lambda seen: bool(seen.before_update) and all(kind.endswith(" loss") for kind in seen.before_update),
        "an auxiliary loss is logged otherwise than it is used: one rank's in place of the mean, or another scale",
        "Megatron-LM #3199",
    ),
    Mistake(
        lambda seen: any("copies of weight" in kind for kind in seen.kinds) and not seen.before_update,
        "ranks hold different weights after the update: shards are not gathered, or each rank makes its own update",
    ),
    Mistake(
        lambda seen: seen.first_load_differs,
        "experts' load is counted over the wrong ranks, or tokens go to other experts: another choice, or a capacity "
        "that is one of each rank",
        "Megatron-LM #7452",
    ),
    Mistake(
        lambda seen: {"token counts", "gradient"} <= seen.kinds and "loss" not in seen.kinds,
        "layers that are recomputed from other inputs make other choices than in the forward pass",
    ),
    Mistake(
        lambda seen: bool({"expert_bias", "copies of expert_bias"} & seen.kinds) and "token counts" not in seen.kinds,
        "the load is right, expert_bias is not: ranks update it by their own load, or it is rounded",
        "Megatron-LM #7081",
    ),
)
WHERE = (
    Mistake(
        lambda seen: "loss" in seen.kinds or ("token counts" in seen.kinds and "gradient" not in seen.kinds),
        "the forward pass differs: what ranks add up or exchange in a layer, or which tokens they have",
    ),
    Mistake(
        lambda seen: "gradient" in seen.kinds,
        "the forward pass is right, the backward pass is not: a gradient that ranks exchange, or a layer that is "
        "recomputed from other inputs",
    ),
)
"""Where to look if no known mistake fits."""


_NOT_RESTORED = 0.25
"""Relative error of an update, from which on the weight has lost a step and not only followed from others."""


def not_restored(comparison: Comparison) -> str | None:
    """Return which weights a resumed trainer seems to have from elsewhere; None where none stands out."""
    lost = [one for one in comparison.differences if "weight after" in one.quantity and one.error > _NOT_RESTORED]
    if not lost:
        return None
    names = sorted({one.name for one in lost})
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"not restored, or not by its step: {', '.join(names[:3])}{rest}"


def causes_of(evidence: Evidence) -> Iterator[str]:
    """Yield the known mistakes that the evidence fits; none if the initial weights differ already."""
    if any(one.step == 0 for one in evidence.comparison.differences):
        return
    fitting = [cause for cause in CAUSES if cause.fits(evidence)]
    for cause in fitting or [cause for cause in WHERE if cause.fits(evidence)][:1]:
        text = cause.text
        if evidence.symbols and evidence.weights != SOME:
            text += f" (of {evidence.weights}, {evidence.scale:.3g} times as large: {' or '.join(evidence.symbols)})"
        if cause.seen:
            text += f"; seen in {cause.seen}"
        yield text
