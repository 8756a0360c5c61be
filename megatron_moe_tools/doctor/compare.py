"""Compare a layout's result with the oracle's: what differs, by how much, how much is allowed, and what it points to.

In fp32 two layouts add the same products in another order. That moves a loss or a norm by some 1e-7 of itself and a
gradient by some 1e-6 of its norm. The tolerances are a decade or more above that, and far below what a missing
reduction, a wrong scale or a lost token does. Counts, expert_bias and initial weights are compared bit for bit.

In half precision every result is rounded, and two layouts round different sums. How far apart that brings them follows
from the format and from the number of roundings on the way (`tolerances_of`). Loss scale, applied steps, counts and
expert_bias are the same numbers in any format.

`matching_patterns` then says what was seen and which fault such a pattern fits; it does not claim a cause. The findings
of all layouts are the doctor's report, shown as lines of text and as JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.model_flags import QUANTILE
from megatron_moe.config.schema import Run
from megatron_moe_tools.doctor.layouts import Layout, common_to, names_of
from megatron_moe_tools.doctor.measure import AssembledModel, LayoutDifference, absent, step_of


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
        bias: difference of expert_bias. Quantiles count differences of scores in bins, and a rounding of a score may
            put one into the next bin: two of its bins.
    """

    scalar: float = 1e-5
    gradient: float = 1e-4
    update: float = 2e-2
    router: float = 1e-5
    floor: float = 1e-3
    flips: int = 0
    bias: float = 0.0


FP32 = Tolerances()
_ROUNDINGS_PER_LAYER = 36
"""Approximate number of roundings on a gradient's way through a layer, forward and backward."""
ROUTER = re.compile(r"\.(router|gate)\.")
EXPERT = re.compile(r"\.experts\.")
"""Names of weights, ours and those of other trainers."""


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
    bias = 0.0
    if QUANTILE in run.moe.moe_router_load_balancing_type:
        bias = 2 * 3 / run.moe.moe_router_quantile_balancing_num_bins  # of biases less than 1 apart
    if run.derived.params_dtype_name == "float32":
        return replace(FP32, bias=bias)
    gradient = 2 * rounding_error(run)
    return Tolerances(scalar=unit_roundoff(run), gradient=gradient, update=2 * gradient**0.5, bias=bias)


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
    measured = [*_steps(got, wanted, tolerances), *_tensors(got, wanted, tolerances)]
    largest: dict[str, float] = {}
    differences = []
    for one in measured:
        kind = one.quantity.partition(",")[0].partition(" after")[0]
        largest[kind] = max(largest.get(kind, 0.0), one.error)
        if not one.error <= one.allowed:
            differences.append(one)
    differences += got.differences

    def rank(one: LayoutDifference) -> tuple[int, float, float]:
        excess = math.inf  # bits that differ, and NaN
        if one.allowed and not math.isnan(one.error):
            excess = one.error / one.allowed
        return one.step, -excess, -one.error

    differences.sort(key=rank)
    return Comparison(differences, largest)


def _number(quantity: str, name: str, step: int, got: float, wanted: float, allowed: float) -> LayoutDifference:
    """Compare two numbers; NaN is equal to itself."""
    error, detail = 0.0, f"{got:.9g}, the oracle's {wanted:.9g}"
    if got != wanted and not (math.isnan(got) and math.isnan(wanted)):
        error = abs(got - wanted) / max(abs(wanted), 1e-30)
    return LayoutDifference(quantity, name, step, error, allowed, detail)


def _steps(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances) -> Iterator[LayoutDifference]:
    """Compare what the steps report of the whole model, then what they report of each layer."""
    pairs = list(enumerate(zip(got.steps, wanted.steps, strict=True), start=1))
    for step, (mine, theirs) in pairs:
        for key, quantity in (("loss", "loss"), ("grad_norm", "gradient norm")):
            yield _number(quantity, "", step, mine[key], theirs[key], tolerances.scalar)
        for depth, (a, b) in enumerate(zip(mine["mtp_losses"], theirs["mtp_losses"], strict=True), start=1):
            yield _number("loss of multi-token prediction", f"depth {depth}", step, a, b, tolerances.scalar)
        exact = {"tokens": "tokens of the batch", "committed": "step applied", "loss_scale": "loss scale"}
        for key, quantity in exact.items():
            if mine[key] is None or theirs[key] is None:
                continue  # one of the two needs no loss scale
            detail = f"{mine[key]}, the oracle's {theirs[key]}"
            yield LayoutDifference(quantity, "", step, float(abs(mine[key] - theirs[key])), 0.0, detail)
    for step, (mine, theirs) in pairs:
        for name in sorted({*mine["layers"], *theirs["layers"]}):
            if name not in mine["layers"] or name not in theirs["layers"]:
                yield absent("token counts", name, step, "one of the two has no such layer")
                continue
            yield from _layer(name, step, mine["layers"][name], theirs["layers"][name], tolerances)


