"""A layout's result against the oracle's: what differs, by how much, and how much is allowed.

In fp32 two layouts add the same products in another order. That moves a loss or a norm by some 1e-7 of itself and a
gradient by some 1e-6 of its norm; the tolerances stand a decade or more above that, and far below what a missing
reduction, a wrong scale or a lost token does. Counts, expert_bias and initial weights are compared bit for bit.

In half precision every result is rounded, and two layouts round different sums; how far that carries follows from the
format and from how many roundings lie on the way (`tolerances_of`). Loss scale, applied steps, counts and expert_bias
are the same numbers in any format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.apps.doctor.assemble import AssembledModel, step_of
from megatron_moe.config import derived
from megatron_moe.config.schema import Run


@dataclass(frozen=True)
class Tolerances:
    """Largest relative errors that are no difference.

    Attributes:
        scalar: of loss, gradient norm and auxiliary losses.
        gradient: norm of a gradient's error over the norm of the gradient. A gradient smaller than `floor` of the joint
            norm is measured against that share of it: what is almost nothing has no digits of its own.
        update: norm of the error of what the steps added to a weight, over the norm of what they added, or over one
            rounding of the weight where they added less. Adam divides by the gradient's own size, so entries that are
            almost zero may step either way.
        router: of what a router computes in fp32 from its hidden states and weight, whatever their dtype.
        flips: choices of experts that may fall otherwise in a layer and step; beyond none, expert_bias may differ by
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
"""Some so many lie on a gradient's way through a layer, forward and backward."""


def unit_roundoff(run: Run) -> float:
    """The largest relative error of one rounding to the run's dtype: 2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32."""
    return torch.finfo(getattr(torch, derived.params_dtype_name(run))).eps / 2


def rounding_error(run: Run) -> float:
    """How far gradients of two runs in the run's dtype may be apart, relative to their norm, by rounding alone.

    A rounding is off by at most u of the number, by u / sqrt(3) in the mean square. Those on the way through all layers
    are independent, and so are those of the two runs: u sqrt(2 x 36 L / 3), for L layers.
    """
    layers = run.model.num_layers + (run.model.mtp_num_layers or 0)
    return unit_roundoff(run) * (2 * _ROUNDINGS_PER_LAYER * layers / 3) ** 0.5


def tolerances_of(run: Run) -> Tolerances:
    """What is allowed of a run: in fp32 as measured, in half precision twice the error that its roundings add up to.

    Adam's first steps have the size of the learning rate and the gradient's sign. An error of e times the gradient's
    root mean square turns the sign of about 0.4 e of the elements, each of which is then 2 off: 1.3 sqrt(e) in norm.
    Allowed are 2 sqrt(e).
    """
    if derived.params_dtype_name(run) == "float32":
        return FP32
    gradient = 2 * rounding_error(run)
    return Tolerances(scalar=unit_roundoff(run), gradient=gradient, update=2 * gradient**0.5)


@dataclass(frozen=True)
class LayoutDifference:
    """One quantity that is not the oracle's.

    error is relative, `allowed` its tolerance; both are 0 where bits are compared, and `error` is then the largest
    absolute difference. step 0 is before the first.
    """

    quantity: str
    name: str
    step: int
    error: float
    allowed: float
    detail: str = ""

    @property
    def badness(self) -> float:
        """How far beyond what is allowed; bits that differ are worse than any tolerance."""
        return self.error / self.allowed if self.allowed and self.error == self.error else float("inf")


@dataclass(frozen=True)
class Comparison:
    """All differences, first step first and within it worst first, and the largest error of each kind of quantity."""

    differences: list[LayoutDifference]
    largest: dict[str, float]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances = FP32) -> Comparison:
    """Hold everything that a layout did against the oracle."""
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
                # One rounding of every element, in the dtype that holds it: less than that no step can be told from.
                floor = float(torch.finfo(theirs[name].dtype).eps * b.norm())
                a, b, allowed = a - start[name].double(), b - oracle_start[name].double(), tolerances.update
            error = float((a - b).norm() / b.norm().clamp_min(max(floor, 1e-30)))
            yield LayoutDifference(quantity, name, step, error, allowed, factor_text(a, b) if error > allowed else "")


def factor(got: Tensor, wanted: Tensor) -> float | None:
    """The number that `got` is `wanted` times, where it is so to one per cent."""
    square = float((wanted * wanted).sum())
    if not square:
        return None
    scale = float((got * wanted).sum()) / square
    return scale if float((got - scale * wanted).norm()) < 0.01 * max(abs(scale), 0.01) * square**0.5 else None


def factor_text(got: Tensor, wanted: Tensor) -> str:
    """Says so where one tensor is a multiple of the other."""
    if float(got.abs().max()) == 0.0:
        return "all zeros"
    scale = factor(got, wanted)
    return f"{scale:.4g} times the oracle's" if scale is not None and abs(scale - 1) > 1e-3 else ""
