"""benchmarks/bias_exactness.py counts wrong updates rightly, and finds none of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.bias_exactness import Tally, pull_request_7081, right_direction

pytestmark = pytest.mark.engine


def test_an_update_is_swallowed_reversed_or_invented() -> None:
    tally = Tally()
    right = right_direction(torch.tensor([1, 5, 3, 3, 3]))
    assert right.tolist() == [1, -1, 0, 0, 0]
    tally.add(torch.tensor([0.0, 1e-3, -1e-3, 0.0, 0.0]), right)
    assert (tally.updates, tally.swallowed, tally.reversed, tally.invented) == (5, 1, 1, 1)
    assert tally.wrong == 3 / 5 and tally.step == pytest.approx(1e-3)


def test_the_sums_of_pull_request_7081_come_out() -> None:
    found = pull_request_7081()
    assert found["exact"] == 40_840
    assert {found["tree"], found["ring"]} == {41_216, 40_704}


def steps() -> Any:
    from benchmarks.bias_exactness import routed_steps
    from megatron_moe.config.schema import Run
    from megatron_moe.parallel import groups

    stock, ours, spread = routed_steps(64, 8, 0.01, 2, groups.initialize(Run()))
    return [stock.updates, stock.wrong, stock.step, ours.updates, ours.wrong, ours.step, spread]


def test_ours_is_never_wrong_where_the_engines_counts_are(gloo: Any) -> None:
    for stock_updates, stock_wrong, stock_step, updates, wrong, step, spread in gloo.run(2, steps):
        assert updates == stock_updates == 128 and 0.005 < spread < 0.05
        assert wrong == 0 and step == torch.tensor(1e-3).item()
        assert stock_wrong > 0.02 and stock_step == pytest.approx(0.0009994507, abs=1e-10)
