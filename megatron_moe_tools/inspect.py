"""megatron-moe inspect: list, check, compare and prune checkpoints. torch is loaded where tensors are read."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.checkpoint import folder, index, manifest
from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import is_url, require_store
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.object_storage import location
from megatron_moe.io.program import note, run_program, say
from megatron_moe.io.texts import size_text

if TYPE_CHECKING:
    import torch

    from megatron_moe.checkpoint.step_reader import StepReader

NAME = "megatron-moe inspect"

WELL, NOT_WELL = 0, 1

_STEP_NAME = re.compile(r"iter_\d{7,}", re.ASCII)
_HIDDEN = re.compile(r"\.iter_\d{7,}\.(saving|deleting)", re.ASCII)
_PUT_ASIDE = re.compile(r"iter_\d{7,}\.bad\d*", re.ASCII)
_AXES = {"TP": "tp_size", "CP": "cp_size", "PP": "pp_size", "DP": "dp_size", "EP": "ep_size", "ETP": "etp_size"}
_STATE_SHOWN = ("consumed_samples", "layout", "has_optimizer", "versions", "checkpoint_warnings")
_VERSIONS_SHOWN = ("torch", "megatron-core", "python")
_BETWEEN_LINES = 5.0
"""Seconds between lines of progress."""
_THREADS = 4
"""Number of files that are hashed at a time."""
_BLOCK = 1 << 22
"""Number of elements that are widened to fp64 at a time."""


class DamagedError(Exception):
    """A step that is read is damaged or not complete; the exit status is 1."""


@dataclass(frozen=True)
class Folder:
    """A DIR of the command line: a folder of steps, or a single one of them."""

    root: Path
    steps: tuple[Path, ...]
    single: bool = False

    @property
    def newest(self) -> Path:
        """The newest step whose names and sizes are right. Raises DamagedError: there is none."""
        reasons: list[str] = []
        for step in reversed(self.steps):
            defect = manifest.structure_defect(step)
            if defect is None:
                return step
            reasons.insert(0, f"{step.name}: {defect}")
        raise DamagedError(f"{self.root}: no step of it can be read: {'; '.join(reasons) or 'it holds no step'}")


@dataclass
class InspectOutcome:
    """The result of a command: what is printed, what is written as JSON, and whether all is well."""

    lines: list[str]
    facts: dict[str, Any]
    well: bool


Command = Callable[[argparse.Namespace, list[Folder]], InspectOutcome]
_COMMANDS: dict[str, Command] = {}


def command(run: Command) -> Command:
    """Register a function `run_NAME` as the command NAME."""
    _COMMANDS[run.__name__.removeprefix("run_")] = run
    return run


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

    def add(name: str, text: str, folders: str | int = "+") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("folders", nargs=folders, metavar="DIR", help="a folder of steps, or one iter_* folder")
        sub.add_argument("--json", metavar="FILE", help="write the result as JSON")
        return sub

    sub = add("list", "the steps of each folder: samples, size, time, layout, versions, complete or not")
    sub.add_argument("--verify", action="store_true", help="hash every file too")
    add("config", "the flags of a step (of the newest one of a folder); of two: what differs between them")
    for name, text, folders in (
        ("stats", "shape, type, min, max, mean, std, NaN and Inf of every tensor", 1),
        ("diff", "which tensors of two steps are equal to the bit, and how far the others are apart", 2),
    ):
        sub = add(name, text, folders)
        sub.add_argument("--match", metavar="REGEX", help="only tensors whose key it matches, anywhere")
        sub.add_argument("--no-verify", dest="verify", action="store_false", help="do not hash files before")
    add("verify", "hash every file of every step and compare with the manifest")
    sub = add("prune", "remove steps that are not needed; never the last good one, never a damaged one", 1)
    # Training's flags of the same meaning are taken, too.
    sub.add_argument("--keep-last", "--keep-last-k", type=int, required=True, metavar="K", help="keep the last K good")
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
    pattern = getattr(flags, "match", None)
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"--match {pattern}: is no regular expression: {error}") from None
    try:
        outcome = _COMMANDS[flags.command](flags, list(map(resolve, flags.folders)))
    except DamagedError as error:
        note(f"{NAME}: {error}")
        return NOT_WELL
    say("\n".join(outcome.lines))
    if flags.json is not None:
        replace_json(Path(flags.json), {"command": flags.command, "well": outcome.well, **outcome.facts})
    return WELL if outcome.well else NOT_WELL


def resolve(path: str) -> Folder:
    """Return the steps that a DIR of the command line means. Raises ConfigError: it holds no checkpoints."""
    if is_url(path):
        require_store("DIR", path)
    root = location(path)
    if not root.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    if _STEP_NAME.fullmatch(root.absolute().name):
        return Folder(root.absolute().parent, (root.absolute(),), single=True)
    steps = tuple(folder.step_folder(root, number) for number in folder.steps(root))
    if not steps and not (root / folder.OWNER).exists() and not (root / folder.LATEST).exists():
        hint = folder.steps_below(root)
        raise ConfigError(f"{path}: is not a checkpoint folder: it holds neither iter_* nor {folder.LATEST}{hint}")
    return Folder(root, steps)


def number_of(step: Path) -> int:
    """Return the iteration of a step's folder."""
    return int(step.name.removeprefix("iter_"))


