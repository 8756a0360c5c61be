"""docs/extending.md: its program runs, its lines do what it says, and a forgotten part fails the tests it names."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.registry import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS, Registry
from megatron_moe.hf import config as hf_config
from megatron_moe.hf.families import FAMILIES
from tests.helpers.sources import ROOT, name_of, sources, tree

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COPIED = ("megatron_moe", "tests", "docs", "constraints")

# ---- the page's blocks of lines, applied to a copy of the repository


@dataclass(frozen=True)
class Hunk:
    """Lines of one file, before and after."""

    file: str
    before: str
    after: str


def hunks(kind: str) -> list[Hunk]:
    """Return the changes of the page's block of a kind: "flag", "preset" or "family"."""
    (block,) = re.findall(rf"^```diff {kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    found = []
    for part in re.split(r"^@@ ", block, flags=re.MULTILINE)[1:]:
        file, *lines = part.splitlines()
        assert all(line[0] in " +-" for line in lines), part
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] != left_out) for left_out in "+-")
        found.append(Hunk(file, before, after))
    return found


def changed_copy(folder: Path, changes: list[Hunk]) -> Path:
    """Copy the repository and apply changes, each at the one place where its lines are.

    Byte code comes along, so that a start takes no longer.
    """
    unwanted = shutil.ignore_patterns(".*")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for path in [*ROOT.glob("*.*"), ROOT / "Dockerfile", ROOT / "Makefile"]:
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    for change in changes:
        path = folder / change.file
        text = path.read_text(encoding="utf-8")
        assert text.count(change.before) == 1, f"{change.file}: not at one place:\n{change.before}"
        path.write_text(text.replace(change.before, change.after), encoding="utf-8")
    return folder


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outside, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def printed(folder: Path, code: str) -> Any:
    """Return what a program prints, as JSON, with the package of a copy."""
    result = started(folder, "-c", code)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def failed(folder: Path, *tests: str) -> set[str]:
    """Return those of a copy's tests that fail, each as file::function."""
    result = started(folder, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-W", "ignore", *tests)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE))


def named_in(heading: str) -> set[str]:
    """Return the files of tests that a section of the page names."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", section))


# ---- what is registered from outside


def trained(words: list[str]) -> tuple[set[tuple[str, str]], str]:
    """Run the page's program with a command line: the entries that were looked up, and what it prints."""
    import contextlib
    import io
    from unittest.mock import patch

    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    looked_up, look_up = set(), Registry.__getitem__

    def recorded(registry: Registry, name: str) -> Any:
        looked_up.add((registry.flag, name))
        return look_up(registry, name)

    stream = io.StringIO()
    mine = [(SCORE_FUNCTIONS, "softplus"), (EXPERT_BACKENDS, "mine"), (DISPATCHERS, "mine")]
    try:
        with (
            patch.object(Registry, "__getitem__", recorded),
            patch.object(sys, "argv", ["mine.py", *words]),
            contextlib.redirect_stdout(stream),
        ):
            exec(program, {"__name__": "documented"})
    finally:
        for registry, name in mine:
            registry._entries.pop(name, None)
    return looked_up, stream.getvalue()


def test_the_program_trains_with_what_it_registers(gloo: Any) -> None:
    small = "--preset tiny --mock-data --vocab-size 100 --seq-length 16 --train-iters 2 --eval-iters 0 --log-interval 1"
    choices = {
        "--moe-router-score-function": "softplus",
        "--moe-expert-backend": "mine",
        "--moe-token-dispatcher-type": "mine",
    }
    words = [*small.split(), "--expert-model-parallel-size", "2", *(word for pair in choices.items() for word in pair)]
    results = gloo.run(2, trained, words=words)
    assert all(looked_up == set(choices.items()) for looked_up, _ in results)
    assert sum(text.count(" iteration ") for _, text in results) == 2
    assert set(choices) == set(re.findall(r"`(--moe-[a-z-]+)`", PAGE.partition("```python")[0]))


# ---- what is added to the package: a flag, a preset, a family

TOLD_BY = {
    "A flag": (
        "tests/config/test_rules.py::test_every_number_has_a_range_or_a_list_of_choices",
        "tests/config/test_model_flags.py::test_every_setting_is_read_by_the_code_that_it_is_for",
        "tests/model/test_engine_config.py::test_every_field_that_is_read_to_build_a_model_has_a_row_here",
    ),
    "A preset": ("tests/docs/test_docs.py::test_the_readmes_presets_are_those_of_the_code",),
    "A Hugging Face family": (
        "tests/docs/test_extending.py::test_every_family_has_a_reader_a_writer_a_case_and_a_row",
    ),
}
"""The tests that fail while a part is missing, by the section of the page that names their files."""
FIRST = {"flag": "model_flags.py", "preset": "presets.py", "family": "families.py"}
"""The file of each block with which it is easy to stop."""


def test_the_page_names_the_tests_that_fail() -> None:
    for heading, tests in TOLD_BY.items():
        assert {test.partition("::")[0] for test in tests} <= named_in(heading), heading


def test_what_is_declared_and_not_finished_fails_the_tests_that_the_page_names(tmp_path: Path) -> None:
    begun = [hunk for kind, file in FIRST.items() for hunk in hunks(kind) if Path(hunk.file).name == file]
    told = [test for tests in TOLD_BY.values() for test in tests]
    assert failed(changed_copy(tmp_path, begun), *told) == set(told)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all lines of the page."""
    return changed_copy(tmp_path_factory.mktemp("complete"), [hunk for kind in FIRST for hunk in hunks(kind)])


def test_with_all_lines_of_the_page_these_tests_pass(complete: Path) -> None:
    ours = [*TOLD_BY["A flag"], *TOLD_BY["A preset"]]
    engine, ranges = "tests/model/test_engine_config.py", "tests/config/test_rules.py"
    of_the_toys = [
        f"{engine}::test_a_flag_reaches_every_moe_layer[{SCALE}]",
        f"{engine}::test_every_option_of_a_moe_layer_has_a_row_here",
        f"{engine}::test_every_preset_is_accepted_by_the_engine[tiny-64e]",
        f"{ranges}::test_a_number_outside_its_range_is_refused_with_flag_and_value[{SCALE}]",
        f"tests/config/test_model_flags.py::test_few_files_name_a_moe_setting[{SCALE}]",
    ]
    assert failed(complete, *ours, *of_the_toys) == set()


SCALE = "moe_shared_expert_scale"
FLAG = """
import json, torch
from megatron_moe.checkpoint.compare import architecture_keys
from megatron_moe.config import cli, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build, flatten
from megatron_moe.hf.config import config_of
from megatron_moe.hf.families import family_of_run
from megatron_moe.model.build import build_model
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups

def run_of(*words):
    return cli.parse(["--preset", "tiny", "--mock-data", "--vocab-size", "100", *words])

def refusal(act, *args):
    try:
        act(*args)
    except ConfigError as error:
        return str(error)

half, whole = run_of("--moe-shared-expert-scale", "0.5"), run_of()
zero = run_of("--moe-shared-expert-scale", "0")
outputs = []
for run in (half, whole):
    rules.check(run, 1)
    (chunk,) = build_model(run, groups.initialize(run), 128)
    layer = next(module for module in chunk.modules() if isinstance(module, MoELayer))
    outputs.append(layer.shared_experts(torch.ones(4, 1, run.model.hidden_size)))
    groups.destroy()
print(json.dumps({
    "refused": [
        refusal(run_of, "--moe-shared-expert-scale", "x"),
        refusal(rules.check, zero, 1),
        refusal(config_of, half, family_of_run(half), "float32"),
    ],
    "in help": "--moe-shared-expert-scale X" in cli._build_parser().format_help(),
    "stored": [flatten(run)["moe_shared_expert_scale"] for run in (half, whole)],
    "built": build(flatten(half)) == half,
    "has to agree": "moe_shared_expert_scale" in architecture_keys(),
    "obeyed": torch.equal(outputs[0], outputs[1] * 0.5) and bool(outputs[1].abs().max() > 0),
}))
"""


def test_the_flag_is_parsed_checked_stored_and_obeyed(complete: Path) -> None:
    found = printed(complete, FLAG)
    refused = found.pop("refused")
    assert all(message is not None and "--moe-shared-expert-scale" in message for message in refused), refused
    assert found == {"in help": True, "stored": [0.5, 1.0], "built": True, "has to agree": True, "obeyed": True}


PRESET_AND_FAMILY = """
import json
from megatron_moe.config import cli, rules
from megatron_moe.config.schema import build, replace
from megatron_moe.hf.config import config_of, settings
from megatron_moe.hf.families import FAMILIES, family_of
from megatron_moe.hf.mapping import mapping

run = cli.parse(["--preset", "tiny-64e", "--mock-data"])
rules.check(run, 1)
as_the_family = {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True, "qk_layernorm": True}
config = config_of(replace(run, **as_the_family), FAMILIES["toy-moe"], "float32")
read = settings(config, has_prediction_layers=False, where="folder")
family = family_of(config, "folder")
names = {name for piece in mapping(build(read.flat), family.names).pieces for name in piece.hf}
print(json.dumps({
    "preset": [run.moe.num_experts, run.moe.moe_router_topk, run.model.vocab_size],
    "family": [config["model_type"], config["architectures"], family.name, read.flat["num_experts"]],
    "names": sorted(name for name in names if "layers.0.ffn" in name and ("router" in name or ".63." in name)),
}))
"""


def test_the_preset_is_one_and_the_family_is_read_written_and_mapped(complete: Path) -> None:
    matrices = [f"model.layers.0.ffn.experts.63.{matrix}_proj.weight" for matrix in ("down", "gate", "up")]
    assert printed(complete, PRESET_AND_FAMILY) == {
        "preset": [64, 4, 1000],
        "family": ["toy_moe", ["ToyMoeForCausalLM"], "toy-moe", 64],
        "names": [*matrices, "model.layers.0.ffn.router.weight"],
    }


# ---- families


def test_every_family_has_a_reader_a_writer_a_case_and_a_row() -> None:
    from tests.helpers import tiny_models

    described = re.findall(
        r"^\| ([\w-]+) \| `(?!model_type)", (ROOT / "docs" / "conversion.md").read_text(), re.MULTILINE
    )
    cases = {f"{name}ForCausalLM" for name, _ in tiny_models.CASES.values()}
    assert list(FAMILIES) == list(hf_config._READ) == list(hf_config._WRITE) == described
    assert {family.architecture for family in FAMILIES.values()} == cases


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_named_in_the_files_that_the_page_names(name: str) -> None:
    """Presets have names of their own, some of them alike."""
    words = {name, *FAMILIES[name].model_types, FAMILIES[name].architecture, name.replace("-", "_")}
    found = {
        name_of(path)
        for path in sources("megatron_moe")
        if not path.name.startswith("presets")
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Constant) and node.value in words)
        or (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in words)
    }
    (section,) = re.findall(r"^## A Hugging Face family\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    on_the_page = set(re.findall(r"megatron_moe/(hf/\w+\.py)", section))
    assert found == {"hf/families.py", "hf/config.py", "hf/family_settings.py"} and found <= on_the_page


# ---- the page itself


def test_every_file_that_a_block_changes_exists_and_every_block_is_used() -> None:
    kinds = re.findall(r"^```(.+)$", PAGE, re.MULTILINE)
    assert kinds == ["python", "diff flag", "diff preset", "diff family"]
    assert all((ROOT / hunk.file).is_file() for kind in kinds[1:] for hunk in hunks(kind.split()[1]))
    assert len(PAGE.splitlines()) < 150
