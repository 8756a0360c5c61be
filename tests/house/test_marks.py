"""A mark decides which suite runs a test; it can't take a red test out of sight. Without `gpu` no GPU is seen."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.helpers.sources import ROOT, sources


def test_no_test_is_expected_to_fail_or_skipped_without_a_condition():
    hidden = re.compile(r"pytest\.mark\.(xfail|skip)\b")
    found = [str(path.relative_to(ROOT)) for path in sources("tests") if hidden.search(path.read_text())]
    assert found == []


def test_tests_and_what_they_start_see_no_gpu():
    asking = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    child = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, check=True).stdout
    assert (os.environ["CUDA_VISIBLE_DEVICES"], child) == ("", "\n")
    assert not torch.cuda.is_available()


@pytest.mark.gpu
def test_a_test_marked_gpu_sees_the_gpus():
    assert torch.cuda.is_available()