# ---- list and verify


@command
def run_list(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Tell of every step what it is, and whether it is good."""
    whole = InspectOutcome([], {"folders": []}, True)
    for one in found:
        lines, rows, newest = whole.lines, [], None
        lines.append(f"{one.root}:")
        for step in one.steps:
            facts = about(step)
            if flags.verify and facts["defect"] is None:
                facts["defect"] = damage(step)
                facts["verified"] = facts["defect"] is None
            if facts["defect"] is None:
                newest = facts["step"]
            whole.well = whole.well and facts["defect"] is None
            rows.append(facts)
            lines.append(_line(facts))
        if not rows:
            lines.append("  no step yet")
            whole.well = False
        result: dict[str, Any] = {"folder": str(one.root), "steps": rows}
        whole.facts["folders"].append(result)
        if one.single:
            continue
        for kind, pattern, words in (
            ("hidden", _HIDDEN, "being written, or left by a writer that died"),
            ("put_aside", _PUT_ASIDE, "damaged, put aside when the step was saved again"),
        ):
            names = sorted(filter(pattern.fullmatch, (entry.name for entry in one.root.iterdir())))
            if names:
                result[kind] = names
                lines.append(f"  {words}: {', '.join(names)}")
        if (one.root / folder.LATEST).is_file():
            pointed = (one.root / folder.LATEST).read_text(errors="replace").strip()[:20]
            if pointed != str(newest):
                result["pointer"] = pointed
                lines.append(f"  {folder.LATEST} names step {pointed}; the newest complete step is {newest}")
                whole.well = False
    return whole


def about(step: Path) -> dict[str, Any]:
    """Return a step as plain values; `defect` says what is wrong with names, sizes and the small files."""
    facts: dict[str, Any] = {"step": number_of(step), "folder": str(step)}
    facts["defect"] = manifest.structure_defect(step) or folder.small_files_defect(step)
    try:
        content = manifest.read(step)
        facts |= {"bytes": content.total_bytes, "files": len(content.files)}
        saved = (step / manifest.NAME).stat().st_mtime
        facts["saved"] = datetime.fromtimestamp(saved, timezone.utc).isoformat(timespec="seconds")
        if facts["defect"] is None:
            state = folder.read_json(step / folder.STATE)
            facts |= {name: state[name] for name in _STATE_SHOWN if name in state}
    except (manifest.ManifestError, OSError, ConfigError):
        pass  # `defect` says it
    return facts


def _line(facts: dict[str, Any]) -> str:
    parts = [f"  step {facts['step']:>8}"]
    if "consumed_samples" in facts:
        parts.append(f"{facts['consumed_samples']:,} samples")
    if "bytes" in facts:
        parts.append(size_text(facts["bytes"]))
        parts.append(facts["saved"])
    layout = facts.get("layout")
    if layout is not None:
        axes = [f"{axis}{layout[name]}" for axis, name in _AXES.items() if layout.get(name, 1) != 1]
        parts.append(" ".join(axes) or f"{layout.get('world_size', 1)} ranks")
    if "versions" in facts:
        shown = [f"{name} {facts['versions'][name]}" for name in _VERSIONS_SHOWN if name in facts["versions"]]
        parts.append(", ".join(shown))
    condition = "complete"
    if facts["defect"] is not None:
        condition = f"DAMAGED: {facts['defect']}"
    elif facts.get("verified"):
        condition = "verified"
    return ", ".join(parts) + ": " + condition


@command
def run_verify(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Hash every file of every step."""
    lines, rows, well = [], [], True
    for one in found:
        for step in one.steps:
            defect, facts = damage(step), about(step)
            rows.append({"step": str(step), "defect": defect, "bytes": facts.get("bytes"), "files": facts.get("files")})
            condition = f"good: {facts.get('files')} files, {size_text(facts.get('bytes', 0))}"
            if defect is not None:
                condition, well = f"DAMAGED: {defect}", False
            lines.append(f"{step}: {condition}")
    for one in found:
        if not one.steps:
            lines.append(f"{one.root}: no step yet")
            well = False
    return InspectOutcome(lines, {"steps": rows}, well)


def damage(step: Path) -> str | None:
    """Hash every file of a step and read its index; return what is wrong, None if nothing is."""
    defect = manifest.structure_defect(step)
    if defect is not None:
        return defect
    content = manifest.read(step)
    done, started, total = 0, time.monotonic(), content.total_bytes
    last_line = started

    def advance(count: int) -> None:  # a line every few seconds; several threads read
        nonlocal done, last_line
        done, now = done + count, time.monotonic()
        if now - last_line > _BETWEEN_LINES:
            last_line, speed = now, done / (now - started)
            left = f"{(total - done) / max(speed, 1.0):.0f} s left"
            note(f"{step}: {size_text(done)} of {size_text(total)}, {size_text(int(speed))}/s, {left}")

    largest_first = sorted(content.files, key=lambda name: -content.files[name]["bytes"])
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: manifest.content_defect(step, [name], advance), largest_first)
        defects = list(filter(None, found))
    if defects:
        return "; ".join(defects[:3])
    try:
        index.read(step, content.files)
    except index.UntrustedError as error:
        return str(error)
    return folder.small_files_defect(step)


