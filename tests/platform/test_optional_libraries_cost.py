"""`import megatron_moe` is light: it loads neither torch nor the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def _run(code: str) -> tuple[str, float]:
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return ran.stdout.strip(), time.monotonic() - started


def test_importing_the_package_loads_no_torch_and_no_engine_and_takes_less_than_5_seconds():
    heavy, seconds = _run(
        "import sys, megatron_moe; print([n for n in ('torch', 'numpy', 'megatron.core') if n in sys.modules])"
    )
    assert heavy == "[]"
    assert seconds < 5.0


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    shown, _ = _run(
        "import megatron_moe\n"
        "print([n for n in megatron_moe.__all__ if n not in dir(megatron_moe)], hasattr(megatron_moe, 'nothing'))"
    )
    assert shown == "[] False"
