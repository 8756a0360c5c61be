"""benchmarks/bias_exactness.py finds wrong updates of the engine, and none of ours."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine


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
