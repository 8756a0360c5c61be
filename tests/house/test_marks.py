"""A mark decides which suite runs a test; it can't take a red test out of sight. Without `gpu` no GPU is seen."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import require_a_row_of_each
from tests.helpers.sources import ROOT, sources


def row(name: str, mark: Any = None) -> Any:
    return SimpleNamespace(nodeid=f"tests/moe/test_x.py::{name}", get_closest_marker=lambda _: mark)


def test_a_mark_leaves_a_row_of_each_test_or_names_what_stands_for_it():
    marked, instead = pytest.mark.test_all.mark, pytest.mark.test_all(instead="tests/moe/test_x.py::test_b").mark
    require_a_row_of_each([row("test_a[1]"), row("test_a[2]", marked)])
    require_a_row_of_each([row("test_a", instead), row("test_b")])
    for rows in (
        [row("test_a[1]", marked), row("test_a[2]", marked)],
        [row("test_a", instead), row("test_b[1]", instead)],
        [row("test_a", pytest.mark.test_all(instead="tests/moe/test_gone.py::test_b").mark)],
    ):
        with pytest.raises(pytest.UsageError, match="test_a"):
            require_a_row_of_each(rows)


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
