"""Measure what a reader of the two packages pays for. `python -m benchmarks.house` prints the figures.

The sources are only parsed, but for three figures that take a run of the trainer on CPU: files on a token's trip, files
that a flag passes, and climbs. `tests/house/test_sizes_and_names.py` bounds most of them.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.helpers.gloo_pool import GlooPool
from tests.helpers.ranks import RankParent
from tests.helpers.sources import PACKAGE, ROOT, imported, nodes, sources

PACKAGES = [name for name in ("megatron_moe", "megatron_moe_tools") if (ROOT / name).is_dir()]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

TINY = "--preset tiny --mock-data --vocab-size 256 --train-iters 1 --eval-iters 0 --micro-batch-size 1 --seq-length 32"
ALL_PARTS_OF_A_MOE_LAYER = (
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --num-layers 2 --moe-layer-freq [0,1] "
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity --moe-input-jitter-eps 0.01 "
    "--moe-shared-expert-gate --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001 --recompute-granularity selective --recompute-modules moe_act shared_experts"
)


# ---- what the sources show


def lines_of(path: Path) -> int:
    """Return a file's lines, blank ones and comments too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(*folders: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions and methods, nested ones too."""
    every = (node for path in sources(*folders) for node in nodes(path))
    return [node for node in every if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@cache
def uses() -> Counter[str]:
    """Return how often the packages name what, imports left out."""
    found: Counter[str] = Counter()
    for path in sources(*PACKAGES):
        for node in nodes(path):
            if isinstance(node, ast.Name):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute):
                found[node.attr] += 1
    return found


def named_once(*folders: str) -> float:
    """Return the share of functions that the packages name in one place; dunder methods do not count."""
    names = [node.name for node in functions(*folders) if not node.name.startswith("__")]
    return sum(uses()[name] == 1 for name in names) / len(names)


def readers(folder: str) -> list[int]:
    """Return for each file of a folder how many files of both import it or from it."""
    modules = {}
    for path in sources(*PACKAGES):
        name = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        modules[name.removesuffix(".__init__")] = path
    found: dict[Path, set[Path]] = {path: set() for path in modules.values()}
    for path in found:
        for name, _ in imported(path):
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if target is not None and target != path:
                found[target].add(path)
    return [len(by) for path, by in found.items() if path.is_relative_to(ROOT / folder)]


def read_once(folder: str) -> float:
    """Return the share of a folder's files that one other file reads."""
    counts = readers(folder)
    return counts.count(1) / len(counts)


def annotated_any(*folders: str) -> float:
    """Return the share of parameters, without self and stars, whose annotation is Any."""
    annotations = []
    for node in functions(*folders):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations += [one.annotation for one in arguments if one.arg not in ("self", "cls")]
    return sum(isinstance(one, ast.Name) and one.id == "Any" for one in annotations) / max(len(annotations), 1)


