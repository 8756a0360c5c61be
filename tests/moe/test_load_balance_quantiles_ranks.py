"""Quantile balancing: exact counts on any layout, the bias that they give, and what it does to the load.

The oracle counts in Python's integers and finds the quantile by fractions.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megatron_moe import TopKRouter
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.load_balance import GlobalBatch, count_differences, quantile_bias
from megatron_moe.moe.router import RouterSnapshot, announce_global_batch
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import update_routers
from tests.helpers.routers import config
from tests.helpers.rows import rows
from tests.moe.test_load_balance_ranks import PLACES, SEQUENCES, _micro_batches, my_part


def router(bins: int, pg: Any = None, **flags: Any) -> TopKRouter:
    options = config(moe_router_load_balancing_type="quantile_balancing", moe_router_enable_expert_bias=False, **flags)
    options.moe_router_quantile_balancing_num_bins = bins
    return TopKRouter(options, pg)


def differences(scores: torch.Tensor, bias: torch.Tensor, topk: int) -> np.ndarray:
    """Each token's threshold less its scores, in fp32: row by row, by sorting."""
    found = []
    for row in scores.numpy():
        threshold = np.sort(row + bias.numpy())[::-1][topk]
        found.append(threshold - row)
    return np.array(found)


def oracle(apart: np.ndarray, bias: torch.Tensor, topk: int, bins: int, ema: float) -> tuple[list[float], float]:
    """The new bias, and a bin's width."""
    low = bias.min().numpy() - np.float32(1)
    width = (bias.max().numpy() + np.float32(1) - low) / np.float32(bins)
    experts, wide_low = apart.shape[1], bias.double().min().item() - 1
    wide = (bias.double().max().item() + 1 - wide_low) / bins
    wanted, found = Fraction(len(apart) * topk, experts), []
    for column in apart.T:
        counts = [0] * bins
        for value in (column - low) / width:
            counts[min(max(int(value), 0), bins - 1)] += 1
        place = passed = 0
        while passed + counts[place] < wanted:
            passed += counts[place]
            place += 1
        found.append(wide_low + (place + float((wanted - passed) / counts[place])) * wide)
    mean = sum(found) / experts
    return [old * ema + (new - mean) * (1 - ema) for old, new in zip(bias.double().tolist(), found)], wide


@pytest.mark.parametrize("block", rows(range(10), test=[0]))
def test_any_split_of_the_tokens_gives_the_bits_of_the_whole_and_the_quantile_of_the_oracle(block: int) -> None:
    for seed in range(300 * block, 300 * block + 300):
        generator = torch.Generator().manual_seed(seed)
        tokens, experts, bins = (
            int(torch.randint(*span, (1,), generator=generator)) for span in ((3, 60), (3, 9), (2, 99))
        )
        topk = int(torch.randint(1, experts, (1,), generator=generator))
        bias = 0.3 * torch.randn(experts, generator=generator) * (seed % 3 > 0)
        logits = torch.randn(tokens, experts, generator=generator) + torch.randn(experts, generator=generator)
        scores, padding = torch.sigmoid(logits), torch.rand(tokens, generator=generator) < 0.1
        padding[0], ema = False, 0.5 * (seed % 2)
        whole = torch.zeros(experts, bins, dtype=torch.int32)
        count_differences(whole, scores, bias, topk, padding)
        total = torch.zeros(experts, bins, dtype=torch.int64)
        pieces = torch.randperm(tokens, generator=generator).split(1 + seed % 7)  # of micro-batches and ranks
        for piece in pieces:
            part = torch.zeros_like(whole)
            count_differences(part, scores[piece], bias, topk, padding[piece])
            total += part
        assert torch.equal(total, whole.long())
        updated, width = quantile_bias(bias, total, topk, ema)
        valid = scores[~padding]
        apart = differences(valid, bias, topk)
        wanted, wide = oracle(apart, bias, topk, bins, ema)
        assert width.item() == pytest.approx(wide)
        torch.testing.assert_close(updated, torch.tensor(wanted), rtol=2**-22, atol=1e-7)
        if not ema:  # the exact quantiles are within the bound, up to the mean that is subtracted
            place = -(-len(valid) * topk // experts) - 1
            exact = np.sort(apart, axis=0)[place]
            shift = updated.double().numpy() - exact
            assert shift.max() - shift.min() <= 2 * wide + 1e-6


def of_place(layout: dict[str, Any], sizes: tuple[int, ...]) -> dict[int, Any]:
    """The bias and the counts of three steps, by the size of micro-batches."""
    pg = groups.initialize(replace(Run(), **layout))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-8, 9, (3, 16, SEQUENCES, 16), generator=generator) / 8  # logits without roundings
    padding = torch.arange(16) >= torch.tensor([16, 3, 9, 14]).unsqueeze(1)
    found: dict[int, Any] = {}
    for size in sizes:
        flags = {name: value for name, value in layout.items() if name.startswith(("tensor", "sequence"))}
        gate = router(64, pg, **flags)
        with torch.no_grad():
            gate.weight.copy_(torch.randint(-4, 5, gate.weight.shape, generator=torch.Generator().manual_seed(4)) / 4)
        found[size] = []
        for of_step in hidden:
            announce_global_batch([gate], GlobalBatch(int((~padding).sum()), 1.0))
            batches = zip(
                _micro_batches(of_step, 1, size, pg.dp.size()), _micro_batches(padding, 0, size, pg.dp.size())
            )
            for columns, masks in batches:
                part, mask = my_part(columns[pg.dp.rank()], 0, pg), my_part(masks[pg.dp.rank()], 1, pg).T.flatten()
                with torch.no_grad():  # an evaluation, or the first pass of a recomputation: not counted
                    gate.route(part.flatten(0, 1), mask, size)
                gate.route(part.flatten(0, 1).requires_grad_(), mask, size)
            update = update_routers([gate])
            assert update.bias_error[0] is not None
            found[size].append(
                (update.expert_bias[0], update.tokens_per_expert[0].tolist(), update.bias_error[0].item())
            )
    return found


@pytest.mark.parametrize("place", rows(PLACES, test=["DP2", "TP2", "CP2"]))
def test_layouts_and_micro_batches_give_the_same_bits(once: Any, place: str) -> None:
    ranks, layout, sizes = PLACES[place]
    (alone,) = once(1, of_place, layout={}, sizes=(SEQUENCES,))
    wanted = alone[SEQUENCES]
    assert wanted[0][0].abs().max() > 0.05
    for rank in once(ranks, of_place, layout=layout, sizes=sizes):
        for steps in rank.values():
            for (bias, counts, error), (whole, whole_counts, whole_error) in zip(steps, wanted, strict=True):
                assert torch.equal(bias.view(torch.int32), whole.view(torch.int32))
                assert (counts, error) == (whole_counts, whole_error)


def test_one_step_evens_the_load_and_a_step_that_is_taken_back_leaves_nothing() -> None:
    gate = router(1000)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 16, generator=generator) + torch.randn(16, generator=generator)

    def most_tokens() -> int:
        gate.route(hidden.clone().requires_grad_())
        return int(gate.local_tokens_per_expert.max())

    assert most_tokens() > 1500  # of 1,000 for each
    snapshot = RouterSnapshot.capture([gate])
    most_tokens()
    update_routers([gate])
    assert gate.expert_bias.abs().max() > 0
    snapshot.restore()
    assert not gate.expert_bias.any()
    assert not gate.local_differences.any()
    for _ in range(3):
        most_tokens()
        update_routers([gate])
    assert most_tokens() <= 1100