def _layer(
    name: str, step: int, layer: dict[str, Any], oracle: dict[str, Any], tolerances: Tolerances
) -> Iterator[LayoutDifference]:
    for key, quantity in (("counts", "token counts"), ("dropped", "dropped choices")):
        if layer[key] is None or oracle[key] is None:
            continue  # a trainer that does not say
        off = layer[key] - oracle[key]
        total, meant, flips = int(layer[key].sum()), int(oracle[key].sum()), math.inf
        if total == meant:
            flips = int(off.abs().sum()) / 2
        detail = f"{total} choices in all, the oracle's {meant}; expert by expert off by {off.tolist()}"
        yield LayoutDifference(quantity, name, step, flips, tolerances.flips, detail)
    if layer["expert_bias"] is not None:
        moved, error = (layer["expert_bias"] - oracle["expert_bias"]).double().abs(), 0.0
        same = torch.equal(layer["expert_bias"].view(torch.int32), oracle["expert_bias"].view(torch.int32))
        if not same and not tolerances.flips:
            error = float(moved.max())
        detail = f"{int((moved > 0).sum())} of {moved.numel()} experts differ, by at most {error:.3g}"
        yield LayoutDifference("expert_bias", name, step, error, tolerances.bias, detail)
    detail = "its logits and weights against fp64, from the same hidden states"
    yield LayoutDifference("router", name, step, layer["router_error"], tolerances.router, detail)
    for loss in sorted({*layer["aux_losses"], *oracle["aux_losses"]}):
        a, b = layer["aux_losses"].get(loss, math.nan), oracle["aux_losses"].get(loss, math.nan)
        yield _number(loss.replace("_", " "), name, step, a, b, tolerances.scalar)


def _tensors(got: AssembledModel, wanted: AssembledModel, tolerances: Tolerances) -> Iterator[LayoutDifference]:
    start, oracle_start = got.tensors["initial weight"], wanted.tensors["initial weight"]
    for quantity, theirs in wanted.tensors.items():
        if quantity not in got.tensors:
            continue  # an overflow, which the oracle did not have: the step was not applied
        mine, step = got.tensors[quantity], step_of(quantity)
        total = float(torch.stack([t.double().norm() for t in theirs.values()]).norm())
        for name in sorted({*mine, *theirs}):
            if name not in mine or name not in theirs:
                yield absent(quantity, name, step, "one of the two has no such tensor")
                continue
            if mine[name].shape != theirs[name].shape:
                detail = f"shape {list(mine[name].shape)}, the oracle's {list(theirs[name].shape)}; [0] is no gradient"
                yield absent(quantity, name, step, detail)
                continue
            a, b, detail = mine[name].double(), theirs[name].double(), ""
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
            if error > allowed:
                scale = factor(a, b)
                if float(a.abs().max()) == 0.0:
                    detail = "all zeros"
                elif scale is not None and abs(scale - 1) > 1e-3:
                    detail = f"{times(scale)} the oracle's"
            yield LayoutDifference(quantity, name, step, error, allowed, detail)


def factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return the factor by which `got` is a multiple of `wanted`, to one per cent; None where it is no multiple."""
    square = float((wanted * wanted).sum())
    if not square:
        return None
    scale = float((got * wanted).sum()) / square
    off = float((got - scale * wanted).norm())
    return scale if off < 0.01 * max(abs(scale), 0.01) * square**0.5 else None


def times(scale: float) -> str:
    """Return words for a factor: the power of two that it is to 0.1 per cent, as a loss's scale is, or three digits."""
    power = scale
    if scale:
        power = math.copysign(2.0 ** round(math.log2(abs(scale))), scale)
    if math.isclose(scale, power, rel_tol=1e-3):
        return f"{power:g} times"
    return f"{scale:.3g} times"


