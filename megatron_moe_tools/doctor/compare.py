"""Compare a layout's result with the oracle's: what differs, by how much, how much is allowed, and what it points to.

In fp32 two layouts add the same products in another order. That moves a loss or a norm by some 1e-7 of itself and a
gradient by some 1e-6 of its norm. The tolerances are a decade or more above that, and far below what a missing
reduction, a wrong scale or a lost token does. Counts, expert_bias and initial weights are compared bit for bit.

In half precision every result is rounded, and two layouts round different sums. How far apart that brings them follows
from the format and from the number of roundings on the way (`tolerances_of`). Loss scale, applied steps, counts and
expert_bias are the same numbers in any format.

`matching_patterns` then says what was seen and which fault such a pattern fits; it does not claim a cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.schema import Run
from megatron_moe_tools.doctor.assemble import AssembledModel, step_of


@dataclass(frozen=True)
class Tolerances:
    """The largest relative errors that do not count as a difference.

    Attributes:
        scalar: error of loss, gradient norm and auxiliary losses.
        gradient: norm of a gradient's error over the norm of the gradient. A gradient smaller than `floor` of the joint
            norm is measured against that share of it: what is almost nothing has no digits of its own.
        update: norm of the error of what the steps added to a weight, over the norm of what they added, or over one
            rounding of the weight where they added less. Adam divides by the gradient's own size, so entries that are
            almost zero may step either way.
        router: error of what a router computes in fp32 from its hidden states and weight, whatever their dtype.
        floor: share of the joint gradient norm, see `gradient`.
        flips: number of choices of experts that may differ in a layer and step; above 0, expert_bias may differ by
            one update per expert concerned.
    """

    scalar: float = 1e-5
    gradient: float = 1e-4
    update: float = 2e-2
    router: float = 1e-5
    floor: float = 1e-3
    flips: int = 0


FP32 = Tolerances()
_ROUNDINGS_PER_LAYER = 36
"""Approximate number of roundings on a gradient's way through a layer, forward and backward."""
_EXPERT = re.compile(r"\.experts\.(expert\d+\.)?weight[12]$")


def unit_roundoff(run: Run) -> float:
    """Return the largest relative error of rounding to the run's dtype: 2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32."""
    return torch.finfo(getattr(torch, run.derived.params_dtype_name)).eps / 2


def rounding_error(run: Run) -> float:
    """Return how far gradients of two runs in the run's dtype may be apart, relative to their norm, by rounding alone.

    A rounding is off by at most u of the number, by u / sqrt(3) in the mean square. Those on the way through all layers
    are independent, and so are those of the two runs: u sqrt(2 x 36 L / 3), for L layers.
    """
    layers = run.model.num_layers + (run.model.mtp_num_layers or 0)
    return unit_roundoff(run) * (2 * _ROUNDINGS_PER_LAYER * layers / 3) ** 0.5


def tolerances_of(run: Run) -> Tolerances:
    """Return the tolerances for a run: in fp32 as measured, in half precision twice the error that roundings add up to.

    Adam's first steps have the size of the learning rate and the gradient's sign. An error of e times the gradient's
    root mean square turns the sign of about 0.4 e of the elements, each of which is then 2 off: 1.3 sqrt(e) in norm.
    Allowed are 2 sqrt(e).
    """
    if run.derived.params_dtype_name == "float32":
        return FP32
    gradient = 2 * rounding_error(run)
    return Tolerances(scalar=unit_roundoff(run), gradient=gradient, update=2 * gradient**0.5)


@dataclass(frozen=True)
class LayoutDifference:
    """A quantity that was compared with the oracle's.

    Attributes:
        quantity: what was compared, e.g. "gradient, step 1".
        name: which tensor or layer, where there are several.
        step: the step from 1; 0 for the weights before the first.
        error: relative error; largest absolute difference where bits are compared.
        allowed: tolerance of the error; 0 where bits are compared.
        detail: the values, or what is known about the difference.
    """

    quantity: str
    name: str
    step: int
    error: float
    allowed: float
    detail: str = ""

    @property
    def badness(self) -> float:
        """The error over what is allowed; infinite for bits that differ and for NaN."""
        return self.error / self.allowed if self.allowed and self.error == self.error else float("inf")


