"""What the doctor asks of a trainer, and the findings.

Each check compares two cases, which have to give the same, or looks at one. The cases of one process show what is wrong
on every layout, and need no other implementation to compare with: a batch cut in another way, padding, tokens which the
trained ones must not see.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_moe_tools.doctor.compare import (
    EXPERT,
    FP32,
    ROUTER,
    Comparison,
    compare,
    describe,
    factor,
    matching_patterns,
)
from megatron_moe_tools.doctor.measure import AssembledModel, LayoutDifference, assemble, matching_views
from megatron_moe_tools.doctor.trainers.rank import TrainerRequest
from megatron_moe_tools.doctor.trainers.samples import Case, Sizes
from megatron_moe_tools.launch.local_ranks import LocalRanks, RankFailure

Relation = Literal["all", "batch", "loss", "not the loss"]
"""What two cases have in common: all that is recorded; all but weights, which differ by rounding; the loss alone; or
the loss has to differ."""
SMALLEST_DIFFERENCE = 1e-6
"""Relative difference of a loss that a changed token makes at least. fp32 rounds to 1e-7."""
TOLERANCES = replace(FP32, gradient=3e-4)
"""Those of the doctor's own layouts, but gradients of a second step: other optimizers, no seed is looked for."""


@dataclass(frozen=True)
class TrainerCheck:
    """Two cases and what they have in common.

    Attributes:
        name: as --checks takes it.
        question: in words, for the page.
        wanted, got: the cases; the first one is right by definition.
        needs: functions or attributes of the trainer without which the check cannot be made.
        cause: what it means if it fails.
    """

    name: str
    question: str
    wanted: Case
    got: Case
    relation: Relation = "all"
    needs: tuple[str, ...] = ()
    cause: str = ""


def checks_for(ranks: int, loss: str) -> list[TrainerCheck]:
    """Return the checks of a trainer that runs on `ranks` ranks; `loss` is its attribute."""
    asked, packed = Case(steps=1, asked=True), Case(steps=1, asked=True, packed=True)
    padded = Case(steps=1, padding=5)
    whole = Case(masked=loss == "tokens")
    return [
        TrainerCheck(
            "later-tokens",
            "Does the loss of a token depend on the token itself as an input, or on later ones?",
            asked,
            replace(asked, change="later tokens"),
            "loss",
            cause="labels are not shifted against the inputs, the mask is not causal, or a capacity lets later "
            "tokens displace earlier ones",
        ),
        TrainerCheck(
            "token-before",
            "Does the loss of a token depend on the one before it?",
            asked,
            replace(asked, change="token before"),
            "not the loss",
            cause="labels are shifted twice, or the mask hides too much",
        ),
        TrainerCheck(
            "documents",
            "Do documents packed into a sequence see each other?",
            packed,
            replace(packed, change="other documents"),
            "loss",
            needs=("packed",),
            cause="the attention mask does not tell documents apart",
        ),
        TrainerCheck(
            "padding-contents",
            "Does it matter which token pads?",
            padded,
            replace(padded, change="padding"),
            "batch",
            cause="padding takes part: in attention, in the experts' load or in an auxiliary loss",
        ),
        TrainerCheck(
            "padding",
            "Does padding change anything?",
            Case(steps=1),
            padded,
            "batch",
            cause="padded tokens are averaged over, counted or routed",
        ),
        TrainerCheck(
            "micro-batches",
            "Does it matter how a batch is cut into micro-batches?",
            whole,
            replace(whole, micro_batch_size=2),
            cause="accumulated micro-batches are weighed alike, though they hold different numbers of trained tokens",
        ),
        TrainerCheck("layout", f"Do {ranks} ranks train as one process does?", Case(), Case(ranks=ranks)),
        TrainerCheck(
            "resume",
            "Does a saved and loaded trainer go on as one that was not stopped?",
            Case(ranks=ranks),
            Case(ranks=ranks, saved=True),
            needs=("save", "load"),
            cause="part of the state is not saved, or not restored: optimizer, step count, expert_bias",
        ),
    ]


