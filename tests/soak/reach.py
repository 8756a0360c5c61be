"""Which tests reach a mutation, and which of them notice it: two trees of the repository are compared by the same list.

    python -m tests.soak.mutations draw 120 > drawn.txt
    python -m tests.soak.reach map drawn.txt map.json         # runs make test once, on a copy with a note at each place
    python -m tests.soak.reach judge drawn.txt map.json noticed.jsonl

`--root FOLDER --python PROGRAM` take another checkout with its interpreter. `judge` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from tests.soak.mutations import PACKAGE, ROOT, SECONDS, Mutation, Site, copied, notices, place, planted

NOTES = '''"""Notes which test reaches a place; written by tests/soak/reach.py into a copy."""
import os

_known = set()


def at(number):
    note = f"{number} {os.environ.get('PYTEST_CURRENT_TEST', '').rpartition(' ')[0]}\\n"
    if note not in _known:
        _known.add(note)
        file = os.open(os.environ["REACHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, note.encode())
        os.close(file)
'''
FIRST = 12
"""So many of the tests that reach a place are run first: most mutations are noticed by those of their own module."""


def noted(folder: Path, places: list[Site]) -> None:
    """Put a note before the statement of each place of a copy."""
    (folder / PACKAGE / "reached.py").write_text(NOTES)
    of_file = defaultdict(list)
    for number, site in enumerate(places):
        of_file[site.mutation.file].append((number, site))
    for name, found in of_file.items():
        file = folder / PACKAGE / name
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        lines_before = defaultdict(list)
        for number, site in found:
            if (line := _statement(file, site.line)) is not None:
                lines_before[line].append(number)
        for line in sorted(lines_before, reverse=True):
            indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
            calls = "; ".join(f"_reached.at({number})" for number in lines_before[line])
            lines.insert(line - 1, f"{indent}from {PACKAGE} import reached as _reached; {calls}\n")
        file.write_text("".join(lines), encoding="utf-8")


def _statement(file: Path, line: int) -> int | None:
    """Return the first line of the innermost statement of a function that holds `line`; None outside of functions."""
    best = None
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            min((one.lineno for one in function.decorator_list), default=function.lineno)
            <= line
            <= (function.end_lineno or 0)
        ):
            best = function.body[0].lineno
            for node in ast.walk(function):
                for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
                    if isinstance(block, list) and not _is_elif(node, block):
                        starts = [one.lineno for one in block if one.lineno <= line <= (one.end_lineno or 0)]
                        best = max([best, *starts])
    return best


def _is_elif(node: ast.AST, block: list[ast.stmt]) -> bool:
    return (
        isinstance(node, ast.If)
        and block is node.orelse
        and len(block) == 1
        and isinstance(block[0], ast.If)
        and block[0].col_offset == node.col_offset
    )


def mapped(places: list[Site], root: Path, python: str, options: list[str]) -> dict[str, dict[str, float]]:
    """Run the suite of `root` with notes. Return, for each mutation, the tests that reach it with their seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = copied(Path(scratch) / "copy", root)
        noted(folder, places)
        notes, report = Path(scratch) / "reached.txt", Path(scratch) / "report.xml"
        environment = {**os.environ, "PYTHONPATH": str(folder), "REACHED": str(notes)}
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", *options]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        seconds = {}
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time") or 0)
        reached: dict[str, dict[str, float]] = {str(site.mutation): {} for site in places}
        for note in notes.read_text().splitlines():
            number, _, test = note.partition(" ")
            if test:
                reached[str(places[int(number)].mutation)][test] = seconds.get(test, 1.0)
    for site in places:  # what stands outside of functions is reached by an import
        if site.mutation.function == "<module>":
            room = f"tests/{site.mutation.file.partition('/')[0]}/"
            reached[str(site.mutation)] = {test: time for test, time in seconds.items() if test.startswith(room)}
    return reached


def in_order(file: str, tests: dict[str, float]) -> list[str]:
    """Return the tests that reach a place of a file: its module's first, then its room's, quick ones before others."""
    room, module = f"tests/{file.partition('/')[0]}/", Path(file).stem
    far = {test: (not test.startswith(f"{room}test_{module}"), not test.startswith(room)) for test in tests}
    return sorted(tests, key=lambda test: (far[test], tests[test]))


def judged(mutation: Mutation, tests: dict[str, float], folder: Path, python: str) -> str | None:
    """Return what fails first of the tests that reach a mutation of a copy, None where nothing does."""
    order = in_order(mutation.file, tests)
    with planted(folder, mutation):
        for part in (order[:FIRST], order[FIRST:]):
            patience = SECONDS + 5 * sum(tests[test] for test in part)  # many tests take long without being endless
            if part and (found := notices(folder, part, python, patience)) is not None:
                return found
    return None


def main() -> None:
    """Make a map, or judge the mutations of a list by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["map", "judge"])
    parser.add_argument("mutations", type=Path)
    parser.add_argument("map", type=Path)
    parser.add_argument("noticed", type=Path, nargs="?")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--python", default=sys.executable)
    given, options = parser.parse_known_args()
    mutations = [Mutation.named(line) for line in given.mutations.read_text().splitlines()]
    if given.command == "map":
        found = mapped([place(one, given.root) for one in mutations], given.root, given.python, options)
        given.map.write_text(json.dumps(found, indent=1))
        return
    reached, done = json.loads(given.map.read_text()), set()
    if given.noticed.exists():
        done = {json.loads(line)["mutation"] for line in given.noticed.read_text().splitlines()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = copied(Path(scratch), given.root)
        for mutation in (one for one in mutations if str(one) not in done):
            tests = reached[str(mutation)]
            by = judged(mutation, tests, folder, given.python)
            with given.noticed.open("a") as file:
                file.write(json.dumps({"mutation": str(mutation), "reached": len(tests), "by": by}) + "\n")
            print(f"{mutation}: {by or 'nothing fails'}", flush=True)


if __name__ == "__main__":
    main()
