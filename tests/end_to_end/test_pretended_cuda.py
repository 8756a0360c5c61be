"""Runs on the pretended CUDA machine of `tests/helpers/cuda_on_cpu.py`, by the commands that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import ROOT, rank_environment

CUDA = ["-m", "tests.helpers.cuda_on_cpu", str(ROOT / "pretrain_moe.py")]
CPU = [str(ROOT / "pretrain_moe.py")]
VERIFY = ["-m", "tests.helpers.cuda_on_cpu", str(ROOT / "tools" / "verify_resume.py")]
FLAGS = (
    "--preset tiny --mock-data --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --bf16 --eval-iters 0 "
    "--micro-batch-size 1 --global-batch-size 2 --lr-decay-iters 6 --hidden-dropout 0.1 --save steps --load steps"
)


def printed(program: list[str], folder: Path, **environment: str) -> str:
    """Run a program in `folder`; return what it printed. It has to succeed."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        cwd=folder,
        env={**rank_environment(), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def trained(
    program: list[str], folder: Path, iterations: int, flags: str = FLAGS, **environment: str
) -> tuple[str, list[dict[str, Any]]]:
    """Run the program up to this iteration; return what it printed, and the metrics of all steps so far."""
    command = [*program, *flags.split(), "--train-iters", str(iterations), "--metrics-file", "metrics.jsonl"]
    output = printed(command, folder, **environment)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return output, [step for step in map(json.loads, lines) if "loss" in step]


@pytest.mark.one_engine
@pytest.mark.claim("A run started on a CPU goes on with CUDA, and the other way round.")
def test_a_run_goes_on_with_another_kind_of_device(tmp_path):
    trained(CPU, tmp_path, 1)
    with_cuda, _ = trained(CUDA, tmp_path, 2)
    on_cpu, steps = trained(CPU, tmp_path, 3)
    for output in (with_cuda, on_cpu):
        assert "random states of every rank are made anew" in output and "hidden_dropout" in output
    assert [step["iteration"] for step in steps] == [1, 2, 3]


@pytest.mark.one_engine
@pytest.mark.claim(
    "A Transformer Engine or apex that cannot be loaded is named at the start, and a run without it works."
)
@pytest.mark.claim("With CUDA, recomputation compiles no C++ extension, and changes no number.")
def test_a_broken_transformer_engine_and_recomputation_leave_the_numbers_as_they_are(tmp_path):
    flags = FLAGS.partition(" --save")[0]
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    plain.mkdir()
    _, expected = trained(CUDA, plain, 2, flags)

    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise AssertionError('built for another torch')")
    output, steps = trained(
        CUDA,
        tmp_path,
        2,
        f"{flags} --recompute-granularity selective --recompute-modules layernorm moe_act mla_up_proj",
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        TORCH_EXTENSIONS_DIR=str(compiled),
    )
    assert "Transformer Engine is not used" in output and "AssertionError: built for another torch" in output
    assert not compiled.exists(), "neither an extension nor a lock"
    assert [step["loss"] for step in steps] == [step["loss"] for step in expected]
    assert [step["grad_norm"] for step in steps] == [step["grad_norm"] for step in expected]


@pytest.mark.one_engine
def test_with_cuda_activations_are_offloaded_without_a_change_to_the_numbers(tmp_path):
    flags = FLAGS.partition(" --save")[0]
    offload = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules core_attn moe_act"
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    plain.mkdir(), moved.mkdir()
    _, expected = trained(CUDA, plain, 2, flags)
    output, steps = trained(CUDA, moved, 2, f"{flags} {offload}")
    assert "has no effect" not in output
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [
        (step["loss"], step["grad_norm"]) for step in expected
    ]


def verified(folder: Path, *flags: str) -> str:
    """Replay the recorded steps as the one rank of a launched world; return the last line."""
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return printed([*VERIFY, "steps", *flags], folder, **launched).splitlines()[-1]


@pytest.mark.claim("On CUDA tools/verify_resume.py compares bits of runs with --deterministic-mode alone.")
@pytest.mark.one_engine
def test_a_deterministic_run_records_its_settings_and_is_replayed_to_the_bit(tmp_path):
    output, _ = trained([*CUDA, "--deterministic-mode", "--save-interval", "1"], tmp_path, 2)
    assert "deterministic mode: " in output and "NCCL_ALGO=Ring" in output
    arithmetic = json.loads((tmp_path / "steps" / "iter_0000002" / "state.json").read_text())["arithmetic"]
    assert (arithmetic["CUBLAS_WORKSPACE_CONFIG"], arithmetic["NCCL_ALGO"]) == (":4096:8", "Ring")
    assert verified(tmp_path).endswith("compared to the bit: all agree")
    told = verified(tmp_path, "--no-deterministic-mode")
    assert "within tolerances" in told and "CUDA without --deterministic-mode" in told
