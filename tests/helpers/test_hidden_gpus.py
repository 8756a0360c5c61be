"""Tests see no GPU, nor does what they start, unless `--gpu` asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "MEGATRON_MOE_TEST_OF_HIDDEN_GPUS"

VISIBLE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


def pytest_run(*flags: str) -> str:
    """Run this file's inner tests by a pytest of their own that was given device 0, and return what they printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__, *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", INSIDE: "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


if INSIDE in os.environ:

    def test_what_a_test_and_its_processes_see():
        child = subprocess.run([sys.executable, "-c", VISIBLE], capture_output=True, text=True, check=True).stdout
        print(f"without: {os.environ['CUDA_VISIBLE_DEVICES']!r} {child.strip()!r}")

    @pytest.mark.gpu
    def test_what_a_gpu_test_sees():
        child = subprocess.run([sys.executable, "-c", VISIBLE], capture_output=True, text=True, check=True).stdout
        print(f"with: {os.environ['CUDA_VISIBLE_DEVICES']!r} {child.strip()!r}")

else:

    def test_tests_and_what_they_start_see_no_gpu():
        printed = pytest_run()
        assert "without: '' ''" in printed and "with:" not in printed

    def test_tests_marked_gpu_run_alone_and_see_the_gpus():
        printed = pytest_run("--gpu")
        assert "with: '0' '0'" in printed and "without:" not in printed