@dataclass(frozen=True)
class Comparison:
    """All differences, by step and within a step worst first, and the largest error of each kind of quantity."""

    differences: list[LayoutDifference]
    largest: dict[str, float]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances = FP32) -> Comparison:
    """Compare everything that a layout did with what the oracle did."""
    measured = [*_scalars(got, wanted, tolerances.scalar), *_layers(got, wanted, tolerances)]
    measured += [*_tensors(got, wanted, tolerances)]
    largest: dict[str, float] = {}
    for one in measured:
        kind = one.quantity.partition(",")[0].partition(" after")[0]
        largest[kind] = max(largest.get(kind, 0.0), one.error)
    differences = [one for one in measured if not one.error <= one.allowed]
    for pair in got.disagreements:
        along = " and ".join(axis.upper() for axis in pair.axes) or "no axis"
        detail = f"ranks {pair.ranks[0]} and {pair.ranks[1]}, which differ along {along}, should hold the same bits"
        differences.append(
            LayoutDifference(f"copies of {pair.quantity}", pair.name, pair.step, pair.error, 0.0, detail)
        )
    differences += [
        LayoutDifference(quantity, name, step_of(quantity), float("inf"), 0.0, "no rank has all of it")
        for quantity, name in got.missing
    ]
    differences.sort(key=lambda one: (one.step, -one.badness, -one.error))
    return Comparison(differences, largest)


def _relative(got: float, wanted: float) -> float:
    same = got == wanted or (got != got and wanted != wanted)
    return 0.0 if same else abs(got - wanted) / max(abs(wanted), 1e-30)


def _scalars(got: AssembledModel, wanted: AssembledModel, scalar: float) -> Iterator[LayoutDifference]:
    for number, (mine, theirs) in enumerate(zip(got.steps, wanted.steps, strict=True), start=1):
        for key, quantity in (("loss", "loss"), ("grad_norm", "gradient norm")):
            detail = f"{mine[key]:.9g}, the oracle's {theirs[key]:.9g}"
            yield LayoutDifference(quantity, "", number, _relative(mine[key], theirs[key]), scalar, detail)
        for depth, (a, b) in enumerate(zip(mine["mtp_losses"], theirs["mtp_losses"], strict=True), start=1):
            detail = f"{a:.9g}, the oracle's {b:.9g}"
            yield LayoutDifference(
                "loss of multi-token prediction", f"depth {depth}", number, _relative(a, b), scalar, detail
            )
        exact = {"tokens": "tokens of the batch", "committed": "step applied", "loss_scale": "loss scale"}
        for key, quantity in exact.items():
            if mine[key] is None or theirs[key] is None:
                continue  # one of the two needs no loss scale
            detail = f"{mine[key]}, the oracle's {theirs[key]}"
            yield LayoutDifference(quantity, "", number, float(abs(mine[key] - theirs[key])), 0.0, detail)


def _layers(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances) -> Iterator[LayoutDifference]:
    for number, (mine, theirs) in enumerate(zip(got.steps, wanted.steps, strict=True), start=1):
        for name in sorted({*mine["layers"], *theirs["layers"]}):
            if name not in mine["layers"] or name not in theirs["layers"]:
                yield LayoutDifference(
                    "token counts", name, number, float("inf"), 0.0, "one of the two has no such layer"
                )
                continue
            layer, oracle = mine["layers"][name], theirs["layers"][name]
            for key, quantity in (("counts", "token counts"), ("dropped", "dropped choices")):
                off = layer[key] - oracle[key]
                total, meant = int(layer[key].sum()), int(oracle[key].sum())
                detail = f"{total} choices in all, the oracle's {meant}; expert by expert off by {off.tolist()}"
                flips = int(off.abs().sum()) / 2 if total == meant else float("inf")
                yield LayoutDifference(quantity, name, number, flips, tolerances.flips, detail)
            if layer["expert_bias"] is not None:
                moved = (layer["expert_bias"] - oracle["expert_bias"]).double().abs()
                same = torch.equal(layer["expert_bias"].view(torch.int32), oracle["expert_bias"].view(torch.int32))
                error = 0.0 if same or tolerances.flips else float(moved.max())
                detail = f"{int((moved > 0).sum())} of {moved.numel()} experts differ, by at most {error:.3g}"
                yield LayoutDifference("expert_bias", name, number, error, 0.0, detail)
            detail = "its logits and weights against fp64, from the same hidden states"
            yield LayoutDifference("router", name, number, layer["router_error"], tolerances.router, detail)
            for loss in sorted({*layer["aux_losses"], *oracle["aux_losses"]}):
                a, b = (side["aux_losses"].get(loss, float("nan")) for side in (layer, oracle))
                detail = f"{a:.9g}, the oracle's {b:.9g}"
                yield LayoutDifference(loss.replace("_", " "), name, number, _relative(a, b), tolerances.scalar, detail)


