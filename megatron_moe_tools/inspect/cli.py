"""The command line of megatron-moe inspect and its exit status. torch is imported where tensors are read."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import note, run_program, say
from megatron_moe.io.texts import size_text
from megatron_moe_tools.inspect import steps

NAME = "megatron-moe inspect"

WELL, NOT_WELL = 0, 1


def parser() -> argparse.ArgumentParser:
    """Return the parser, with one sub-parser per command; DIR is a folder of steps or a single iter_* folder."""
    p = Parser(
        prog=NAME,
        description="Look at checkpoints, check them, compare them, remove those that are not needed. No GPU, no "
        "process group, no model.",
        epilog="Exit status: 0 all is well (diff: equal); 1 something checked is not; 2 a mistake in the arguments.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, folders: str | int = "+") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("folders", nargs=folders, metavar="DIR", help="a folder of steps, or one iter_* folder")
        sub.add_argument("--json", metavar="FILE", help="write the result as JSON")
        return sub

    sub = command("list", "the steps of each folder: samples, size, time, layout, versions, complete or not")
    sub.add_argument("--verify", action="store_true", help="hash every file too")
    command("config", "the flags of a step (of the newest one of a folder); of two: what differs between them")
    for name, text, folders in (
        ("stats", "shape, type, min, max, mean, std, NaN and Inf of every tensor", 1),
        ("diff", "which tensors of two steps are equal to the bit, and how far the others are apart", 2),
    ):
        sub = command(name, text, folders)
        sub.add_argument("--match", metavar="REGEX", help="only tensors whose key it matches, anywhere")
        sub.add_argument(
            "--no-verify", dest="verify", action="store_false", help="read files that are not hashed first"
        )
    command("verify", "hash every file of every step and compare with the manifest")
    sub = command("prune", "remove steps that are not needed; never the last good one, never a damaged one", 1)
    # Training's flags of the same meaning are taken, too.
    sub.add_argument(
        "--keep-last", "--keep-last-k", type=int, required=True, metavar="K", help="keep the last K good steps"
    )
    sub.add_argument("--keep-every", "--save-retain-interval", type=int, metavar="N", help="keep multiples of N too")
    sub.add_argument("--dry-run", action="store_true", help="print what would be removed")
    sub.add_argument("--no-verify", dest="verify", action="store_false", help="do not hash what is kept")
    return p


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    require_writable("--json", flags.json)
    _ = _regex(getattr(flags, "match", None))
    try:
        found = [steps.resolve(path) for path in flags.folders]
        lines, result, well = _COMMANDS[flags.command](flags, found)
    except steps.DamagedError as error:
        note(f"{NAME}: {error}")
        return NOT_WELL
    say("\n".join(lines))
    if flags.json is not None:
        replace_json(Path(flags.json), {"command": flags.command, "well": well, **result})
    return WELL if well else NOT_WELL


Outcome = tuple[list[str], dict[str, Any], bool]


def _list(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    parts = [steps.list_steps(one, flags.verify, note) for one in found]
    lines = [line for part, _, _ in parts for line in part]
    return lines, {"folders": [facts for _, facts, _ in parts]}, all(well for _, _, well in parts)


def _config(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    if len(found) > 2:
        raise ConfigError(f"config takes one DIR or two, and there are {len(found)}")
    chosen = [one.newest for one in found]
    configs = [steps.config_of(step) for step in chosen]
    if len(configs) == 1:
        lines = [f"{chosen[0]}:", *(f"  {name}: {json.dumps(value)}" for name, value in sorted(configs[0].items()))]
        return lines, {"step": str(chosen[0]), "config": configs[0]}, True
    differing = steps.differing(*configs)
    lines = [f"{chosen[0]} -> {chosen[1]}: {len(differing)} settings differ"]
    lines += [f"  {name}: {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in differing.items()]
    return lines, {"steps": [str(step) for step in chosen], "differing": differing}, not differing


def _stats(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    from megatron_moe_tools.inspect import tensors

    step = _readable(found[0], flags.verify)
    reader = tensors.opened(step)
    keys = tensors.keys(reader, _regex(flags.match))
    rows, lines, broken = [], [f"{step}: {len(keys)} tensors"], []
    for key in keys:
        try:
            row = tensors.stats(reader, key)
        except ConfigError as error:
            broken.append(str(error))
            lines.append(f"  {key}: CANNOT BE READ: {error}")
            continue
        rows.append(row)
        numbers = ", ".join(f"{name} {_short(row[name])}" for name in ("min", "max", "mean", "std"))
        bad = f", {row['nan']} NaN, {row['inf']} INF" if row["nan"] or row["inf"] else ""
        lines.append(f"  {key}: {row['dtype']} {row['shape']}, {numbers}{bad}")
    poisoned = [row["key"] for row in rows if row["nan"] or row["inf"]]
    if poisoned:
        lines.append(f"{len(poisoned)} tensors hold numbers that are not finite: {', '.join(poisoned[:5])}")
    return lines, {"step": str(step), "tensors": rows, "unreadable": broken}, not (poisoned or broken)


def _diff(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    from megatron_moe_tools.inspect import tensors

    readers = [tensors.opened(_readable(one, flags.verify)) for one in found]
    pattern = _regex(flags.match)
    keys = sorted({key for reader in readers for key in tensors.keys(reader, pattern)})
    rows, lines = [], [f"{readers[0].step} and {readers[1].step}: {len(keys)} tensors"]
    for key in keys:
        try:
            row = tensors.diff(readers[0], readers[1], key)
        except ConfigError as error:
            row = {"key": key, "equal": False, "unreadable": str(error)}
        if row.get("max_difference") == float("inf"):
            row["max_difference"] = "inf"
        rows.append(row)
        if not row["equal"]:
            lines.append(f"  {key}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("key", "equal")))
    equal = sum(row["equal"] for row in rows)
    lines.append(f"{equal} tensors are equal to the bit, {len(rows) - equal} are not")
    return lines, {"steps": [str(reader.step) for reader in readers], "tensors": rows}, equal == len(rows) > 0


def _verify(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    lines, rows = [], []
    for step in (step for one in found for step in one.steps):
        defect = steps.damage(step, note)
        facts = steps.about(step)
        rows.append({"step": str(step), "defect": defect, "bytes": facts.get("bytes"), "files": facts.get("files")})
        good = f"good: {facts.get('files')} files, {size_text(facts.get('bytes', 0))}"
        lines.append(f"{step}: {good if defect is None else f'DAMAGED: {defect}'}")
    lines += [f"{one.root}: no step yet" for one in found if not one.steps]
    well = all(row["defect"] is None for row in rows) and all(one.steps for one in found)
    return lines, {"steps": rows}, well


def _prune(flags: argparse.Namespace, found: list[steps.Folder]) -> Outcome:
    for name in ("keep_last", "keep_every"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: has to be 1 or more")
    if Path(flags.folders[0]).absolute() != found[0].root.absolute():
        raise ConfigError(f"{flags.folders[0]}: is one step; prune takes the folder that holds the steps")
    lines = []
    if not flags.verify:
        lines.append("NOT VERIFIED (--no-verify): a step that stays may be damaged")
    plan = steps.plan_pruning(found[0], flags.keep_last, flags.keep_every, flags.verify, note)
    lines += [f"stays, damaged: step {number}: {reason}" for number, reason in sorted(plan.damaged.items())]
    lines.append(f"{'would stay' if flags.dry_run else 'stay'}: {_numbers(plan.stay)}")
    if plan.go and not flags.dry_run:
        steps.remove(found[0], plan.go)
    lines.append(f"{'would go' if flags.dry_run else 'removed'}: {_numbers(plan.go)}")
    result = {"stay": plan.stay, "go": plan.go, "damaged": plan.damaged, "dry_run": flags.dry_run}
    return lines, result, not plan.damaged


_COMMANDS = {
    "list": _list, "config": _config, "stats": _stats, "diff": _diff, "verify": _verify, "prune": _prune,
}  # fmt: skip


def _readable(found: steps.Folder, verify: bool) -> Path:
    """Return the step to read tensors of, hashed first if `verify`.

    Raises:
        DamagedError: it is damaged.
    """
    step = found.newest
    if not verify:
        note(f"NOT VERIFIED (--no-verify): {step} may be damaged")
        return step
    defect = steps.damage(step, note)
    if defect is not None:
        raise steps.DamagedError(f"{step}: {defect}; --no-verify reads it all the same")
    return step


def _regex(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"--match {pattern}: is no regular expression: {error}") from None
    return pattern


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _numbers(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"
