"""Write docs/verification.md: what is verified, by which test, on which engine and device.

    python -m tests.helpers.verification            write the page
    python -m tests.helpers.verification --check    exit 1, with the difference, where the page is not up to date

The page is made of the markers on the tests, which are read from the sources and not imported:

    @pytest.mark.claim("A skipped step changes no bit.")
    def test_a_step_that_is_not_finite_leaves_every_bit(): ...

Several tests may hold one claim, which is then one row. `pytestmark` claims something for a whole file. A marker takes
two keywords: `engines`, the megatron-core release that a test runs on, where a version decides whether it is skipped;
and `ran_on`, the device that a test marked `gpu` was run on.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verification.md"
ALIKE = 0.93
"""Two claims whose texts are this similar are taken for one claim with a slip in it."""

TITLES = {
    "checkpoint": "Checkpoints",
    "config": "Command line and presets",
    "conversion": "Models from Hugging Face",
    "data": "Data",
    "defects": "megatron-core's defects",
    "distributed": "Several ranks",
    "doctor": "The doctor",
    "end_to_end": "Whole runs",
    "model": "The model",
    "moe": "Routing, experts and balancing",
    "parallel": "Process groups",
    "planning": "Plans",
    "platform": "Machines without CUDA",
    "precision": "Precision",
    "report": "The demo and reports",
    "soak": "Long runs",
    "training": "Training steps and faults",
    "unit": "The repository",
}

HEAD = """# What is verified, and where

Written by `python -m tests.helpers.verification` from the markers on the tests; `make check` compares. Each row is a
claim and the tests that hold it.

- **engines**: "both" are the megatron-core releases that are tested, {engines}; "one" that `.ci/run` tests it
  with the default Python's alone, for the reasons in CONTRIBUTING.md.
- **CPU**: "yes" means that the tests run on a CPU, with gloo where they need several ranks.
- **GPU**: "not verified" means that no test of the claim was run on a GPU. Code for CUDA, NCCL and Transformer Engine
  is there, and so are the Dockerfile and the GPU examples; none of it counts as verified until a row says so.