def _tensors(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances) -> Iterator[LayoutDifference]:
    start, oracle_start = got.tensors["initial weight"], wanted.tensors["initial weight"]
    for quantity, theirs in wanted.tensors.items():
        if quantity not in got.tensors:
            continue  # an overflow, which the oracle did not have: the step was not applied
        mine, step = got.tensors[quantity], step_of(quantity)
        total = float(torch.stack([t.double().norm() for t in theirs.values()]).norm())
        for name in sorted({*mine, *theirs}):
            if name not in mine or name not in theirs:
                yield LayoutDifference(quantity, name, step, float("inf"), 0.0, "one of the two has no such tensor")
                continue
            a, b = mine[name].double(), theirs[name].double()
            if quantity == "initial weight":
                error = 0.0 if torch.equal(a, b) else float((a - b).abs().max())
                yield LayoutDifference(quantity, name, step, error, 0.0, "largest difference of an element")
                continue
            floor, allowed = tolerances.floor * total, tolerances.gradient
            if "weight after" in quantity:
                # One rounding of every element in its own dtype: a smaller step cannot be seen.
                floor = float(torch.finfo(theirs[name].dtype).eps * b.norm())
                a, b, allowed = a - start[name].double(), b - oracle_start[name].double(), tolerances.update
            error = float((a - b).norm() / b.norm().clamp_min(max(floor, 1e-30)))
            yield LayoutDifference(quantity, name, step, error, allowed, factor_text(a, b) if error > allowed else "")


def factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return the factor by which `got` is a multiple of `wanted`, to one per cent; None where it is no multiple."""
    square = float((wanted * wanted).sum())
    if not square:
        return None
    scale = float((got * wanted).sum()) / square
    return scale if float((got - scale * wanted).norm()) < 0.01 * max(abs(scale), 0.01) * square**0.5 else None


def factor_text(got: Tensor, wanted: Tensor) -> str:
    """Return words for a tensor that is zero or a multiple of the oracle's; otherwise an empty text."""
    if float(got.abs().max()) == 0.0:
        return "all zeros"
    scale = factor(got, wanted)
    return f"{times(scale)} the oracle's" if scale is not None and abs(scale - 1) > 1e-3 else ""


def times(scale: float) -> str:
    """Return words for a factor: the power of two that it is to 0.1 per cent, as a loss's scale is, or three digits."""
    power = math.copysign(2.0 ** round(math.log2(abs(scale))), scale) if scale else scale
    return f"{power:g} times" if math.isclose(scale, power, rel_tol=1e-3) else f"{scale:.3g} times"


# Patterns in a set of differences.


def matching_patterns(
    got: AssembledModel, wanted: AssembledModel, comparison: Comparison, *, one_process: bool = False
) -> list[str]:
    """Return sentences about the first step that differs; none where no known pattern fits.

    Args:
        got: the layout's result.
        wanted: the oracle's result.
        comparison: their differences.
        one_process: whether both sides are one process, with its batch cut or averaged in two ways.
    """
    if comparison.agrees:
        return []
    first = comparison.differences[0].step
    here = [one for one in comparison.differences if one.step == first]
    if one_process:
        return [*_batches(here)]
    return [*_starts(here), *_copies(here), *_counts(here, got, wanted), *_gradients(here, got, wanted)]


def _batches(here: list[LayoutDifference]) -> Iterator[str]:
    quantities = {one.quantity for one in here}
    if "loss" not in quantities and any(one.startswith("gradient,") for one in quantities):
        logged = sorted(one for one in quantities if one.endswith("loss"))
        shown = f"{', '.join(logged)} too" if logged else "the auxiliary losses as they are logged neither"
        yield (
            "the loss does not differ, gradients do, "
            f"{shown}: what joins the gradient in addition to the loss, an auxiliary loss or a further prediction, is"
            " not weighed per token of the global batch"
        )


