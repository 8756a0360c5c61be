"""The command line of megatron-moe doctor --target, which checks another trainer."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import replace_json, replace_text, require_writable
from megatron_moe.io.program import say
from megatron_moe.report.run_info import versions
from megatron_moe_tools.doctor.trainers.samples import Case, Sizes
from megatron_moe_tools.doctor.trainers.targets import TARGETS, load_trainer
from megatron_moe_tools.launch.local_ranks import LocalRanks

SOUND, WRONG = 0, 1


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the doctor's flags for other trainers."""
    about = "; ".join(f"{name}: {config}" for name, config in TARGETS.items())
    p = Parser(
        prog=program,
        usage="%(prog)s --target NAME CONFIG [--ranks N] [--checks NAME ...] [--report FILE] [--json FILE]",
        description="Does another trainer train what it should? A small copy of it runs on gloo ranks of this machine, "
        "and losses, gradients, norms, updates and routing are compared with one process of the same weights.",
        epilog=f"CONFIG is, for {about}. Exit status: 0 nothing is wrong; 1 something is; 2 a mistake in the flags.",
        allow_abbrev=False,
    )
    p.add_argument("--target", choices=TARGETS, required=True, help="the trainer")
    p.add_argument("config", metavar="CONFIG", type=Path, help="what it trains, and how")
    p.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="processes (default: 2)")
    p.add_argument("--checks", nargs="+", default=[], metavar="NAME", help="make only these; --list names them")
    p.add_argument("--timeout", type=float, default=120.0, metavar="S", help="a case that takes longer has hung [s]")
    p.add_argument("--report", metavar="FILE", help="write the page as Markdown")
    p.add_argument("--json", metavar="FILE", help="write the findings as JSON")
    p.add_argument("--list", action="store_true", help="list the checks and stop")
    return p


def check_trainer(program: str, argv: list[str]) -> int:
    """Check a trainer, report, and return the exit status."""
    flags = parser(program).parse_args(argv)
    for name in ("report", "json"):
        require_writable(f"--{name}", getattr(flags, name))
    trainer = load_trainer(flags.target, flags.config)  # refuses a mistake before processes are started
    if flags.ranks % (needed := getattr(trainer, "ranks", 1)):
        raise ConfigError(f"--ranks {flags.ranks}: the layout of {flags.config} needs a multiple of {needed} ranks")
    # Not before the flags are right: loading the engine takes seconds.
    from megatron_moe_tools.doctor.trainers import checks, page, rank

    planned = checks.checks_for(flags.ranks, getattr(trainer, "loss", "tokens"))
    named = ["gradients", "expert-bias", *(one.name for one in planned)]
    if flags.list:
        say("\n".join(named))
        return SOUND
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
    with LocalRanks(rank.run_into, 1, seconds=flags.timeout, threads=1) as alone:
        with LocalRanks(rank.run_into, flags.ranks, seconds=flags.timeout, threads=1) as many:
            runs = checks.Runs(_runner(flags, sizes, alone, many))
            for one in planned:
                if one.name in wanted:
                    findings.append(checks.find(one, runs))
                    _say(findings[-1])
            if "gradients" in wanted:
                findings.append(checks.untrained(Case(), runs))
                _say(findings[-1])
            if "expert-bias" in wanted and hasattr(trainer, "routers"):
                found = checks.bias_rule(Case(ranks=flags.ranks), runs)
                if found is None:
                    skipped.append("expert-bias: no router has one, or its rate is not known")
                else:
                    findings.append(found)
                    _say(found)
    for one in findings:
        one.command = checks.command(program, flags.target, str(flags.config), flags.ranks, one)
    about = {
        "target": flags.target,
        "config": str(flags.config),
        "ranks": flags.ranks,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "seconds": round(time.monotonic() - began),
    }
    text = page.page(about, findings, skipped)
    say(f"\n{text}")
    if flags.report is not None:
        replace_text(Path(flags.report), text)
    if flags.json is not None:
        replace_json(
            Path(flags.json),
            {
                "verdict": page.verdict(findings),
                **about,
                "checks": [one.as_dict() for one in findings],
                "skipped": skipped,
            },
        )
    return WRONG if any(not one.good for one in findings) else SOUND


_OPTIONAL = {
    "update": "gradient norm and update",
    "named_weights": "initial weights and updates",
    "routers": "experts' load and expert_bias",
}


def _runner(flags: argparse.Namespace, sizes: Sizes, alone: LocalRanks, many: LocalRanks) -> Callable[[Case], Any]:
    def run(case: Case) -> list[dict[str, Any]]:
        import torch

        pool = many if case.ranks > 1 else alone
        argument = {
            "target": flags.target,
            "config": str(flags.config.resolve()),
            "case": dataclasses.asdict(case),
            "sizes": dataclasses.asdict(sizes),
            "folder": str(pool.folder),
        }
        return [torch.load(path, weights_only=True) for path in pool.call(argument, case.ranks)]

    return run


def _say(finding: Any) -> None:
    say(f"{finding.check:<18} {'agrees' if finding.good else 'WRONG: ' + finding.first}")
