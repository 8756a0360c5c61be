"""The command line of megatron-moe doctor: measure the oracle and every layout, compare them, report."""

from __future__ import annotations

import argparse
import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import with_made_up_data
from megatron_moe.config.schema import Run, flatten
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, replace_text, require_writable
from megatron_moe.io.program import run_program, say
from megatron_moe.report.run_info import versions
from megatron_moe_tools import compat
from megatron_moe_tools.doctor.layouts import (
    MODELS,
    Layout,
    LayoutChoice,
    choose,
    default_choice,
    documents_choice,
    exempted,
    model,
    names_of,
    oracle_run,
)
from megatron_moe_tools.doctor.small_copy import PADDED_VOCABULARY, changed_fields, small_copy
from megatron_moe_tools.doctor.trainers.targets import PACKAGES, REFUSED, TARGETS, load_trainer
from megatron_moe_tools.launch.local_ranks import LocalRanks, RankFailure

if TYPE_CHECKING:  # flags are checked before torch is loaded
    from megatron_moe_tools.doctor.compare import DoctorReport
    from megatron_moe_tools.doctor.measure import AssembledModel, MeasuringRanks, Request
    from megatron_moe_tools.doctor.trainers.checks import TrainerFinding

NAME = "megatron-moe doctor"

SAME, DIFFERENT = 0, 1
_LARGEST_WORLD = 1 << 20
# In fp32 scores of two layouts differ by some 1e-7; a choice with a smaller margin than this proves nothing.
CLEAR_MARGIN = 1e-5
_SEEDS, _CANDIDATES = 6, 1024
_COLUMNS = {
    "losses": "loss",
    "gradient_norms": "grad_norm",
    "loss_scales": "loss_scale",
    "steps_applied": "committed",
}
"""What the report has of the oracle's steps."""
_SIZES_SHOWN = ("num_layers", "hidden_size", "num_experts", "seq_length", "global_batch_size")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the doctor's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s [--json FILE] [--layouts NAME ...] [--ranks 4|8] [--documents [--hf FOLDER]] [flags]\n"
        "       %(prog)s --target NAME CONFIG ... checks another trainer; --target script --help tells how",
        description="Does this model train the same under every layout? A small copy of it makes some steps on gloo "
        "ranks of this machine, and everything that comes out is compared with one process.",
        epilog="Exit status: 0 all layouts agree; 1 one differs or fails; 2 a mistake in the flags. Other flags, such "
        "as --preset NAME or --config FILE, are those of megatron-moe train: without any, models that have every "
        "feature between them are tried, in fp32, bf16 and fp16. Flags of a layout say which kinds of parallelism are "
        "in use; without any, all are tried.",
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", help="write the report as JSON")
    p.add_argument("--layouts", nargs="+", default=[], metavar="NAME", help="try only these; * is a wildcard")
    p.add_argument("--ranks", type=int, choices=(4, 8), default=4, help="ranks of the largest layout (default: 4)")
    p.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of each layout (default: 3)")
    p.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a layout that takes longer has hung [s] (default: 120)",
    )
    p.add_argument(
        "--documents",
        action="store_true",
        help="test instead that documents of a sequence do not see each other, with --reset-attention-mask: what one "
        "changes reaches no other, to the bit, in any layer, forward or backward",
    )
    p.add_argument("--hf", metavar="FOLDER", help="with --documents: test a folder's transformers model instead")
    p.add_argument("--list", action="store_true", help="list the layouts and stop")
    return p


def main(argv: list[str]) -> int:
    """Check the layouts, report, and return the exit status."""
    return run_program(NAME, _main, argv, interrupted="interrupted; its processes are ended, nothing was written")