# ---- config


@command
def run_config(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Show the flags of a step, or what differs between two."""
    if len(found) > 2:
        raise ConfigError(f"config takes one DIR or two, and there are {len(found)}")
    chosen = [one.newest for one in found]
    configs = []
    for step in chosen:
        defect = folder.small_files_defect(step)
        if defect is not None:
            raise DamagedError(f"{step}: {defect}")
        configs.append(folder.read_json(step / folder.CONFIG))
    first = configs[0]
    if len(configs) == 1:
        lines = [f"{chosen[0]}:"]
        for name, value in sorted(first.items()):
            lines.append(f"  {name}: {json.dumps(value)}")
        return InspectOutcome(lines, {"step": str(chosen[0]), "config": first}, True)
    second, differing, lines = configs[1], {}, []
    for name in sorted(first.keys() | second.keys()):
        old, new = first.get(name), second.get(name)
        if old != new or (name in first) != (name in second):
            differing[name] = (old, new)
            lines.append(f"  {name}: {json.dumps(old)} -> {json.dumps(new)}")
    lines.insert(0, f"{chosen[0]} -> {chosen[1]}: {len(differing)} settings differ")
    return InspectOutcome(lines, {"steps": list(map(str, chosen)), "differing": differing}, not differing)


# ---- stats and diff: part by part, without a model or a process group, in memory for a few parts


def _reader(found: Folder, verify: bool) -> StepReader:
    """Return a reader of the step to read tensors of, hashed first if `verify`. Raises DamagedError: it is damaged."""
    step = found.newest
    if not verify:
        note(f"NOT VERIFIED (--no-verify): {step} may be damaged")
        return opened(step)
    defect = damage(step)
    if defect is not None:
        raise DamagedError(f"{step}: {defect}; --no-verify reads it all the same")
    return opened(step)


def opened(step: Path) -> StepReader:
    """Return a reader of a step's tensors. Raises DamagedError: its index or its manifest is damaged or harmful."""
    from megatron_moe.checkpoint.step_reader import StepReader

    try:
        return StepReader(step)
    except ConfigError as error:
        raise DamagedError(str(error)) from error


def _matching(keys: Iterable[str], pattern: str | None) -> list[str]:
    """Return the sorted keys that a regular expression matches anywhere."""
    return sorted(filter(re.compile(pattern or "").search, keys))


@command
def run_stats(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Tell of every tensor what numbers it holds."""
    reader = _reader(found[0], flags.verify)
    keys = _matching(reader.index.tensors, flags.match)
    rows, lines, broken, poisoned = [], [f"{reader.step}: {len(keys)} tensors"], [], []
    for key in keys:
        try:
            row = stats(reader, key)
        except ConfigError as error:
            broken.append(str(error))
            lines.append(f"  {key}: CANNOT BE READ: {error}")
            continue
        rows.append(row)
        line = f"  {key}: {row['dtype']} {row['shape']}"
        for name in ("min", "max", "mean", "std"):
            shown = "-" if row[name] is None else f"{row[name]:.6g}"
            line += f", {name} {shown}"
        if row["nan"] or row["inf"]:
            line += f", {row['nan']} NaN, {row['inf']} INF"
            poisoned.append(key)
        lines.append(line)
    if poisoned:
        lines.append(f"{len(poisoned)} tensors hold numbers that are not finite: {', '.join(poisoned[:5])}")
    facts = {"step": str(reader.step), "tensors": rows, "unreadable": broken}
    return InspectOutcome(lines, facts, not (poisoned or broken))


def stats(reader: StepReader, key: str) -> dict[str, Any]:
    """Return shape, type and statistics, in fp64, of a tensor's finite numbers. Raises ConfigError: it is damaged."""
    tensor = reader.index.tensors[key]
    count = nans = infs = 0
    low, high, mean, squares = math.inf, -math.inf, 0.0, 0.0
    for part in tensor.parts:
        for block in _blocks(reader.read(key, part.start, part.shape)):
            wide = block.double()
            finite = wide[wide.isfinite()]
            more, more_nans = finite.numel(), int(wide.isnan().sum())
            nans += more_nans
            infs += wide.numel() - more - more_nans
            if not more:
                continue
            # The moments of two samples are merged after Chan, Golub and LeVeque (1983).
            its_mean, total = float(finite.mean()), count + more
            distance = its_mean - mean
            squares += float((finite - its_mean).square().sum()) + distance * distance * count * more / total
            mean += distance * more / total
            count = total
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    result: dict[str, Any] = {"key": key, "dtype": tensor.dtype, "shape": list(tensor.shape)}
    result |= dict.fromkeys(("min", "max", "mean", "std"))
    if count:
        result |= {"min": low, "max": high, "mean": mean, "std": math.sqrt(squares / count)}
    return {**result, "nan": nans, "inf": infs}


@command
def run_diff(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Tell which tensors of two steps are equal, and how far the others are apart."""
    first, second = _reader(found[0], flags.verify), _reader(found[1], flags.verify)
    keys = _matching(first.index.tensors.keys() | second.index.tensors.keys(), flags.match)
    rows, lines, equal = [], [f"{first.step} and {second.step}: {len(keys)} tensors"], 0
    for key in keys:
        try:
            row = diff(first, second, key)
        except ConfigError as error:
            row = {"key": key, "equal": False, "unreadable": str(error)}
        if row.get("max_difference") == math.inf:
            row["max_difference"] = "inf"
        rows.append(row)
        if row["equal"]:
            equal += 1
            continue
        shown = [f"{name} {value}" for name, value in row.items() if name not in ("key", "equal")]
        lines.append(f"  {key}: " + ", ".join(shown))
    lines.append(f"{equal} tensors are equal to the bit, {len(rows) - equal} are not")
    facts = {"steps": [str(first.step), str(second.step)], "tensors": rows}
    return InspectOutcome(lines, facts, equal == len(rows) > 0)


def diff(first: StepReader, second: StepReader, key: str) -> dict[str, Any]:
    """Return how a tensor differs between two steps; `equal` means to the bit. Raises ConfigError: it is damaged."""
    one, two = first.index.tensors.get(key), second.index.tensors.get(key)
    result: dict[str, Any] = {"key": key, "equal": False}
    if one is None:
        return {**result, "only_in": str(second.step)}
    if two is None:
        return {**result, "only_in": str(first.step)}
    if one.dtype != two.dtype:
        result["dtypes"] = [one.dtype, two.dtype]
    if one.shape != two.shape:
        return {**result, "shapes": [list(one.shape), list(two.shape)]}
    different, largest = 0, 0.0
    for part in one.parts:
        for other in two.parts:  # the same box of both; together the boxes cover the tensor
            start = tuple(map(max, part.start, other.start))
            ends = map(min, _ends(part), _ends(other))
            shape = tuple(map(int.__sub__, ends, start))
            if min(shape, default=1) > 0:
                count, distance = _distance(first.read(key, start, shape), second.read(key, start, shape))
                different, largest = different + count, max(largest, distance)
    result["equal"] = different == 0 and one.dtype == two.dtype
    if not result["equal"]:
        result |= {"different": different, "max_difference": largest}
    return result


def _ends(part: index.TensorPart) -> Iterator[int]:
    return map(int.__add__, part.start, part.shape)


def _distance(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ, and by how much at most; infinite if one is NaN and the other is not."""
    count, largest = 0, 0.0
    for a, b in zip(_blocks(one), _blocks(two)):
        if a.dtype == b.dtype:
            unequal = (_bits(a) != _bits(b)).any(-1)
            count += int(unequal.sum())
            if not unequal.any():
                continue
        x, y = a.double(), b.double()
        apart = (x - y).abs().masked_fill(x.isnan() & y.isnan() | (x == y), 0.0)
        if a.dtype != b.dtype:
            count += int((apart != 0).sum())
        largest = max(largest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return count, largest


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, [elements, bytes]."""
    import torch

    return values.reshape(-1, 1).contiguous().view(torch.uint8)


def _blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = values.reshape(-1)
    if flat.numel():
        yield from flat.split(_BLOCK)


# ---- prune


@command
def run_prune(flags: argparse.Namespace, found: list[Folder]) -> InspectOutcome:
    """Remove the steps that are not needed. At least one that stays is good: hashed, unless --no-verify."""
    for name in ("keep_last", "keep_every"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: has to be 1 or more")
    root = found[0].root
    if location(flags.folders[0]).absolute() != root.absolute():
        raise ConfigError(f"{flags.folders[0]}: is one step; prune takes the folder that holds the steps")
    lines, good = [], set[int]()
    if not flags.verify:
        lines.append("NOT VERIFIED (--no-verify): a step that stays may be damaged")
    rule = folder.Retention(flags.keep_last, flags.keep_every)
    damaged: dict[int, str] = {}  # they stay, too: a person should look at them
    for step in found[0].steps:
        if (defect := manifest.structure_defect(step)) is not None:
            damaged[number_of(step)] = defect
    reading = False  # where nothing would go, nothing has to be read
    while True:
        sound = [number for number in map(number_of, found[0].steps) if number not in damaged]
        if not sound:
            raise DamagedError(f"{root}: holds no step that can be loaded, so nothing is removed")
        go = rule.surplus(sound, ())
        stay = sorted(set(sound) - set(go))
        # Every step that stays is read: a damaged one must not count as one of the last.
        reading, known = reading or (flags.verify and bool(go)), len(damaged)
        for number in stay:
            if reading and number not in good:
                if (defect := damage(folder.step_folder(root, number))) is None:
                    good.add(number)
                else:
                    damaged[number] = defect
        if len(damaged) == known:
            break
    for number, reason in sorted(damaged.items()):
        lines.append(f"stays, damaged: step {number}: {reason}")
    stays, goes = "stay", "removed"
    if flags.dry_run:
        stays, goes = "would stay", "would go"
    elif go:
        lock, _ = writer_lock.acquire(root)
        with lock:
            for number in go:  # hidden by a rename, then deleted
                folder.remove_step(folder.step_folder(root, number))
    lines.append(f"{stays}: {', '.join(map(str, stay)) or 'none'}")
    lines.append(f"{goes}: {', '.join(map(str, go)) or 'none'}")
    facts = {"stay": stay, "go": go, "damaged": damaged, "dry_run": flags.dry_run}
    return InspectOutcome(lines, facts, not damaged)
