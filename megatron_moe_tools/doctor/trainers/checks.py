"""What the doctor asks of a trainer, and the findings.

Each check compares two cases, which have to give the same, or looks at one. The cases of one process show what is wrong
on every layout, and need no other implementation to compare with: a batch cut in another way, padding, tokens which the
trained ones must not see.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_moe_tools.doctor.compare import EXPERT, FP32, Comparison, compare, describe, matching_patterns
from megatron_moe_tools.doctor.measure import AssembledModel, LayoutDifference, assemble
from megatron_moe_tools.doctor.trainers.causes import Evidence, causes_of, not_restored
from megatron_moe_tools.doctor.trainers.samples import Case
from megatron_moe_tools.launch.local_ranks import RankFailure

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
    found = [
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
    if loss != "tokens":  # its auxiliary losses and means depend on how a batch is cut
        found = [one for one in found if one.name != "padding"]
    return found


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
    """The cases that have run, each once: its records and the model assembled from them."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._records: dict[Case, list[dict[str, Any]]] = {}

    def records(self, case: Case) -> list[dict[str, Any]]:
        """Return every rank's record of a case."""
        if case not in self._records:
            self._records[case] = self._run(case)
        return self._records[case]

    def model(self, case: Case) -> AssembledModel:
        """Return what the ranks of a case hold together."""
        return assemble(self.records(case))


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
    if check.name == "micro-batches" and Evidence(comparison, wanted, got, [], False).starts_at_a_router:
        finding.causes += matching_patterns(got, wanted, comparison, one_process=True)
    if check.cause and not finding.causes:
        finding.causes.append(check.cause)
    if check.got.saved and (lost := not_restored(comparison)) is not None:
        finding.causes.append(lost)
    if check.name == "layout":
        even = replace(check.wanted, masked=False), replace(check.got, masked=False)
        agrees = compare(runs.model(even[1]), runs.model(even[0]), TOLERANCES).agrees
        finding.causes += causes_of(Evidence(comparison, wanted, got, runs.records(check.got), agrees))
        finding.causes += matching_patterns(got, wanted, comparison)
    return finding


def _related(check: TrainerCheck, wanted: AssembledModel, got: AssembledModel) -> Comparison:
    if check.relation == "all":
        return compare(got, wanted, TOLERANCES)
    if check.relation == "batch":
        kept = {name: tensors for name, tensors in got.tensors.items() if not name.startswith("weight")}
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
_ORDER = ("initial weight", "token counts", "dropped", "copies", "loss", "others", "gradient")
_ORDER += ("gradient norm", "expert_bias", "weight after", "copies of weight after")


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
        first = differences[0]
        finding.first = f"{first.name} has no gradient, and {len(differences) - 1} more"
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


def shown_lines(finding: TrainerFinding, most: int = 6) -> Iterator[str]:
    """Yield the lines about a finding that is not good."""
    if finding.error is not None:
        yield finding.error
        return
    assert finding.comparison is not None
    yield f"first: {finding.first}"
    for cause in finding.causes:
        yield f"likely: {cause}"
    for one in finding.comparison.differences[1:most]:
        yield describe(one)
    if len(finding.comparison.differences) > most:
        yield f"and {len(finding.comparison.differences) - most} more"


# ---- The page.


def verdict(findings: Sequence[TrainerFinding]) -> str:
    """Return the result in one line."""
    bad = [one.check for one in findings if not one.good]
    if not bad:
        return f"nothing is wrong in {len(findings)} checks"
    return f"{len(bad)} of {len(findings)} checks found something wrong: {', '.join(bad)}"


def page(about: dict[str, Any], findings: Sequence[TrainerFinding], skipped: Sequence[str]) -> str:
    """Return the page.

    Args:
        about: what was checked: target, config, ranks, versions.
        findings: of all checks.
        skipped: what was not checked, and why.
    """
    return "\n".join(_lines(about, findings, skipped)) + "\n"


def _lines(about: dict[str, Any], findings: Sequence[TrainerFinding], skipped: Sequence[str]) -> Iterator[str]:
    yield f"# {verdict(findings).capitalize()}"
    yield ""
    for name, value in about.items():
        yield f"- {name}: {value}"
    for one in findings:
        if one.good:
            continue
        yield f"\n## {one.check}: {one.question}"
        yield ""
        for line in shown_lines(one):
            yield f"- {line}"
        yield f"\n```bash\n{one.command}\n```"
    good = [one for one in findings if one.good]
    if good:
        yield "\n## What agrees"
        yield "\n| check | question | largest relative errors |\n|---|---|---|"
        for one in good:
            assert one.comparison is not None
            errors = [f"{kind} {error:.1e}" for kind, error in one.comparison.largest.items() if error]
            yield f"| {one.check} | {one.question} | {', '.join(errors) or 'none'} |"
    if skipped:
        yield "\n## What was not checked\n"
        for text in skipped:
            yield f"- {text}"
