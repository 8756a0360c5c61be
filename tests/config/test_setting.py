"""Score functions, expert backends and dispatchers that a program registers from outside of the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import megatron_moe.moe.layer  # noqa: F401  it registers the package's own
from megatron_moe.config import cli
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.setting import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS, Registry


@contextmanager
def registered(registry: Registry, name: str, entry: Any) -> Iterator[None]:
    """The entry is there within the block: the processes of the tests serve others afterwards."""
    registry.register(name, entry)
    try:
        yield
    finally:
        del registry._entries[name]


@pytest.mark.parametrize(
    ("registry", "flag", "name"),
    [
        (SCORE_FUNCTIONS, "--moe-router-score-function", "softplus"),
        (EXPERT_BACKENDS, "--moe-expert-backend", "counted"),
        (DISPATCHERS, "--moe-token-dispatcher-type", "counted"),
    ],
)
def test_a_registered_name_is_a_value_of_its_flag(registry, flag, name):
    words = ["--preset", "tiny", "--mock-data", "--vocab-size", "100", flag, name]
    with pytest.raises(ConfigError, match=f"{flag} {name}: not one of {', '.join(registry)}"):
        cli.parse(words)
    with registered(registry, name, object()):
        cli.parse(words)
        with pytest.raises(ValueError, match=f"{flag} {name}: is registered already"):
            registry.register(name, object())
    with pytest.raises(ValueError, match=f"{flag} {name}: not one of"):
        registry[name]
    with pytest.raises(ValueError, match="is registered already"):
        registry.register(next(iter(registry)), object())