def _main(argv: list[str]) -> int:
    if any(word.split("=")[0] == "--target" for word in argv):
        return check_trainer(argv)
    flags, rest = parser().parse_known_args(argv)
    if flags.steps < 1 or not 0 < flags.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"--steps {flags.steps} --timeout {flags.timeout:g}: both have to be above 0, and finite")
    require_writable("--json", flags.json)
    if flags.hf is not None and (not flags.documents or rest or flags.layouts or flags.list):
        raise ConfigError(f"--hf {flags.hf}: goes with --documents, without layouts or a run's flags")
    wanted = [] if flags.documents else flags.layouts  # documents_choice has other names
    if rest:
        own = compat.parse(rest, filled_in)
        # The rules of a real start, on the smallest number of ranks that the flags allow.
        filled = with_made_up_data(own)
        sizes = [filled.derived.model_ranks, filled.derived.expert_ranks]
        if min(sizes) < 1 or max(sizes) > _LARGEST_WORLD:
            sizes = [1]  # the rules about single numbers refuse it
        rules.check(filled, math.lcm(*sizes))
        copy = small_copy(own)
        if own.precision.fp8_format is not None:
            say(f"--fp8-format {own.precision.fp8_format}: is not compared; the small copy multiplies in fp32")
        choice = choose(own, copy, flags.ranks, wanted)
    else:
        own, copy = model("demo")
        choice = default_choice(flags.ranks, wanted)
    left_out: list[str] = []
    if flags.documents and flags.hf is None:
        left_out = exempted(choice)
        choice = documents_choice(choice, own, flags.layouts)
    if flags.list:
        say("\n".join(names_of(choice.layouts)))
        return SAME
    # Not before the flags are right: loading torch takes seconds.
    from megatron_moe_tools.doctor.compare import details

    for text in left_out:
        say(text)
    began = time.monotonic()
    try:
        if flags.documents:
            report = check_documents(choice, flags.timeout, flags.hf)
        else:
            report = check_layouts(own, copy, choice, flags.steps, flags.timeout)
    except RankFailure as error:
        say(f"the oracle, one process, could not be measured:\n{error}")
        return DIFFERENT
    for layout, rule in report.refused:
        say(f"not tried: {layout.name}: {rule}")
    say(f"{time.monotonic() - began:.0f} s")
    for text in details(report):
        say(text)
    if flags.json is not None:
        replace_json(Path(flags.json), report.as_dict())
        say(f"wrote {flags.json}")
    return DIFFERENT if report.failed else SAME


def check_documents(choice: LayoutChoice, seconds: float, folder: str | None) -> DoctorReport:
    """Look for leaks between documents under every layout, or in the transformers model of a folder.

    Args:
        choice: of `layouts.documents_choice`.
        seconds: a layout that takes longer has hung.
    """
    from megatron_moe_tools.doctor import compare, documents, leaks

    about = {"versions": versions()}
    if folder is not None:
        return compare.DoctorReport(about, [leaks.leaks_of_folder(Path(folder))], verdicts=leaks.APART)
    report = compare.DoctorReport(about, refused=choice.refused, verdicts=leaks.APART)
    layouts = choice.layouts
    ranks = max(layout.ranks for layout in layouts)
    say(f"starting {ranks} processes for {len(layouts)} layouts; nothing leaves this machine, no GPU is used")
    with LocalRanks(documents.probe_into, ranks, seconds=seconds, threads=1) as pool:
        for number, layout in enumerate(layouts, start=1):
            at = time.monotonic()
            try:
                records = pool.call(flatten(layout.run), layout.ranks)
            except RankFailure as failure:
                report.findings.append(compare.FindingOfLayout(layout, time.monotonic() - at, error=str(failure)))
            else:
                report.findings.append(leaks.finding_of(layout, records, time.monotonic() - at))
            say(compare.log_line(number, len(layouts), report.findings[-1]))
    return report


def check_layouts(own: Run, copy: Run, choice: LayoutChoice, steps: int, seconds: float) -> DoctorReport:
    """Measure the oracle and every layout, and compare each as soon as it is measured.

    Args:
        own: the run as the flags give it.
        copy: its small copy.
        choice: the layouts.
        steps: optimizer steps of each layout.
        seconds: a layout that takes longer has hung.

    Raises:
        RankFailure: the oracle itself could not be measured.
    """
    from megatron_moe_tools.doctor import compare, measure

    layouts = choice.layouts
    given, defaults = flatten(own), flatten(Run())
    ranks = max(layout.ranks for layout in layouts)
    sizes = ", ".join(f"{name} {flatten(copy)[name]}" for name in _SIZES_SHOWN)
    models = {}
    for layout in layouts:
        if layout.model:
            models[layout.model] = MODELS[layout.model]
    if models:
        say(f"small copies of models: {', '.join(models)}; demo: {sizes}")
    else:
        say(f"a small copy in fp32: {sizes}")
    if choice.reduced_from:
        say(f"the layout in use ({choice.reduced_from}), at size 2 and at most {ranks} ranks")
    say(f"starting {ranks} processes for {len(layouts)} layouts; nothing leaves this machine, no GPU is used")
    report = compare.DoctorReport(
        {
            "flags": {name: value for name, value in given.items() if value != defaults[name]},
            "layout_in_use": choice.reduced_from,
            "shrunk": {name: list(pair) for name, pair in changed_fields(own, copy).items()},
            "features": sorted(frozenset().union(*(layout.features for layout in layouts))),
            "models": models,
            "steps": steps,
            "versions": versions(),
            "oracles": [],
        },
        refused=choice.refused,
    )
    with measure.MeasuringRanks(ranks, seconds) as pool:
        oracles: dict[tuple[Run, bool, str], tuple[AssembledModel, Request]] = {}
        for number, layout in enumerate(layouts, start=1):
            key = layout.copy, layout.masked, layout.run.derived.params_dtype_name
            if key not in oracles:
                oracles[key] = oracle, request = _oracle(pool, layout, steps)
                about: dict[str, Any] = {
                    "model": layout.model,
                    "dtype": request.run.derived.params_dtype_name,
                    "masked": request.masked,
                    "data_seed": request.data_seed,
                }
                for name, of_step in _COLUMNS.items():
                    about[name] = [_finite(step[of_step]) for step in oracle.steps]
                about["smallest_margin"] = _finite(oracle.smallest_margin)
                report.about["oracles"].append(about)
            (oracle, request), at = oracles[key], time.monotonic()
            try:
                whole = measure.assemble(pool.measure(dataclasses.replace(request, run=layout.run), layout.ranks))
            except RankFailure as failure:
                report.findings.append(compare.FindingOfLayout(layout, time.monotonic() - at, error=str(failure)))
            else:
                comparison = compare.compare(whole, oracle, compare.tolerances_of(layout.run))
                fits = compare.matching_patterns(whole, oracle, comparison, one_process=not layout.masked)
                report.findings.append(compare.LayoutFinding(layout, time.monotonic() - at, comparison, fits))
            say(compare.log_line(number, len(layouts), report.findings[-1]))
    return report


