"""Score functions, expert backends and dispatchers that a program registers from outside of the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import megatron_moe.moe.layer  # noqa: F401  it registers the package's own
from megatron_moe.config import cli
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.registry import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS, Registry
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.routing import ScoreFunction, scores_from_logits, weigh_experts

SOFTPLUS = ScoreFunction(F.softplus, sums_to_one=False)


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


def test_a_score_function_from_outside_weighs_and_is_normalised():
    run = replace(Run(), num_experts=8, moe_router_score_function="softplus")
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with registered(SCORE_FUNCTIONS, "softplus", SOFTPLUS):
        options = MoEOptions.from_run(run)
        scores = scores_from_logits(logits, options)
        ids = scores.topk(2).indices
        weights = weigh_experts(logits, scores, ids, options)
    assert torch.equal(scores, F.softplus(logits))
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))