def _starts(here: list[LayoutDifference]) -> Iterator[str]:
    wrong = [one.name for one in here if one.quantity == "initial weight"]
    if wrong:
        only = " (routed experts only)" if all(_EXPERT.search(name) for name in wrong) else ""
        yield f"{len(wrong)} weights{only} differ before the first step: how they are initialised depends on the layout"


def _copies(here: list[LayoutDifference]) -> Iterator[str]:
    copies = [one for one in here if one.quantity.startswith("copies of")]
    if copies:
        along = sorted({one.detail.partition(" along ")[2].partition(",")[0] for one in copies})
        yield f"copies differ between ranks along {', '.join(along)}: a reduction or broadcast over that group is amiss"


def _counts(here: list[LayoutDifference], got: AssembledModel, wanted: AssembledModel) -> Iterator[str]:
    wrong = [one for one in here if one.quantity == "token counts"]
    if not wrong:
        return
    step = wrong[0].step - 1
    sums = [
        (int(side.steps[step]["layers"][one.name]["counts"].sum()) for side in (got, wanted))
        for one in wrong
        if one.name in got.steps[step]["layers"] and one.name in wanted.steps[step]["layers"]
    ]
    ratios = {mine / theirs for mine, theirs in sums if theirs}
    if ratios and ratios != {1.0}:
        shown = ", ".join(f"{ratio:.3g}" for ratio in sorted(ratios))
        yield f"the counts sum to {shown} times the batch's choices: they are summed over a wrong group (TP x CP x DP)"
    elif ratios:
        yield (
            "all choices are counted, some for another expert: the logits differ by more than the closest choice's "
            f"margin, {wanted.smallest_margin:.1e}"
        )


def _gradients(here: list[LayoutDifference], got: AssembledModel, wanted: AssembledModel) -> Iterator[str]:
    wrong = [one for one in here if one.quantity.startswith("gradient,")]
    norm = next((one for one in here if one.quantity == "gradient norm"), None)
    if not wrong:
        if norm is not None:
            yield from _norm_alone(norm, got, wanted)
        return
    quantity = wrong[0].quantity
    mine, theirs = got.tensors[quantity], wanted.tensors[quantity]
    names = {one.name for one in wrong}
    experts, routers = {n for n in theirs if _EXPERT.search(n)}, {n for n in theirs if n.endswith("router.weight")}
    scales = {name: factor(mine[name].double(), theirs[name].double()) for name in names if name in mine}
    shared = _shared(list(scales.values()))
    if names == set(theirs) and shared is not None:
        yield f"every gradient is {times(shared)} the oracle's: the loss's scale, or what gradients are divided by"
    elif names == experts and experts:
        multiple = f" and {times(shared)} the oracle's" if shared is not None else ""
        yield f"the gradients of all routed experts are off{multiple}, no other: expert data parallelism, or its scale"
    elif names == routers:
        yield "only router weights are off: their sum over TP (the sequence_parallel mark), or an auxiliary loss"
    elif got.cut_over_tp and not names & got.cut_over_tp and not names & experts:
        yield "only weights that every TP rank holds whole are off: their sum over TP is missing or done twice"
    elif any(one.quantity.endswith("loss") and one.quantity != "loss" for one in here):
        yield "an auxiliary loss differs as well: its set of tokens, or its scale"


def _norm_alone(norm: LayoutDifference, got: AssembledModel, wanted: AssembledModel) -> Iterator[str]:
    gradients = next((q for q in wanted.tensors if q.startswith("gradient") and step_of(q) == norm.step), None)
    if gradients is None:
        return
    squares = {True: 0.0, False: 0.0}
    for name, tensor in wanted.tensors[gradients].items():
        squares[_EXPERT.search(name) is not None] += float(tensor.double().square().sum())
    found = got.steps[norm.step - 1]["grad_norm"] ** 2
    yield "every gradient agrees, their norm does not: it counts some parameter twice or not at all"
    if squares[True]:
        share = (found - squares[False]) / squares[True]
        yield f"with the dense weights counted once, the routed experts' squares are counted {share:.3g} times"


def _shared(scales: list[float | None]) -> float | None:
    """Return the middle one of factors that agree to one per cent; None where they do not, or one is no factor."""
    known = sorted(scale for scale in scales if scale is not None)
    if not known or len(known) < len(scales):
        return None
    middle = known[len(known) // 2]
    return middle if all(math.isclose(scale, middle, rel_tol=0.01) for scale in known) else None
