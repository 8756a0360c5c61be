"""The report on a trainer: one page of Markdown, the verdict first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_moe_tools.doctor.trainers.checks import TrainerFinding, shown_lines


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
