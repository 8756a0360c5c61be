"""What makes the package readable, held by tests: sizes of files and functions, names, a token's way through it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.helpers.sources import PACKAGE, PACKAGES, ROOT, imported, name_of, nodes, sources, tree

LONGEST_FILE = 700
SHORT_FILE = 60
LONGEST_DOOR = 80
LONGEST_FUNCTION = 100
LONGEST_TRIP = 12


# ---- sizes


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


# ---- names and files


def test_a_public_class_name_has_one_meaning():
    where: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_a_short_file_with_one_reader_belongs_to_its_reader():
    readers: dict[str, set[str]] = {name_of(path): set() for path in sources(*PACKAGES)}
    for path in sources(
        "megatron_moe", "megatron_moe_tools"
    ):  # the doors in tools/ are no reason to have or not to have a file
        for name, _ in imported(path):
            for module in (name, name.rpartition(".")[0]):
                file = module.removeprefix("megatron_moe.").replace(".", "/") + ".py"
                if file in readers and file != name_of(path):
                    readers[file].add(name_of(path))
    waiting_rooms = {
        name_of(path): sorted(readers[name_of(path)])
        for path in sources(*PACKAGES)
        if path.name != "__init__.py"
        and path.parent.name not in PACKAGES  # entries, which scripts read
        and len(path.read_text().splitlines()) < SHORT_FILE
        and len(readers[name_of(path)]) == 1
    }
    assert waiting_rooms == {}


# ---- a token's way

EVERYTHING = {
    "num_layers": 2,
    "moe_layer_freq": "[0,1]",
    "seq_length": 32,
    "moe_expert_capacity_factor": 2.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_input_jitter_eps": 0.01,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
    "moe_z_loss_coeff": 0.001,
    "recompute_granularity": "selective",
    "recompute_modules": ("moe_act", "shared_experts"),
}


@pytest.mark.usefixtures("one_process")
def test_a_token_goes_from_the_loop_to_its_experts_and_back_through_few_files():
    """Files of training, model and moe between the loop and what a MoE layer calls, with its options switched on.

    The rooms below them (collectives, gates of dtypes, the machine's products) are what these files are written in.
    """
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.training.run import pretrain

    layer, loop, files = MoELayer.forward.__code__, str(PACKAGE / "training/loop.py"), set[str]()

    def see(frame: FrameType, event: str, _: Any) -> None:
        at: FrameType | None = frame if event == "call" else None
        while at is not None and at.f_code is not layer:
            at = at.f_back
        if at is None:
            return
        files.add(frame.f_code.co_filename)  # called by the layer
        while at is not None and loop not in files:  # what has called the layer, once
            files.add(at.f_code.co_filename)
            at = at.f_back

    one_sequence = {"train_iters": 1, "eval_iters": 0, "micro_batch_size": 1, "global_batch_size": 1}
    run = build({**PRESETS["tiny"], "mock_data": True, "vocab_size": 256, **one_sequence, **EVERYTHING})
    sys.setprofile(see)
    try:
        pretrain(run)
    finally:
        sys.setprofile(None)
    inside = (Path(file).relative_to(PACKAGE) for file in files if file.startswith(str(PACKAGE)))
    trip = {str(file) for file in inside if file.parts[0] in ("training", "model", "moe")}
    assert {"training/loop.py", "training/step.py", "moe/layer.py", "moe/router.py", "moe/experts.py"} < trip
    assert len(trip) <= LONGEST_TRIP, sorted(trip)


def test_what_tests_share_stays_small():
    files = list((ROOT / "tests" / "helpers").glob("*.py"))
    assert len(files) <= 25
    assert sum(len(path.read_text().splitlines()) for path in files) <= 4500
