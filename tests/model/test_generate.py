"""Which tokens may be drawn, against a slow reference, and how often they are."""

import math

import pytest
import torch

from megatron_moe.model.generate import Sampling, choose


def allowed(logits, temperature, top_k, top_p):
    """Token -> probability, in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: top_k or len(ranked)]
    weights = {token: math.exp(logits[token] / temperature) for token in ranked}
    total = sum(weights.values())
    kept, before = {}, 0.0
    for token in ranked:
        if before >= top_p and kept:
            break
        kept[token] = weights[token] / total
        before += weights[token] / total
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.3, None, 1.0), (0.5, None, 0.9), (1.3, 4, 0.9), (0.5, 4, 0.5), (1.3, 50, 0.5), (0.5, 50, 1e-6), (1.3, 1, 1.0)],
)
def test_tokens_are_drawn_as_often_as_they_should_be(temperature, top_k, top_p):
    logits = torch.tensor([0.3, 2.0, -1.0, 2.0, 0.0, 1.1, -math.inf, 0.7])
    wanted = allowed(logits.tolist(), temperature, top_k, top_p)
    generator, sampling, draws = torch.Generator().manual_seed(1), Sampling(temperature, top_k, top_p), 1500
    counts = torch.zeros(8)
    for _ in range(draws):
        counts[choose(logits, sampling, generator)] += 1
    assert {token for token in range(8) if counts[token]} <= wanted.keys()
    for token, share in wanted.items():
        # Five standard deviations of a draw.
        assert abs(counts[token] / draws - share) < 5 * math.sqrt(share * (1 - share) / draws) + 1e-9, token


def test_without_temperature_the_likeliest_is_taken_and_nothing_drawn():
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    assert choose(torch.tensor([0.1, 3.0, 2.9]), Sampling(0.0, 2, 0.5), generator) == 1
    assert torch.equal(generator.get_state(), state)
