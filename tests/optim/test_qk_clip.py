"""The rows of a weight that QK-clip multiplies, in whichever part of it a rank updates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe.engine.optimizer import OwnedPart
from megatron_moe.optim.qk_clip import ClippedWeight, QKClip

ROWS, WIDTH = 6, 3
# Two groups of three rows: half of eta's power for the first two, none for the third.
PARTS = ((2, 0.5), (1, 0.0))
LOGITS = torch.tensor([[1.0, 4.0], [-3.0, 16.0]])
ETAS = torch.tensor([[1.0, 1.0], [1.0, 0.25]])
"""Of the threshold 4: what is at it or below, and what is negative, stays."""


def clip(tp_rank: int = 0, tp_size: int = 1, groups: int = 2) -> QKClip:
    flags = {"qk_clip": True, "qk_clip_threshold": 4.0, "num_attention_heads": 2, "hidden_size": 8}
    flags |= {"group_query_attention": True, "num_query_groups": groups}
    tp: Any = SimpleNamespace(rank=lambda: tp_rank, size=lambda: tp_size)
    made = QKClip(build(flags), SimpleNamespace(tp=tp))  # type: ignore[arg-type]
    made.begin(LOGITS)
    return made


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape))


def wanted(whole: torch.Tensor, layer: int) -> torch.Tensor:
    factors = torch.tensor([eta**power for eta in ETAS[layer].tolist() for rows, power in PARTS for _ in range(rows)])
    return whole.detach() * factors.view(-1, *[1] * (whole.dim() - 1))


PLACES = [OwnedPart(None, begin, end) for begin in range(18) for end in range(begin, 19)]
PLACES += [OwnedPart(0, begin, end) for begin in range(6) for end in range(begin, 7)]
PLACES += [OwnedPart(1, begin, end) for begin in range(3) for end in range(begin, 4)]


PLACES_OF_A_BIAS = [OwnedPart(None, 2, 6), OwnedPart(0, 1, 5), OwnedPart(None, 0, 6)]


@pytest.mark.parametrize("layer", [0, 1])
def test_each_part_of_a_weight_or_bias_is_multiplied_as_the_whole_is(layer: int) -> None:
    for whole, places in ((weight(ROWS, WIDTH), PLACES), (weight(ROWS), PLACES_OF_A_BIAS)):
        for own in places:
            main = own.of(whole.detach()).clone()
            clip().scale(ClippedWeight(whole, layer, PARTS), own, main)
            assert torch.equal(main, own.of(wanted(whole, layer))), own


@pytest.mark.parametrize(
    ("options", "eta"),
    [({"tp_rank": 0, "tp_size": 2}, 1.0), ({"tp_rank": 1, "tp_size": 2}, 0.25), ({"groups": 1}, 0.25)],
    ids=["first rank", "second rank", "heads that share a key"],
)
def test_rows_have_the_factor_of_the_ranks_heads_and_of_the_largest_logit(options: Any, eta: float) -> None:
    whole = weight(3, WIDTH)
    main = whole.detach().clone()
    clip(**options).scale(ClippedWeight(whole, 1, PARTS), OwnedPart(None, 0, 9), main)
    assert torch.equal(main[:2], whole[:2] * eta**0.5) and torch.equal(main[2], whole[2])
