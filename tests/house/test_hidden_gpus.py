"""Tests see no GPU, nor does what they start, unless `--gpu` asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

VISIBLE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


def test_tests_and_what_they_start_see_no_gpu():
    child = subprocess.run([sys.executable, "-c", VISIBLE], capture_output=True, text=True, check=True).stdout
    assert (os.environ["CUDA_VISIBLE_DEVICES"], child) == ("", "\n")
    assert not torch.cuda.is_available()


@pytest.mark.gpu
def test_a_test_marked_gpu_sees_the_gpus():
    assert torch.cuda.is_available()