def density(folder: str, kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> float:
    """Return how many such expressions 1,000 lines hold."""
    found = sum(isinstance(node, kinds) for path in sources(folder) for node in nodes(path))
    return 1000 * found / sum(map(lines_of, sources(folder)))


def patches(path: Path) -> list[int]:
    """Return the lines that change the engine, torch, or an object of another's class.

    They assign to an attribute of something imported from there, to `__class__`, or a lambda to another object's
    attribute, or call `setattr` on another object or `mock.patch`.
    """
    modules = tuple(f"{name}." for name in ("megatron", "torch", "transformer_engine"))
    foreign = {name.rpartition(".")[2] for name, _ in imported(path) if f"{name}.".startswith(modules)}
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if "mock.patch" in called or (called == "setattr" and ast.unparse(node.args[0]) != "self"):
                found.append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            owner = re.split(r"\W", ast.unparse(target))[0]
            planted = isinstance(node.value, ast.Lambda) and owner != "self"
            if planted or target.attr == "__class__" or owner in foreign:
                found.append(node.lineno)
    return found


def lines_a_setting() -> float:
    """Return the lines of config/ (settings, command line, rules) for each setting."""
    from megatron_moe.config.fields import all_fields

    return sum(map(lines_of, sources("megatron_moe/config"))) / len(all_fields())


# ---- what a run shows


def within(files: set[str]) -> set[str]:
    """Return the trainer's files among these, relative to its folder."""
    return {str(Path(file).relative_to(PACKAGE)) for file in files if file.startswith(str(PACKAGE))}


def ours(frame: FrameType) -> bool:
    """Return whether a function of the trainer runs in a frame."""
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def caller(frame: FrameType) -> FrameType | None:
    """Return the frame of the trainer that a frame was called by, through other libraries."""
    at = frame.f_back
    while at is not None and not ours(at):
        at = at.f_back
    return at


def train(command: str, see: Callable[[FrameType], None]) -> None:
    """Run the training of a command line, and call `see` with each frame of the trainer when it begins."""
    from megatron_moe.config import cli
    from megatron_moe.training.run import pretrain

    run = cli.parse(command.split())
    sys.setprofile(lambda frame, event, _: see(frame) if event == "call" and ours(frame) else None)
    try:
        pretrain(run)
    finally:
        sys.setprofile(None)


def trip() -> set[str]:
    """Return the files from the loop to all that a MoE layer calls, forward and backward; runs on a rank.

    Backward: what the `backward` of the autograd functions in these files calls.
    """
    from megatron_moe.moe.layer import MoELayer

    layer, loop, files = MoELayer.forward.__code__, str(PACKAGE / "training/loop.py"), set[str]()

    def see(frame: FrameType) -> None:
        at: FrameType | None = frame
        while at is not None and at.f_code is not layer:
            if at.f_code.co_name == "backward" and at.f_code.co_filename in files:
                break
            at = at.f_back
        if at is None:
            return
        files.add(frame.f_code.co_filename)
        while at is not None and loop not in files:  # what has called the layer, once
            files.add(at.f_code.co_filename)
            at = at.f_back

    train(f"{TINY} --global-batch-size 2 {ALL_PARTS_OF_A_MOE_LAYER}", see)
    return within(files)


def climbs() -> tuple[int, int]:
    """Return the files that `pretrain` opens, and how often one reads back over more than one file; runs on a rank.

    Files are opened in the order of their first calls. A climb: the next one is called neither by the file opened last
    nor by the file that called that one.
    """
    callers: dict[str, str] = {}
    found = 0

    def see(frame: FrameType) -> None:
        nonlocal found
        file, by = frame.f_code.co_filename, caller(frame)
        if file not in callers:
            came_from = "" if by is None else by.f_code.co_filename
            last = next(reversed(callers), "")
            found += bool(callers) and came_from not in (last, callers[last])
            callers[file] = came_from

    train(f"{TINY} --global-batch-size 1", see)
    return len(callers), found


def files_of_a_flag(field: str = "moe_router_topk") -> set[str]:
    """Return the files that run while a command line becomes settings, and those of the rules that read the field.

    It is for a process that has parsed nothing: parsers and tables of fields are kept.
    """
    from megatron_moe.config import rules, schema
    from megatron_moe.pretrain import parse

    files: set[str] = {str(PACKAGE / "pretrain.py"), rules.check.__code__.co_filename}
    command = [*TINY.split(), f"--{field.replace('_', '-')}", "2"]
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
    try:
        run = parse(command, 1)
    finally:
        sys.setprofile(None)
    section = schema.sections()[schema.fields_by_name()[field][0]]

    def noted(self: Any, name: str) -> Any:
        if name == field and (by := caller(sys._getframe(0))) is not None:
            files.add(by.f_code.co_filename)
        return object.__getattribute__(self, name)

    section.__getattribute__ = noted
    try:
        rules.check(run, 1)
    finally:
        del section.__getattribute__
    return within(files)


def files_a_flag_passes() -> int:
    """Return how many files `files_of_a_flag` finds in a process of its own."""
    program = "from benchmarks import house as measure; print(len(measure.files_of_a_flag()))"
    return int(subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True).stdout)


# ---- the table


def main() -> None:
    """Print the figures."""
    for package in PACKAGES:
        lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions(package))
        median, p90 = statistics.median(lengths), lengths[len(lengths) * 9 // 10]
        print(
            f"{package}: {len(lengths):,} functions of {median:.0f} lines (median), {p90} (p90), {lengths[-1]} (most)"
        )
    once = sum(readers(package).count(1) for package in PACKAGES)
    print(
        f"together: named once {named_once(*PACKAGES):.1%}, Any {annotated_any(*PACKAGES):.1%}, {once} files read once"
    )
    print("files; lines; functions named from one place; files that one file reads; parameters annotated Any;")
    print("comprehensions and conditional expressions in 1,000 lines")
    for room in [*sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")), *PACKAGES]:
        folder = room if room in PACKAGES else f"megatron_moe/{room}"
        files = sources(folder)
        shares = f"{named_once(folder):7.1%} {read_once(folder):7.1%} {annotated_any(folder):7.1%}"
        dense = f"{density(folder, COMPREHENSIONS):6.1f} {density(folder, ast.IfExp):6.1f}"
        print(f"{room:18} {len(files):4} {sum(map(lines_of, files)):7,} {shares} {dense}")
    patched = [found for path in sources(*PACKAGES) if (found := patches(path))]
    engine = [path for path in sources(*PACKAGES) if "megatron.core" in path.read_text()]
    print(f"files that name megatron.core: {len(engine)}")
    print(f"files that patch the engine or torch: {len(patched)}, in {sum(map(len, patched))} places")
    print(f"lines of config/ a setting: {lines_a_setting():.1f}")
    pool = GlooPool(RankParent())
    try:
        on_trip = set().union(*pool.run(2, trip))
        opened, climbed = pool.run(1, climbs)[0]
    finally:
        pool.close()
    print(f"files on a token's trip, EP 2: {len(on_trip)} ({', '.join(sorted(on_trip))})")
    print(f"files that a flag passes from argv to its reader: {files_a_flag_passes()}")
    print(f"files opened from pretrain on: {opened}, climbs: {climbed}")


if __name__ == "__main__":
    main()