# ---- Patterns in a set of differences.


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
    step = comparison.differences[0].step
    here = [one for one in comparison.differences if one.step == step]
    found, weights, along, ratios, other_losses = [], [], set(), set(), set()
    for one in here:
        if one.quantity == "initial weight":
            weights.append(one.name)
        elif one.quantity.startswith("copies of"):
            along.add(one.detail.partition(" along ")[2].partition(",")[0])
        elif one.quantity.endswith("loss"):
            other_losses.add(one.quantity)
        elif one.quantity == "token counts":
            mine = got.steps[step - 1]["layers"].get(one.name)
            theirs = wanted.steps[step - 1]["layers"].get(one.name)
            if mine is not None and theirs is not None and (meant := int(theirs["counts"].sum())):
                ratios.add(int(mine["counts"].sum()) / meant)
    if one_process:
        if "loss" in other_losses or not any(one.quantity.startswith("gradient,") for one in here):
            return []
        shown = "the auxiliary losses as they are logged neither"
        if other_losses:
            shown = f"{', '.join(sorted(other_losses))} too"
        return [
            f"the loss does not differ, gradients do, {shown}: what joins the gradient in addition to the loss, an "
            "auxiliary loss or a further prediction, is not weighed per token of the global batch"
        ]
    if weights:
        which = f"{len(weights)} weights"
        if all(map(EXPERT.search, weights)):
            which += " (routed experts only)"
        found.append(f"{which} differ before the first step: how they are initialised depends on the layout")
    if along:
        groups = ", ".join(sorted(along))
        found.append(f"copies differ between ranks along {groups}: a reduction or broadcast over that group is amiss")
    if ratios == {1.0}:
        margin = "" if math.isinf(wanted.smallest_margin) else f", {wanted.smallest_margin:.1e}"
        found.append(
            "all choices are counted, some for another expert: the logits differ by more than the closest choice's "
            f"margin{margin}"
        )
    elif ratios:
        shown = ", ".join(f"{ratio:.3g}" for ratio in sorted(ratios))
        found.append(
            f"the counts sum to {shown} times the batch's choices: they are summed over a wrong group (TP x CP x DP)"
        )
    return [*found, *_gradients(here, got, wanted, bool(other_losses - {"loss"}))]