- `make test` runs all tests but those in `tests/soak`, which `make soak` runs.
"""


@dataclass(frozen=True)
class Holder:
    """A test that holds a claim: `name` is None where the claim is made for the whole file."""

    claim: str
    path: str
    name: str | None
    engines: str
    on_cpu: bool
    ran_on: str | None

    @property
    def node(self) -> str:
        """Return the test as pytest names it."""
        return self.path if self.name is None else f"{self.path}::{self.name}"

    @property
    def section(self) -> str:
        """Return the folder that the test belongs to: `moe` for tests/unit/moe, `distributed` for tests/distributed."""
        folders = Path(self.path).parts[1:-1]
        return folders[-1] if folders else ""


@dataclass(frozen=True)
class Mark:
    """One pytest marker of a test: its name, its arguments and the line that it is on."""

    name: str
    arguments: list[ast.expr]
    keywords: dict[str, ast.expr]
    line: int


class Source:
    """One file of tests: its claims, and what is wrong with them."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = str(path.relative_to(root))
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.collected = path.name.startswith("test_")
        self.errors: list[str] = []
        self.assigned = {
            target.id: statement.value
            for statement in self.tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }

    def holders(self) -> list[Holder]:
        """Return the tests of this file that hold a claim, and note in `errors` what is wrong."""
        of_module = self._marks(_elements(self.assigned.get("pytestmark")))
        found = self._claimed(None, of_module, None)
        skips = [mark for mark in of_module if mark.name != "claim"]
        for node, name, marks in self._tests(self.tree.body, "", skips):
            found += self._claimed(name, marks, node)
        counted = sum(mark.name == "claim" for mark in of_module) + self._seen
        written = sum(_is_claim(node) for node in ast.walk(self.tree))
        if written != counted or (written and not self.collected):
            self.errors.append(f"{self.path}: a claim marks something that pytest does not collect as a test")
        return found

    _seen = 0

    def _tests(
        self, body: list[ast.stmt], prefix: str, inherited: list[Mark]
    ) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str, list[Mark]]]:
        """Yield test functions and test classes with the markers that apply; a class's claims are its own row."""
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marks = self._marks(node.decorator_list)
                self._seen += sum(mark.name == "claim" for mark in marks)
                yield node, prefix + node.name, [*inherited, *marks]
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                marks = self._marks(node.decorator_list)
                self._seen += sum(mark.name == "claim" for mark in marks)
                yield node, prefix + node.name, [*inherited, *marks]
                below = [*inherited, *(mark for mark in marks if mark.name != "claim")]
                yield from self._tests(node.body, f"{prefix}{node.name}::", below)

    def _marks(self, decorators: list[ast.expr]) -> list[Mark]:
        """Return the pytest markers among decorators; a name stands for what the module assigns to it."""
        marks = []
        for decorator in decorators:
            node = self.assigned.get(decorator.id, decorator) if isinstance(decorator, ast.Name) else decorator
            called = node.func if isinstance(node, ast.Call) else node
            if (dotted := ast.unparse(called)).startswith("pytest.mark."):
                arguments = node.args if isinstance(node, ast.Call) else []
                keywords = {word.arg or "": word.value for word in node.keywords} if isinstance(node, ast.Call) else {}
                marks.append(Mark(dotted.removeprefix("pytest.mark."), arguments, keywords, decorator.lineno))
        return marks

    def _claimed(self, name: str | None, marks: list[Mark], node: ast.stmt | None) -> list[Holder]:
        """Return one holder for each claim among a test's markers."""
        claims = [mark for mark in marks if mark.name == "claim"]
        if not claims:
            return []
        if reason := _never_runs(marks, node):
            self.errors.append(f"{self.path}:{claims[0].line}: {name or 'the file'} holds a claim and {reason}")
        conditions = [ast.unparse(condition) for condition in _skip_conditions(marks, node)]
        by_version = any("version" in condition for condition in conditions)
        needs_gpu = any(mark.name == "gpu" for mark in marks) or any(
            condition.startswith("not ") and "cuda" in condition for condition in conditions
        )
        found = []
        for mark in claims:
            text = self._text(mark, "sentence", mark.arguments[0] if len(mark.arguments) == 1 else None)
            engines = self._text(mark, "engines", mark.keywords["engines"]) if "engines" in mark.keywords else None
            ran_on = self._text(mark, "ran_on", mark.keywords["ran_on"]) if "ran_on" in mark.keywords else None
            if unknown := set(mark.keywords) - {"engines", "ran_on"}:
                self.errors.append(f"{self.path}:{mark.line}: a claim has no keyword {', '.join(sorted(unknown))}")
            if by_version and engines is None:
                self.errors.append(
                    f"{self.path}:{mark.line}: a version decides whether {name or 'the file'} is skipped; "
                    'say where it runs: claim("...", engines="0.19.2")'
                )
            if ran_on is not None and not needs_gpu:
                self.errors.append(f"{self.path}:{mark.line}: ran_on is for a test that is marked gpu")
            if text:
                where = engines or ("one" if any(other.name == "one_engine" for other in marks) else "both")
                found.append(Holder(text, self.path, name, where, not needs_gpu, ran_on))
        return found

    def _text(self, mark: Mark, what: str, node: ast.expr | None) -> str | None:
        """Return the text of an argument of a claim, and note an error where it is none."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip():
            return " ".join(node.value.split())
        self.errors.append(f"{self.path}:{mark.line}: a claim's {what} has to be one text that is not empty")
        return None


def _elements(node: ast.expr | None) -> list[ast.expr]:
    """Return the markers that `pytestmark` is assigned: one, or a list of them."""
    if node is None:
        return []
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else [node]


def _is_claim(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.claim"


def _is_skip(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip"


def _never_runs(marks: list[Mark], node: ast.stmt | None) -> str | None:
    """Return why a test cannot fail: it is skipped, or expected to fail, whatever the machine."""
    for mark in marks:
        if mark.name == "skip":
            return "is skipped everywhere"
        if mark.name == "skipif" and mark.arguments and _is_always_true(mark.arguments[0]):
            return "is skipped everywhere"
        if mark.name == "xfail" and not mark.arguments and "condition" not in mark.keywords:
            return "is expected to fail"
    body = node.body if isinstance(node, ast.FunctionDef) else []
    if any(isinstance(statement, ast.Expr) and _is_skip(statement.value) for statement in body):
        return "skips itself everywhere"
    return None


def _is_always_true(condition: ast.expr) -> bool:
    return isinstance(condition, ast.Constant) and (condition.value is True or condition.value == "True")


def _skip_conditions(marks: list[Mark], node: ast.stmt | None) -> Iterator[ast.expr]:
    """Yield the conditions that a test is skipped under: of its markers, and of `if ...: pytest.skip(...)` in it."""
    for mark in marks:
        if mark.name == "skipif":
            yield from mark.arguments[:1]
    if isinstance(node, ast.FunctionDef):
        for inner in ast.walk(node):
            if isinstance(inner, ast.If) and any(_is_skip(below) for below in ast.walk(inner)):
                yield inner.test


def read(root: Path = ROOT) -> tuple[list[Holder], list[str]]:
    """Return the holders of all claims under `root`/tests, and what is wrong with the markers."""
    holders: list[Holder] = []
    errors: list[str] = []
    for path in sorted((root / "tests").rglob("*.py")):
        source = Source(path, root)
        holders += source.holders()
        errors += source.errors
    for one, other in combinations(sorted({holder.claim for holder in holders}), 2):
        alike = difflib.SequenceMatcher(None, one, other)
        if alike.quick_ratio() > ALIKE and alike.ratio() > ALIKE:
            errors.append(f"two claims look like one with a slip in it:\n  {one}\n  {other}")
    return holders, errors


def page(holders: list[Holder], engines: str) -> str:
    """Return the page: a table for each folder of tests, a row for each claim."""
    rows: dict[str, list[Holder]] = {}
    for holder in sorted(holders, key=lambda holder: holder.node):
        rows.setdefault(holder.claim, []).append(holder)
    sections: dict[str, list[str]] = {}
    for claim, tests in rows.items():
        in_unit = [test.section for test in tests if test.path.startswith("tests/unit/")]
        sections.setdefault((in_unit or [tests[0].section])[0], []).append(_row(claim, tests))
    titled = {TITLES.get(name, name.replace("_", " ").capitalize()): lines for name, lines in sections.items()}
    parts = [HEAD.format(engines=engines)]
    for title in sorted(titled, key=str.lower):
        parts.append("\n".join([f"## {title}", "", "| claim | test | engines | CPU | GPU |", "|---|---|---|---|---|"]))
        parts[-1] += "\n" + "\n".join(titled[title]) + "\n"
    return "\n".join(parts)


def _row(claim: str, tests: list[Holder]) -> str:
    """Return the row of one claim."""
    devices = sorted({test.ran_on for test in tests if test.ran_on is not None})
    cells = (
        claim.replace("|", "\\|"),
        "<br>".join(f"`{test.node}`" for test in tests),
        ", ".join(sorted({test.engines for test in tests})),
        "yes" if any(test.on_cpu for test in tests) else "no",
        f"verified: {', '.join(devices)}" if devices else "not verified",
    )
    return "| " + " | ".join(cells) + " |"


def tested_engines(root: Path = ROOT) -> str:
    """Return the megatron-core releases that setup.py asks for, in words."""
    pinned = re.findall(r"megatron-core==([\d.]+)", (root / "setup.py").read_text(encoding="utf-8"))
    return " and ".join(pinned)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write or check the page; return the exit status: 0, or 1 with the reason on stderr."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m tests.helpers.verification [--check]", file=sys.stderr)
        return 2
    holders, errors = read(root)
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 1
    new, target = page(holders, tested_engines(root)), root / "docs" / PAGE.name
    if not arguments:
        target.write_text(new, encoding="utf-8")
        return 0
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    differences = list(difflib.unified_diff(old.splitlines(), new.splitlines(), str(target), "the tests", lineterm=""))
    if differences:
        print("\n".join([*differences, "run: python -m tests.helpers.verification"]), file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
