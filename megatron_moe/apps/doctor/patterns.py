"""What a set of differences points to, where that can be said from the numbers alone.

Every sentence states what was seen and what such a pattern fits; none claims a cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from torch import Tensor

from megatron_moe.apps.doctor.assemble import AssembledModel, step_of
from megatron_moe.apps.doctor.compare import Comparison, LayoutDifference, factor

_EXPERT = re.compile(r"\.experts\.(expert\d+\.)?weight[12]$")


def smells(
    got: AssembledModel, wanted: AssembledModel, comparison: Comparison, *, one_process: bool = False
) -> list[str]:
    """Sentences about the first step that differs; empty where no pattern fits.

    Args:
        one_process: whether no layout is compared, but one process with its batch cut or averaged in two ways.
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
            f"{shown}: what joins the gradient beside the loss, an auxiliary loss or a further prediction, is not"
            " weighed per token of the global batch"
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
        yield f"every gradient is {shared:.4g} times the oracle's: the loss's scale, or what gradients are divided by"
    elif names == experts and experts:
        times = f" and {shared:.4g} times the oracle's" if shared is not None else ""
        yield f"the gradients of all routed experts are off{times}, no other: expert data parallelism, or its scale"
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
        squares[_EXPERT.search(name) is not None] += _square(tensor)
    found = got.steps[norm.step - 1]["grad_norm"] ** 2
    yield "every gradient agrees, their norm does not: it counts some parameter twice or not at all"
    if squares[True]:
        share = (found - squares[False]) / squares[True]
        yield f"with the dense weights counted once, the routed experts' squares are counted {share:.3g} times"


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _shared(scales: list[float | None]) -> float | None:
    """The factor that all have in common, to one per cent."""
    known = [scale for scale in scales if scale is not None]
    if not known or len(known) < len(scales):
        return None
    return known[0] if all(math.isclose(scale, known[0], rel_tol=0.01) for scale in known) else None