@dataclass
class TrainerFinding:
    """The outcome of a check.

    Attributes:
        check: its name. question: what was asked.
        comparison: what was compared; None: it failed to run, with `error`.
        first: the first thing that is wrong, in one line.
        causes: which mistakes would look like this.
        command: what repeats it.
    """

    check: str
    question: str
    comparison: Comparison | None
    first: str = ""
    causes: list[str] = field(default_factory=list)
    error: str | None = None
    command: str = ""

    @property
    def good(self) -> bool:
        """Whether the check was made and nothing is wrong."""
        return self.comparison is not None and self.comparison.agrees

    def lines(self, most: int = 6) -> Iterator[str]:
        """Yield the lines about a finding that is not good."""
        if self.error is not None:
            yield self.error
            return
        assert self.comparison is not None
        yield f"first: {self.first}"
        for cause in self.causes:
            yield f"likely: {cause}"
        for one in self.comparison.differences[1:most]:
            yield describe(one)
        if len(self.comparison.differences) > most:
            yield f"and {len(self.comparison.differences) - most} more"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        differences, largest = [], {}
        if self.comparison is not None:
            for one in self.comparison.differences[:_KEPT]:
                differences.append({**vars(one), "error": str(one.error)})
            largest = dict(zip(self.comparison.largest, map(str, self.comparison.largest.values())))
        return {
            "check": self.check,
            "question": self.question,
            "agrees": self.good,
            "first": self.first,
            "causes": self.causes,
            "error": self.error,
            "command": self.command,
            "differences": differences,
            "largest": largest,
        }


class Runs:
    """The cases that have run, each once: its records and the model assembled from them.

    Args:
        alone: runs one process. many: runs the layout.
        request: what all cases have in common.
    """

    def __init__(self, alone: LocalRanks, many: LocalRanks, request: TrainerRequest) -> None:
        self._alone, self._many, self._request = alone, many, request
        self._records: dict[Case, list[dict[str, Any]]] = {}

    def records(self, case: Case) -> list[dict[str, Any]]:
        """Return every rank's record of a case. Raises RankFailure: it does not run."""
        if case not in self._records:
            pool = self._many if case.ranks > 1 else self._alone
            request = replace(self._request, case=case, folder=str(pool.folder))
            paths = pool.call(request.as_argument(), case.ranks)
            self._records[case] = list(map(_loaded, paths))
        return self._records[case]

    def model(self, case: Case) -> AssembledModel:
        """Return what the ranks of a case hold together."""
        return assemble(self.records(case))


def _loaded(path: str) -> dict[str, Any]:
    record: dict[str, Any] = torch.load(path, weights_only=True)
    return record


def find(check: TrainerCheck, runs: Runs) -> TrainerFinding:
    """Make a check."""
    try:
        wanted, got = runs.model(check.wanted), runs.model(check.got)
    except RankFailure as failure:
        return TrainerFinding(check.name, check.question, None, "it did not run", error=str(failure))
    comparison = _related(check, wanted, got)
    finding = TrainerFinding(check.name, check.question, comparison)
    if comparison.agrees:
        return finding
    ordered = in_order(comparison.differences, list(wanted.tensors["gradient, step 1"]))
    finding.comparison = replace(comparison, differences=ordered)
    finding.first = describe(ordered[0])
    if check.name == "micro-batches" and Evidence(comparison, wanted, got, []).is_of_an_auxiliary_loss:
        summed = "micro-batches' auxiliary losses are added up, not averaged, or each balances itself"
        finding.causes += matching_patterns(got, wanted, comparison, one_process=True) or [summed]
    if check.name == "micro-batches" and not finding.causes and not _agree(check, runs, masked=False):
        finding.causes.append("micro-batches are scaled, clipped or reduced one by one, before they are added up")
    if check.cause and not finding.causes:
        finding.causes.append(check.cause)
    if check.got.saved and (lost := not_restored(comparison)) is not None:
        finding.causes.append(lost)
    if check.name == "layout":
        records = runs.records(check.got)
        whole = Sizes.sequences // records[0]["sizes"]["dp"]
        evidence = Evidence(
            comparison,
            wanted,
            got,
            records,
            agrees_where_even=_agree(check, runs, masked=False),
            agrees_undivided=_agree(check, runs, masked=False, micro_batch_size=whole),
        )
        finding.causes += causes_of(evidence)
        finding.causes += matching_patterns(got, wanted, comparison)
    return finding


