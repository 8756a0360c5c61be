"""What the tests of this room share."""

from typing import Any

import pytest

from megatron_moe.config.schema import Run
from megatron_moe.parallel import groups


@pytest.fixture
def pg(one_process: None) -> Any:
    """The process groups of this process alone."""
    return groups.initialize(Run())
