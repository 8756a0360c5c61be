"""What a GPU would launch for a layer, and what the kernels take of one that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import launches
from tests.helpers.compiled_kernels import ROOT

SHAPE = {"tokens": 4096, "hidden": 7168, "experts": 32, "topk": 8, "ffn": 2048}


def totals(kernels: str) -> SimpleNamespace:
    every = [one for found in launches.of_layer(**SHAPE, kernels=kernels) for one in found]
    return SimpleNamespace(
        launches=sum(one.launches for one in every),
        gigabytes=sum(one.size for one in every if not one.flops) / 1e9,
        tflops=sum(one.flops for one in every) / sum(one.seconds for one in every) / 1e12,
    )


@pytest.mark.triton
@pytest.mark.claim("A MoE layer of one rank launches at most 45 operations on a GPU, forward and backward.")
def test_a_layer_launches_45_operations_at_most() -> None:
    found = totals("triton")
    assert found.launches <= 45 and found.gigabytes <= 3.8 and found.tflops >= 555


def test_without_kernels_it_launches_twice_as_many() -> None:
    found = totals("torch")
    assert found.launches > 80 and found.gigabytes > 15 and found.tflops < 500


@pytest.mark.triton
@pytest.mark.claim("Our kernels compile for sm_80, sm_90 and sm_100 within a budget of registers and memory.")
def test_the_kernels_compile_within_their_budget(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compiled_kernels", "--check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