def _agree(check: TrainerCheck, runs: Runs, **changes: Any) -> bool:
    """Return whether both cases give the same after a change to both; no, if one does not run."""
    try:
        wanted, got = (runs.model(replace(case, **changes)) for case in (check.wanted, check.got))
    except RankFailure:
        return False
    return compare(got, wanted, TOLERANCES).agrees


def _related(check: TrainerCheck, wanted: AssembledModel, got: AssembledModel) -> Comparison:
    if check.relation == "all":
        return compare(got, wanted, TOLERANCES)
    if check.relation == "batch":
        kept = {name: found for name, found in got.tensors.items() if not name.startswith("weight")}
        return compare(replace(got, tensors=kept), wanted, TOLERANCES)
    a, b = got.steps[0]["token_loss"], wanted.steps[0]["token_loss"]
    error = abs(a - b) / max(abs(b), 1e-30)
    found = Comparison([], {"loss": error})
    detail = f"{a:.9g}, {b:.9g} before the change"
    if check.relation == "loss" and not error <= TOLERANCES.scalar:
        found.differences.append(LayoutDifference("loss", "", 1, error, TOLERANCES.scalar, detail))
    if check.relation == "not the loss" and not error > SMALLEST_DIFFERENCE:
        found.differences.append(LayoutDifference("loss without a change", "", 1, error, SMALLEST_DIFFERENCE, detail))
    return found


_KEPT = 200
"""Differences of a finding that are written as JSON."""
_ORDER = (
    "initial weight",
    "token counts",
    "dropped",
    "copies",
    "loss",
    "others",
    "gradient",
    "gradient norm",
    "expert_bias",
    "weight after",
    "copies of weight after",
)


def in_order(differences: list[LayoutDifference], forward: list[str]) -> list[LayoutDifference]:
    """Return differences in the order in which a step meets them: a gradient that others follow from comes first.

    Args:
        forward: names of weights in the order of the forward pass.
    """

    def when(one: LayoutDifference) -> tuple[int, int, int]:
        kind, depth = _ORDER.index("others"), -1
        for place, text in enumerate(_ORDER):
            if one.quantity.startswith(text):
                kind = place  # the last one: "gradient norm" begins as "gradient" does
        if one.name in forward:
            depth = forward.index(one.name)
        return one.step, kind, -depth

    return sorted(differences, key=when)


def untrained(case: Case, runs: Runs) -> TrainerFinding:
    """Look for weights that get no gradient in one process, other than those of single experts."""
    question = "Does every weight get a gradient?"
    try:
        gradients = runs.model(case).tensors["gradient, step 1"]
    except RankFailure as failure:
        return TrainerFinding("gradients", question, None, "it did not run", error=str(failure))
    differences = []
    for name, gradient in gradients.items():
        if gradient.numel() == 0 or (not EXPERT.search(name) and not bool(gradient.any())):
            detail = "none at all, or all zeros"
            differences.append(LayoutDifference("gradient", name, 1, 1.0, 0.0, detail))
    finding = TrainerFinding("gradients", question, Comparison(differences, {}))
    if differences:
        finding.first = f"{differences[0].name} has no gradient, and {len(differences) - 1} more"
        finding.causes = ["the weight is left out of the graph: detached, overwritten, or not used by the forward pass"]
    return finding


def bias_rule(case: Case, runs: Runs) -> TrainerFinding | None:
    """Check that expert_bias moves by its rate against the load, in fp32; None if no router has a bias."""
    question = f"Does expert_bias follow the experts' load, in fp32, on {case.ranks} ranks?"
    try:
        model = runs.model(case)
    except RankFailure as failure:
        return TrainerFinding("expert-bias", question, None, "it did not run", error=str(failure))
    differences, causes, checked = [], [], 0
    for name, layer in model.steps[-1]["layers"].items():
        before = model.steps[-2]["layers"][name]["expert_bias"]
        rate, counts = layer["bias_rate"], layer["counts"]
        if before is None or rate is None or counts is None:
            continue
        checked += 1
        got, meant = layer["expert_bias"].double(), moved_bias(before, counts, rate)
        error = min(float((got - one).abs().max()) for one in meant)
        allowed = max(rate * 1e-4, 2**-23 * float(got.abs().max()))  # a step rounded to bf16 is off by rate / 2000
        if error > allowed:
            differences.append(
                LayoutDifference("expert_bias", name, case.steps, error, allowed, _bias_words(got, before, meant))
            )
            causes.append(_bias_words(got, before, meant))
    if not checked:
        return None
    finding = TrainerFinding("expert-bias", question, Comparison(differences, {}))
    if differences:
        finding.first, finding.causes = describe(differences[0]), sorted(set(causes))
    return finding