def _oracle(pool: MeasuringRanks, layout: Layout, steps: int) -> tuple[AssembledModel, Request]:
    """Return the result of one process, on the first samples whose choices of experts all have a clear margin.

    Where the layout is in half precision, each step's samples are picked from many: two runs may differ in a logit by
    what roundings add up to, in a score by a quarter of that, and two scores decide a choice.
    """
    from megatron_moe_tools.doctor.compare import rounding_error
    from megatron_moe_tools.doctor.measure import Request, assemble

    run, dtype = oracle_run(layout.copy), layout.run.derived.params_dtype_name
    rules.check(run, 1)
    candidates, about = 0, ""
    if layout.model:
        about += f", {layout.model}"
    if not layout.masked:
        about += ", a loss on every token"
    if dtype != "float32":
        candidates, own = _CANDIDATES, run.derived.params_dtype_name
        about += f", in {own}"
        if own != dtype:
            about += f" from weights in {dtype}"
    gradients_at = tuple(range(1, steps + 1))
    clear = max(CLEAR_MARGIN, rounding_error(layout.run) / 2)
    best: tuple[AssembledModel, Request] | None = None
    for seed in range(_SEEDS):
        request = Request(run, PADDED_VOCABULARY, steps, gradients_at, seed, layout.masked, dtype, candidates)
        (record,) = pool.measure(request, 1)
        whole = assemble([record])
        if best is None or whole.smallest_margin > best[0].smallest_margin:
            best = whole, dataclasses.replace(request, candidates=0, picked=tuple(record["picked"]))
        if whole.smallest_margin >= clear:
            break
    assert best is not None
    margin = best[0].smallest_margin
    closest = ""
    if not math.isinf(margin):
        closest = f"; the closest choice of an expert is decided by {margin:.1e}"
    losses = ", ".join(f"{step['loss']:.5f}" for step in best[0].steps)
    say(f"the oracle, one process{about}: losses {losses}{closest}")
    if margin < clear:
        say(f"that is less than {clear:.0e}: counts may differ by a choice without any fault of a layout")
    return best


def _finite(value: float | None) -> float | None:
    """Return the value; None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


# ---- Other trainers.


def trainer_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of --target."""
    about = "; ".join(f"{name}: {config}" for name, config in TARGETS.items())
    p = Parser(
        prog=NAME,
        usage="%(prog)s --target NAME CONFIG [--ranks N] [--checks NAME ...] [--report FILE] [--json FILE]",
        description="Does another trainer train what it should? A small copy of it runs on gloo ranks of this machine, "
        "and losses, gradients, norms, updates and routing are compared with one process of the same weights.",
        epilog=f"CONFIG is, for {about}. Exit status: 0 nothing is wrong; 1 something is; 2 a mistake in the flags.",
        allow_abbrev=False,
    )
    p.add_argument("--target", choices=[*TARGETS, *REFUSED], required=True, help="the trainer")
    p.add_argument("config", metavar="CONFIG", type=Path, help="what it trains, and how")
    p.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="processes (default: 2)")
    p.add_argument("--checks", nargs="+", default=[], metavar="NAME", help="make only these; --list names them")
    p.add_argument("--timeout", type=float, default=120.0, metavar="S", help="a case that takes longer has hung [s]")
    p.add_argument("--report", metavar="FILE", help="write the page as Markdown")
    p.add_argument("--json", metavar="FILE", help="write the findings as JSON")
    p.add_argument("--list", action="store_true", help="list the checks and stop")
    return p


