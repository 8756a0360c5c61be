"""What the tests of other programs' settings share."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.config import schema
from tests.compat.deepspeed_files import parsed


@pytest.fixture
def deepspeed(tmp_path: Path) -> Callable[..., schema.Run]:
    """`deepspeed(content, *flags, world=4)`: the run of these flags and a DeepSpeed file, ds.json, of this content."""
    return functools.partial(parsed, tmp_path / "ds.json")