def moved_bias(before: Tensor, counts: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return the bias [E] fp64 after an update by the sign of the load's error, and the same without its mean."""
    load = counts.double()
    step = torch.sign(load.mean() - load) * rate
    return before.double() + step, before.double() + step - step.mean()


def _bias_words(got: Tensor, before: Tensor, meant: tuple[Tensor, Tensor]) -> str:
    if torch.equal(got, before.double()):
        return "it did not move: no update, or one smaller than its dtype resolves"
    if float((got - before.double() + (meant[0] - before.double())).abs().max()) < 1e-9:
        return "it moves the other way"
    if torch.equal(got, got.bfloat16().double()):
        return "it is rounded to bf16"
    return "it moves by something else than its rate, or by other counts than the batch's"


def command(program: str, target: str, config: str, ranks: int, finding: TrainerFinding) -> str:
    """Return the command that makes one check again."""
    words = ["--target", target, config, "--checks", finding.check, "--ranks", str(ranks)]
    return f"{program} {shlex.join(words)}"


# ---- Known mistakes, and what each of them looks like.
#
# A row tells which weights' gradients are off, by which factor, and what makes such a factor. The factors are named, so
# that "0.5 times" is told as 1 / EP where EP is 2. Where two sizes are equal, all that fit are named.

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
        agrees_undivided: whether there is none, either, when each rank's share of the batch is one micro-batch.
    """

    comparison: Comparison
    wanted: AssembledModel
    got: AssembledModel
    records: list[dict[str, Any]]
    agrees_where_even: bool = False
    agrees_undivided: bool = False

    @cached_property
    def step(self) -> int:
        """The first step that differs."""
        return next(filter(None, sorted(map(attrgetter("step"), self.comparison.differences))), 1)

    @cached_property
    def differences(self) -> list[LayoutDifference]:
        """Those of that step."""
        return list(filter(lambda one: one.step == self.step, self.comparison.differences))

    @cached_property
    def kinds(self) -> set[str]:
        """The quantities that differ in that step."""
        return {one.quantity.partition(",")[0] for one in self.differences}

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
        of_gradients = ("gradient,", "copies of gradient,")
        return {one.name for one in self.differences if one.quantity.startswith(of_gradients)}

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

    def factor(self, name: str) -> float | None:
        """Return the factor of a weight's gradient, if it is one."""
        mine, theirs = self.gradients
        if name in mine and name in theirs and mine[name].shape == theirs[name].shape:
            return factor(mine[name].double(), theirs[name].double())
        return None

    @cached_property
    def scale(self) -> float | None:
        """The factor of all gradients that are off, if there is one."""
        scales = [one for one in map(self.factor, self.off) if one is not None]
        if not scales or len(scales) < len(self.off):
            return None
        middle = sorted(scales)[len(scales) // 2]
        equal = all(math.isclose(one, middle, rel_tol=0.01) for one in scales)
        return middle if equal and not math.isclose(middle, 1.0, rel_tol=0.01) else None

    def symbols(self, scale: float | None) -> list[str]:
        """Return what a factor may be, of the layout's sizes."""
        found = []
        for axis, number in (*self.records[0]["sizes"].items(), ("all ranks", len(self.records))):
            if number == 1 or scale is None:
                continue
            name = axis if axis == "all ranks" else axis.upper()
            for text, value in ((name, float(number)), (f"1 / {name}", 1 / number)):
                if math.isclose(scale, value, rel_tol=0.01):
                    found.append(text)
        return found

    @cached_property
    def tokens_agree(self) -> bool:
        """Whether the loss of the tokens is the same."""
        mine, theirs = (model.steps[self.step - 1]["token_loss"] for model in (self.got, self.wanted))
        return math.isclose(mine, theirs, rel_tol=TOLERANCES.scalar)

    @cached_property
    def first_wrong(self) -> str:
        """The weight at which the backward pass, with the same loss, meets the first wrong gradient; else empty."""
        wrong = list(filter(self.off.__contains__, self.gradients[1]))
        return wrong[-1] if wrong and self.tokens_agree else ""

    @cached_property
    def is_of_an_auxiliary_loss(self) -> bool:
        """Whether the tokens' loss is right, and the logged one is wrong or the first wrong gradient is a router's."""
        return self.tokens_agree and ("loss" in self.kinds or ROUTER.search(self.first_wrong) is not None)

    @cached_property
    def first_load_differs(self) -> bool:
        """Whether counts differ at the first router already: no other layer's output has led to other choices."""
        first = next(iter(self.wanted.steps[self.step - 1]["layers"]), "")
        for one in self.comparison.differences:
            if (one.step, one.name) == (self.step, first) and "counts" in one.quantity:
                return True
        return False

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
        lambda seen: seen.agrees_undivided and not seen.agrees_where_even and "loss" not in seen.kinds,
        "a gradient is reduced after every micro-batch, together with what was reduced before; with one micro-batch a "
        "step the layout agrees",
        "transformers 5.23, q_norm and k_norm under tensor parallelism",
    ),
    Mistake(
        lambda seen: seen.agrees_where_even and seen.scale is None,
        "means of ranks or micro-batches are averaged, though they are over different numbers of tokens; with as many "
        "trained tokens in each sequence the layout agrees",
        "prime-rl #2358, verl #5625",
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
        lambda seen: _scaled(SOME)(seen) or (seen.scale is None and bool(seen.symbols(seen.factor(seen.first_wrong)))),
        "these weights, or the first, are summed or averaged over the wrong group, or, if they are tied, twice",
    ),
    Mistake(
        _scaled(ALL), "the loss's scale: gradients are divided by a wrong number of ranks, micro-batches or tokens"
    ),
    Mistake(
        lambda seen: bool(seen.before_update) and seen.before_update <= {"gradient norm", "copies of gradient norm"},
        "gradients are right, their norm is not: some are counted once per rank, or not at all, and clipping is wrong",
        "Megatron-LM #5916, #7452",
    ),
    Mistake(
        lambda seen: seen.is_of_an_auxiliary_loss and seen.scale is None and "copies of gradient" not in seen.kinds,
        "an auxiliary loss: its scale, the tokens that it balances, or the group over which load is summed; or a "
        "router does not get the gradient of its experts' weights",
        "Megatron-LM #5047, #2767, transformers #48690",
    ),
    Mistake(
        lambda seen: bool(seen.kinds) and not seen.before_update,
        "gradients and their norm are right, the update is not: clipping, learning rates, weight decay or state",
    ),
    Mistake(
        lambda seen: bool(seen.before_update) and all(kind.endswith("loss") for kind in seen.before_update),
        "a loss is logged otherwise than it is used: one rank's in place of the mean, or another scale",
        "Megatron-LM #3199",
    ),
    Mistake(
        lambda seen: any("copies of weight" in kind for kind in seen.kinds) and not seen.before_update,
        "ranks hold different weights after the update: shards are not gathered, or each rank makes its own update",
    ),
    Mistake(
        lambda seen: seen.first_load_differs,
        "experts' load is counted over the wrong ranks, or tokens go to other experts: another choice, a capacity that "
        "is one of each rank, or other inputs of the router (attention, masks)",
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
    lost = set()
    for one in comparison.differences:
        if "weight after" in one.quantity and one.error > _NOT_RESTORED:
            lost.add(one.name)
    if not lost:
        return None
    return f"not restored, or not by its step: {_listed(lost)}"


def _listed(names: set[str]) -> str:
    """Return the first names, and how many more there are."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def causes_of(evidence: Evidence) -> Iterator[str]:
    """Yield the known mistakes that the evidence fits; none if the initial weights differ already."""
    if 0 in map(attrgetter("step"), evidence.comparison.differences):
        return
    fitting = list(filter(lambda cause: cause.fits(evidence), CAUSES))
    elsewhere = filter(lambda cause: cause.fits(evidence), WHERE)
    for cause in fitting or islice(elsewhere, 1):
        text = cause.text
        if symbols := evidence.symbols(evidence.scale):
            weights = _listed(evidence.off) if evidence.weights == SOME else evidence.weights
            text += f" (of {weights}, {evidence.scale:.3g} times as large: {' or '.join(symbols)})"
        if cause.seen:
            text += f"; seen in {cause.seen}"
        yield text