def check_trainer(argv: list[str]) -> int:
    """Check a trainer, report, and return the exit status."""
    flags = trainer_parser().parse_args(argv)
    for name in ("report", "json"):
        require_writable(f"--{name}", getattr(flags, name))
    trainer = load_trainer(flags.target, flags.config)  # refuses a mistake before processes are started
    if flags.ranks % (needed := getattr(trainer, "ranks", 1)):
        raise ConfigError(f"--ranks {flags.ranks}: the layout of {flags.config} needs a multiple of {needed} ranks")
    # Not before the flags are right: loading the engine takes seconds.
    from megatron_moe_tools.doctor.trainers import checks, rank
    from megatron_moe_tools.doctor.trainers.samples import Case, Sizes

    planned = checks.checks_for(flags.ranks, getattr(trainer, "loss", "tokens"))
    named = ["gradients", "expert-bias", *(one.name for one in planned)]
    if flags.list:
        say("\n".join(named))
        return SAME
    if unknown := sorted(set(flags.checks) - set(named)):
        raise ConfigError(f"--checks {' '.join(unknown)}: there are {', '.join(named)}")
    wanted = set(flags.checks or named)
    skipped = []
    for name, reason in getattr(trainer, "leaves_out", {}).items():
        skipped.append(f"{name}: {reason}")
        wanted.discard(name)
    for one in planned:
        if one.name in wanted and (missing := [name for name in one.needs if not getattr(trainer, name, None)]):
            skipped.append(f"{one.name}: the trainer gives no {', '.join(missing)}")
            wanted.remove(one.name)
    for name, what in _OPTIONAL.items():
        if not hasattr(trainer, name):
            skipped.append(f"{what}: the trainer gives no {name}")
    began, findings = time.monotonic(), list[checks.TrainerFinding]()
    sizes = Sizes(vocabulary=getattr(trainer, "vocabulary", Sizes.vocabulary))
    request = rank.TrainerRequest(flags.target, str(flags.config.resolve()), Case(), sizes, folder="")
    with LocalRanks(rank.run_into, 1, seconds=flags.timeout, threads=1) as alone:
        with LocalRanks(rank.run_into, flags.ranks, seconds=flags.timeout, threads=1) as many:
            runs = checks.Runs(alone, many, request)
            for one in planned:
                if one.name in wanted:
                    findings.append(checks.find(one, runs))
                    _say_finding(findings[-1])
            if "gradients" in wanted:
                findings.append(checks.untrained(Case(), runs))
                _say_finding(findings[-1])
            if "expert-bias" in wanted and hasattr(trainer, "routers"):
                found = checks.bias_rule(Case(ranks=flags.ranks), runs)
                if found is None:
                    skipped.append("expert-bias: no router has one, or its rate is not known")
                else:
                    findings.append(found)
                    _say_finding(found)
    for finding in findings:
        finding.command = checks.command(NAME, flags.target, str(flags.config), flags.ranks, finding)
    about = {
        "target": flags.target,
        "config": str(flags.config),
        "ranks": flags.ranks,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(*PACKAGES).items()),
        "seconds": round(time.monotonic() - began),
    }
    text = trainer_page(about, findings, skipped)
    say(f"\n{text}")
    if flags.report is not None:
        replace_text(Path(flags.report), text)
    if flags.json is not None:
        replace_json(
            Path(flags.json),
            {
                "verdict": verdict(findings),
                **about,
                "checks": [one.as_dict() for one in findings],
                "skipped": skipped,
            },
        )
    return DIFFERENT if any(not one.good for one in findings) else SAME


_OPTIONAL = {
    "update": "gradient norm and update",
    "named_weights": "initial weights and updates",
    "routers": "experts' load and expert_bias",
}


def _say_finding(finding: TrainerFinding) -> None:
    say(f"{finding.check:<18} {'agrees' if finding.good else 'WRONG: ' + finding.first}")


def verdict(findings: Sequence[TrainerFinding]) -> str:
    """Return the result in one line."""
    bad = []
    for one in findings:
        if not one.good:
            bad.append(one.check)
    if not bad:
        return f"nothing is wrong in {len(findings)} checks"
    return f"{len(bad)} of {len(findings)} checks found something wrong: {', '.join(bad)}"


def trainer_page(about: dict[str, Any], findings: Sequence[TrainerFinding], skipped: Sequence[str]) -> str:
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
        for line in one.lines():
            yield f"- {line}"
        yield f"\n```bash\n{one.command}\n```"
    good = list(filter(attrgetter("good"), findings))
    if good:
        yield "\n## What agrees"
        yield "\n| check | question | largest relative errors |\n|---|---|---|"
        for one in good:
            assert one.comparison is not None
            errors = []
            for kind, error in one.comparison.largest.items():
                if error:
                    errors.append(f"{kind} {error:.1e}")
            yield f"| {one.check} | {one.question} | {', '.join(errors) or 'none'} |"
    if skipped:
        yield "\n## What was not checked\n"
        for text in skipped:
            yield f"- {text}"