def _gradients(
    here: list[LayoutDifference], got: AssembledModel, wanted: AssembledModel, other_loss: bool
) -> Iterator[str]:
    names, quantity, norm_differs = set(), "", False
    for one in here:
        norm_differs = norm_differs or one.quantity == "gradient norm"
        if one.quantity.startswith("gradient,"):
            names.add(one.name)
            quantity = quantity or one.quantity
    if not names:
        step = here[0].step
        gradients = wanted.tensors.get(f"gradient, step {step}")
        if norm_differs and gradients is not None:
            squares = {True: 0.0, False: 0.0}
            for name, tensor in gradients.items():
                squares[EXPERT.search(name) is not None] += float(tensor.double().square().sum())
            yield "every gradient agrees, their norm does not: it counts some parameter twice or not at all"
            share = got.steps[step - 1]["grad_norm"] ** 2 - squares[False]
            if squares[True] and share >= 0 and not math.isclose(share / squares[True], 1.0, rel_tol=0.01):
                share /= squares[True]
                yield f"with the dense weights counted once, the routed experts' squares are counted {share:.3g} times"
        return
    mine, theirs = got.tensors[quantity], wanted.tensors[quantity]
    experts = set(filter(EXPERT.search, theirs))
    scales = []
    for name in names.intersection(mine):
        scale = factor(mine[name].double(), theirs[name].double())
        scales.append(math.nan if scale is None else scale)
    scales.sort()
    shared = None  # the middle one of factors that agree to one per cent
    if scales and all(math.isclose(scale, scales[len(scales) // 2], rel_tol=0.01) for scale in scales):
        shared = scales[len(scales) // 2]
    if names == set(theirs) and shared is not None:
        yield f"every gradient is {times(shared)} the oracle's: the loss's scale, or what gradients are divided by"
    elif names == experts:
        multiple = ""
        if shared is not None:
            multiple = f" and {times(shared)} the oracle's"
        yield f"the gradients of all routed experts are off{multiple}, no other: expert data parallelism, or its scale"
    elif names == set(filter(ROUTER.search, theirs)):
        yield "only router weights are off: their sum over TP (the sequence_parallel mark), or an auxiliary loss"
    elif got.cut_over_tp and not names & (got.cut_over_tp | experts):
        yield "only weights that every TP rank holds whole are off: their sum over TP is missing or done twice"
    elif other_loss:
        yield "an auxiliary loss differs as well: its set of tokens, or its scale"


# ---- The report.

_SHOWN = 8
_KEPT = 500
TRAINED = ("no difference in {}: the same model is trained", "do not train the same model")


@dataclass(frozen=True)
class FindingOfLayout:
    """The outcome of one layout; this one could not be measured, and `error` is the ranks' report."""

    layout: Layout
    seconds: float
    error: str | None = field(default=None, kw_only=True)

    @property
    def good(self) -> bool:
        """Whether the layout was measured and nothing is wrong."""
        return False

    def result(self) -> str:
        """Return the result for the log's line."""
        return "FAILED"

    def lines(self) -> Iterator[str]:
        """Yield the lines about what is wrong."""
        yield self.error or ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        return {
            "layout": self.layout.name,
            "ranks": self.layout.ranks,
            "flags": self.layout.flags,
            "model": self.layout.model,
            "agrees": self.good,
            "seconds": round(self.seconds, 2),
            "error": self.error,
        }


@dataclass(frozen=True)
class LayoutFinding(FindingOfLayout):
    """The outcome of one layout that was measured."""

    comparison: Comparison
    patterns: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing differs."""
        return self.comparison.agrees

    def result(self) -> str:
        """Return the largest errors, or the first difference."""
        if not self.good:
            return f"DIFFERS: {describe(self.comparison.differences[0])}"
        largest = self.comparison.largest
        errors = [f"{kind} {largest.get(kind, 0.0):.1e}" for kind in ("loss", "gradient norm", "gradient", "weight")]
        return f"agrees: {', '.join(errors)}"

    def lines(self) -> Iterator[str]:
        """Yield the patterns that fit and the differences of the first step that has any."""
        for pattern in self.patterns:
            yield f"  it fits: {pattern}"
        differences = self.comparison.differences
        first = [one for one in differences if one.step == differences[0].step]
        for one in first[:_SHOWN]:
            yield f"  {describe(one)}"
        if len(first) > _SHOWN:
            yield f"  and {len(first) - _SHOWN} more in the same step"
        if len(differences) > len(first):
            yield f"  later steps differ in {len(differences) - len(first)} quantities, which may follow from this"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        differences, largest = self.comparison.differences, self.comparison.largest
        return {
            **super().as_dict(),
            "features": sorted(self.layout.features),
            "tolerances": asdict(tolerances_of(self.layout.run)),
            "largest_errors": dict(zip(largest, map(_plain, largest.values()))),
            "fits": self.patterns,
            "number_of_differences": len(differences),
            "differences": [{**asdict(one), "error": _plain(one.error)} for one in differences[:_KEPT]],
        }


@dataclass
class DoctorReport:
    """The findings of all layouts; `about` says what was compared: flags, sizes, versions, the oracles' figures."""

    about: dict[str, Any]
    findings: list[FindingOfLayout] = field(default_factory=list)
    refused: list[tuple[Layout, str]] = field(default_factory=list)
    verdicts: tuple[str, str] = TRAINED
    """The result in words where all is good, and where it is not."""

    @property
    def failed(self) -> list[Layout]:
        """The layouts that differ or could not be measured."""
        return self._layouts(good=False)

    @property
    def common(self) -> list[str]:
        """Kinds of parallelism and features that all layouts that failed have, and no layout that agrees."""
        return common_to(self.failed, self._layouts(good=True))

    def _layouts(self, good: bool) -> list[Layout]:
        return [finding.layout for finding in self.findings if finding.good == good]

    def summary(self) -> str:
        """Return the overall result in one line."""
        tried, (good, failed) = f"{len(self.findings)} layout{'s' * (len(self.findings) > 1)}", self.verdicts
        bad = names_of(self.failed)
        if not bad:
            return good.format(tried)
        return f"{len(bad)} of {tried} {failed}: {', '.join(bad)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, which holds neither NaN nor infinity."""
        return {
            "verdict": self.summary(),
            "failed": bool(self.failed),
            "common_to_what_failed": self.common,
            **self.about,
            "layouts": [finding.as_dict() for finding in self.findings],
            "refused": [{"layout": layout.name, "rule": rule} for layout, rule in self.refused],
        }


def log_line(number: int, total: int, finding: FindingOfLayout) -> str:
    """Return the log's line about one layout."""
    head = f"[{number:{len(str(total))}}/{total}] {finding.layout.name:<25} {finding.layout.ranks} ranks "
    return f"{head} {finding.result()} ({finding.seconds:.1f} s)"


def describe(one: LayoutDifference) -> str:
    """Return a difference in one line."""
    text = one.quantity
    if one.name:
        text += f" of {one.name}"
    if "step" not in one.quantity and one.step:
        text += f", step {one.step}"
    text += f" is off by {one.error:.2e}, "
    if one.allowed == 0.0:
        text += "has to be the same bits"
    else:
        text += f"at most {one.allowed:.0e} is allowed"
    if one.detail:
        text += f"; {one.detail}"
    return text


def details(report: DoctorReport) -> Iterator[str]:
    """Yield the lines about the layouts that failed, then the overall result."""
    for finding in report.findings:
        if finding.good:
            continue
        flags = []
        for name, value in finding.layout.flags.items():
            if value is True:
                flags.append(f"--{name.replace('_', '-')}")
            elif value is not None:
                flags.append(f"--{name.replace('_', '-')} {value}")
        shown = " ".join(flags) or "data parallel only"
        yield f"\n{finding.layout.name} ({finding.layout.ranks} ranks: {shown})"
        yield from finding.lines()
    if len(report.failed) < len(report.findings) and (common := report.common):
        yield f"\nwhat every layout that failed has, and none that agrees: {' or '.join(common)}"
    yield f"\n{report.summary()}"


def _plain(value: float) -> float | str:
    """Return the value, as text where JSON has no number for it: infinity and NaN."""
    return value if math.isfinite(value) else str(value)
