"""Errors that tests have to notice: one small change of a function at a time, planted in a copy of the repository.

A mutation is named by file, function and operator, and quotes no source: `moe/routing.py choice_scores arithmetic 0` is
the first `+`, `-`, `*` or `/` of that function. `mutations.yaml` lists mutations with the test that notices each.

    python -m tests.soak.mutations sites moe/routing.py           # the mutations of a file
    python -m tests.soak.mutations judge "moe/routing.py choice_scores arithmetic 0" tests/moe
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_moe"
SECONDS = 900
"""After which a run of tests counts as having noticed: a mutation may make a loop endless."""

_COMPARE: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Mutation:
    """One change: the operator's `number`-th site, from 0, in a function of a file under megatron_moe/.

    A method is named Class.method; what stands outside of functions has the function's name `<module>`.
    """

    file: str
    function: str
    operator: str
    number: int

    def __str__(self) -> str:
        return f"{self.file} {self.function} {self.operator} {self.number}"

    @classmethod
    def named(cls, name: str) -> Mutation:
        """Return the mutation of which `name` is the str."""
        file, function, operator, number = name.split()
        return cls(file, function, operator, int(number))


@dataclass(frozen=True)
class Site:
    """Where a mutation changes a file's text: bytes `begin` to `end`, of the statement at `line`."""

    mutation: Mutation
    begin: int
    end: int
    text: str
    line: int

    def applied(self, source: bytes) -> bytes:
        """Return the file's text with the mutation in it."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def _path(file: str, root: Path) -> Path:
    """Return a file of the trainer, or of the tools where it is named with their folder."""
    return (root if file.startswith(f"{PACKAGE}_tools/") else root / PACKAGE) / file


def sites(file: str, root: Path = ROOT) -> list[Site]:
    """Return the mutations of one file with their places, in the order of the text."""
    source = _path(file, root).read_bytes()
    return list(_Sites(file, source).found())


class _Sites:
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.tree = file, ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.counts: dict[tuple[str, str], int] = {}

    def found(self) -> Iterator[Site]:
        yield from self._block(self.tree.body, "<module>", "")

    def _block(self, body: list[ast.stmt], function: str, prefix: str) -> Iterator[Site]:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                yield from self._block(statement.body, f"{prefix}{statement.name}", f"{prefix}{statement.name}.")
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{statement.name}"
                for default in (*statement.args.defaults, *filter(None, statement.args.kw_defaults)):
                    yield from self._expression(default, name, statement.lineno)
                yield from self._block(statement.body, name, f"{name}.")
            else:
                yield from self._statement(statement, function, prefix)

    def _statement(self, statement: ast.stmt, function: str, prefix: str) -> Iterator[Site]:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.Pass, ast.Global)):
            return
        if _can_go(statement):
            yield self._site("statement", statement, "pass", function, statement.lineno)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, (ast.If, ast.While)):
            yield self._negated(statement.test, function, statement.lineno)
        for field, value in ast.iter_fields(statement):
            if field in ("annotation", "type_comment", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._block([child], function, prefix)
                elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                    yield from self._block(child.body, function, prefix)
                elif isinstance(child, ast.withitem):
                    yield from self._expression(child.context_expr, function, statement.lineno)
                elif isinstance(child, ast.expr):
                    yield from self._expression(child, function, statement.lineno)

    def _expression(self, top: ast.expr, function: str, line: int) -> Iterator[Site]:
        in_text = {id(node) for text in ast.walk(top) if isinstance(text, ast.JoinedStr) for node in ast.walk(text)}
        for node in ast.walk(top):
            if id(node) not in in_text:
                yield from self._of_node(node, function, line)

    def _of_node(self, node: ast.AST, function: str, line: int) -> Iterator[Site]:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
            ops = [_COMPARE[type(node.ops[0])](), *node.ops[1:]]
            changed: ast.expr = ast.Compare(node.left, ops, node.comparators)
            yield self._site("comparison", node, _text(changed), function, line)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            changed = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
            yield self._site("arithmetic", node, _text(changed), function, line)
            for operand in (node.left, node.right):
                yield self._site("operand", node, _text(operand), function, line)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield self._site("boolean", node, _text(ast.BoolOp(other, node.values)), function, line)
            for value in node.values:
                left = [one for one in node.values if one is not value]
                kept = left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
                yield self._site("operand", node, _text(kept), function, line)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            yield self._site("sign", node, _text(node.operand), function, line)
        elif isinstance(node, ast.IfExp):
            yield self._negated(node.test, function, line)
            for branch in (node.body, node.orelse):
                yield self._site("branch", node, _text(branch), function, line)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield self._site("constant", node, repr(_other(node.value)), function, line)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node, function, line)

    def _of_call(self, node: ast.Call, function: str, line: int) -> Iterator[Site]:
        for keyword in node.keywords:
            if keyword.arg is not None:
                left = [one for one in node.keywords if one is not keyword]
                yield self._site("argument", node, _text(ast.Call(node.func, node.args, left)), function, line)
        # x.float() becomes x, and f(x, y) becomes x
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            yield self._site("call", node, _text(node.func.value), function, line)
        elif node.args and not isinstance(node.args[0], ast.Starred):
            yield self._site("call", node, _text(node.args[0]), function, line)
        elif isinstance(node.func, ast.Attribute):
            yield self._site("call", node, _text(node.func.value), function, line)

    def _negated(self, test: ast.expr, function: str, line: int) -> Site:
        return self._site("condition", test, _text(ast.UnaryOp(ast.Not(), test)), function, line)

    def _site(self, operator: str, node: ast.AST, text: str, function: str, line: int) -> Site:
        number = self.counts.get((function, operator), 0)
        self.counts[function, operator] = number + 1
        begin = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return Site(Mutation(self.file, function, operator, number), begin, end, text, line)


def _can_go(statement: ast.stmt) -> bool:
    """Return whether a function still runs without a statement: it acts, guards, or changes what a name stands for."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement.value))
    return (
        isinstance(statement, ast.AugAssign)
        or (isinstance(statement, ast.If) and not statement.orelse)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call))
        or (isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], (ast.Name, ast.Tuple)))
    )


