"""What the tests of the command line share."""

from __future__ import annotations

import argparse
import functools

import pytest

from megatron_moe.config import cli


@functools.cache
def parser() -> argparse.ArgumentParser:
    return cli._build_parser()


@pytest.fixture
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the parser once for all command lines, which takes longer than to read one."""
    built = parser()
    monkeypatch.setattr(cli, "_build_parser", lambda: built)
