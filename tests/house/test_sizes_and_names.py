"""What makes the package readable, held by tests: sizes of files and functions, names, ratios."""

import ast

import pytest

from benchmarks import house as measure
from tests.helpers.sources import PACKAGES, ROOT, imported, name_of, nodes, sources, tree

LONGEST_FILE = 700
LONGEST_DOOR = 80
LONGEST_FUNCTION = 100


@pytest.mark.parametrize("folder", ["megatron_moe", "megatron_moe_tools", "tools", "tests", "benchmarks"])
def test_no_file_is_too_long_to_read(folder):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(folder)}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_function_is_too_long_to_read():
    lengths = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in [*sources(*PACKAGES, "tools", "benchmarks"), ROOT / "pretrain_moe.py"]
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_the_entry_script_is_a_door():
    path = ROOT / "pretrain_moe.py"
    assert len(path.read_text().splitlines()) < LONGEST_DOOR
    assert [name for name, _ in imported(path) if name.split(".")[0] in ("torch", "megatron", "numpy")] == []


def test_a_public_class_name_has_one_meaning():
    where: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


# Ratios, which `python -m benchmarks.house` prints.
BOUNDS = {
    "functions named from one place": 0.19,
    "files of the trainer that one file reads": 0.12,
    "files of the tools that one file reads": 0.165,
    "parameters annotated Any": 0.012,
    "comprehensions in training, per 1,000 lines": 15.0,
    "conditional expressions in training, per 1,000 lines": 11.0,
    "comprehensions in the tools, per 1,000 lines": 15.0,
    "conditional expressions in the tools, per 1,000 lines": 9.8,
    "files that patch the engine": 7,
    "lines a setting": 21.8,
    "files on a token's trip": 17,
    "files a flag passes": 9,
    "climbs from pretrain on": 40,
}


def test_a_reader_pays_no_more_than_this(gloo):
    training, tools = "megatron_moe/training", "megatron_moe_tools"
    on_trip = set().union(*gloo.run(2, measure.trip))
    assert {"training/loop.py", "training/step.py", "moe/layer.py", "moe/router.py", "moe/experts.py"} < on_trip
    found = (
        measure.named_once(*PACKAGES),
        measure.read_once("megatron_moe"),
        measure.read_once(tools),
        measure.annotated_any(*PACKAGES),
        measure.density(training, measure.COMPREHENSIONS),
        measure.density(training, ast.IfExp),
        measure.density(tools, measure.COMPREHENSIONS),
        measure.density(tools, ast.IfExp),
        sum(bool(measure.patches(path)) for path in sources(*PACKAGES)),
        measure.lines_a_setting(),
        len(on_trip),
        measure.files_a_flag_passes(),
        gloo.run(1, measure.climbs)[0][1],
    )
    measured = dict(zip(BOUNDS, found, strict=True))
    assert {name: value for name, value in measured.items() if value > BOUNDS[name]} == {}