def _other(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 or 1.0


def _text(node: ast.expr) -> str:
    """Return an expression in brackets, so that it stays one wherever it is put."""
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def place(mutation: Mutation, root: Path = ROOT) -> Site:
    """Return where a mutation is. Raises KeyError where its function has no such site (any more)."""
    for site in sites(mutation.file, root):
        if site.mutation == mutation:
            return site
    raise KeyError(f"{mutation}: there is no such place; see python -m tests.soak.mutations sites {mutation.file}")


def copied(folder: Path, root: Path = ROOT) -> Path:
    """Copy what tests need into `folder` and return it."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    for path in filter(lambda name: (root / name).is_file(), listed.stdout.split()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, folder / path)
    return folder


@contextmanager
def planted(folder: Path, mutation: Mutation) -> Iterator[None]:
    """Plant a mutation in a copy, and take it out again at the end."""
    file, site = _path(mutation.file, folder), place(mutation, folder)
    right = file.read_bytes()
    file.write_bytes(site.applied(right))
    try:
        yield
    finally:
        file.write_bytes(right)


def notices(folder: Path, tests: list[str], python: str = sys.executable, seconds: float = SECONDS) -> str | None:
    """Run tests of a planted copy against the copy. Return the first line of what fails, None where nothing does.

    Raises:
        RuntimeError: where no test was run, or pytest refuses the command.
    """
    command = [python, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {seconds:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines() or done.stderr.splitlines()
    if done.returncode in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest {' '.join(tests)}: {done.stderr or lines[-1]}")
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


def doctor_finds(folder: Path, command: str) -> str | None:
    """Run the copy's doctor with a line's flags. Return what it says where a layout differs, None where none does."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    words = ["-m", "megatron_moe", "doctor", *command.split()[1:], "--steps", "1", "--json", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if not report.exists():
        return done.stdout + done.stderr
    layouts = json.loads(report.read_text())["layouts"]
    return done.stdout if any(layout.get("differences") for layout in layouts) else None


def _listed() -> tuple[dict[Mutation, str], dict[Mutation, str]]:
    listed = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    every = {Mutation.named(f"{file} {name}"): by for file, rows in listed.items() for name, by in rows.items()}
    reasons = {mutation: by for mutation, by in every.items() if by.startswith("nothing: ")}
    return {mutation: by for mutation, by in every.items() if mutation not in reasons}, reasons


LISTED, UNNOTICED = _listed()
"""The mutations of mutations.yaml: with the test or the doctor's command that notices each; with why nothing can."""


def main() -> None:
    """Print the mutations of a file, or judge one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sites").add_argument("file")
    judging = commands.add_parser("judge")
    judging.add_argument("mutation")
    judging.add_argument("tests", nargs="+")
    given = parser.parse_args()
    if given.command == "sites":
        for site in sites(given.file):
            print(f"{site.mutation}\tline {site.line}: {site.text}")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = copied(Path(scratch))
            with planted(folder, Mutation.named(given.mutation)):
                print(notices(folder, given.tests) or "nothing fails")


if __name__ == "__main__":
    main()
