"""Which rank is slow is decided from the times of all; a clock tells what a thread spends its time on."""

import math
import random
import statistics
import time

import pytest
import torch

from megatron_moe.training.callbacks import checkpointing
from megatron_moe.training.callbacks.stragglers import CLOCKED, PartClock, SlowRanks, others_median

USUAL = {"data": 0.02, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
"""Seconds of two steps."""
FOUR = (range(4),)


def times(load=100.0, **more):
    """What a rank spends in two steps: the usual, and more of some."""
    return [*(USUAL.get(name, 0.0) + more.get(name, 0.0) for name in CLOCKED), load]


def table(of_ranks):
    return torch.tensor(of_ranks, dtype=torch.float64)


def first_verdict(slow, others=None, stages=FOUR, intervals=40):
    """The number of steps until rank 2 is named, and how; None where it is not."""
    ranks = SlowRanks(stages)
    for number in range(1, intervals + 1):
        of_ranks = [times(**(others or {})) for _ in range(4)]
        of_ranks[2] = times(**slow)
        if found := ranks.add(2, table(of_ranks)):
            (one,) = found
            return 2 * number, one
    return None


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_median_of_the_others_is_that_of_each_list_without_one(count):
    values = torch.randn(count, 5).round(decimals=1)
    for one in range(count):
        for column in range(5):
            others = [*values[:one, column].tolist(), *values[one + 1 :, column].tolist()]
            assert others_median(values)[one, column] == pytest.approx(statistics.median(others))
    assert torch.equal(others_median(values[:, 0]), others_median(values)[:, 0])


@pytest.mark.parametrize("phase", [*USUAL, "save"])
def test_a_slow_rank_is_named_with_its_phase_after_eight_steps(phase):
    steps, found = first_verdict({phase: 1.2})
    assert steps == 8
    assert (found.rank, found.phase, found.experts, found.ended) == (2, phase, False, False)
    assert found.seconds == pytest.approx((USUAL.get(phase, 0) + 1.2) / 2)
    assert found.usual == pytest.approx(USUAL.get(phase, 0) / 2)
    assert "rank 2 (node7)" in found.text("node7") and phase in found.text("node7")


def test_a_slow_rank_of_quick_steps_is_named_when_it_has_lost_two_seconds():
    steps, _ = first_verdict({"forward": 0.4}, intervals=100)
    assert steps == 24  # 0.4 s of 0.92 s in two steps, of which 0.23 s are allowed


@pytest.mark.parametrize(
    ("slow", "others", "stages"),
    [
        ({"forward": 0.2}, {}, FOUR),
        ({"collectives": 9.0, "other": 9.0}, {}, FOUR),
        ({"save": 0.9}, {"save": 0.5}, FOUR),
        ({"forward": 9.0}, {"forward": 9.0}, FOUR),
        ({"forward": 9.0}, {}, ([0, 1, 3], [2])),
        ({"backward": 0.6, "device": 0.7}, {"device": 1.0}, FOUR),
        ({"forward": 9.0}, {"other": math.nan}, FOUR),
    ],
    ids=[
        "by less than a quarter",
        "waits and reports",
        "saves a little longer",
        "as all do",
        "alone in its stage",
        "launches while its device is busy",
        "beside a rank whose clock has stopped",
    ],
)
def test_who_is_not_slow_is_not_named(slow, others, stages):
    assert first_verdict(slow, others, stages, intervals=150) is None


def test_long_pauses_and_noise_are_no_slow_rank():
    draw, ranks = random.Random(0), SlowRanks(FOUR)
    for number in range(2_000):
        of_ranks = [times(forward=draw.expovariate(1 / 0.1), backward=draw.expovariate(1 / 0.1)) for _ in range(4)]
        if number % 50 == 0:
            of_ranks[draw.randrange(4)][CLOCKED.index("data")] += 30.0
        assert ranks.add(2, table(of_ranks)) == []


@pytest.mark.parametrize(
    ("forward", "experts", "load", "blamed"),
    [(0.6, 0.6, 200.0, True), (0.6, 0.1, 200.0, False), (0.6, 0.6, 110.0, False)],
    ids=["experts compute more", "all computes more", "experts have no more to compute"],
)
def test_the_load_of_experts_is_told_from_a_slow_card(forward, experts, load, blamed):
    ranks = SlowRanks(FOUR)
    found = []
    while not found:
        of_ranks = [times(experts=0.1) for _ in range(4)]
        of_ranks[2] = times(load, forward=forward, backward=0.5, experts=0.1 + experts)
        found = ranks.add(2, table(of_ranks))
    assert [(one.rank, one.phase, one.experts) for one in found] == [(2, "forward", blamed)]
    assert ("balance" in found[0].text("h")) == blamed and ("card" in found[0].text("h")) != blamed


def test_a_slow_rank_is_said_once_until_its_phase_changes_or_it_is_as_fast_as_the_others():
    ranks, said = SlowRanks(FOUR), []
    for number in range(120):
        of_ranks = [times() for _ in range(4)]
        if number < 80:
            of_ranks[1] = times(data=1.2) if number < 40 else times(forward=1.2)
        said += [(number, one.rank, one.phase, one.ended) for one in ranks.add(2, table(of_ranks))]
    assert [one[1:] for one in said] == [(1, "data", False), (1, "forward", False), (1, "forward", True)]
    assert said[0][0] == 3 and 42 <= said[1][0] <= 70 and 88 <= said[2][0] <= 90


def test_quick_steps_that_are_slow_in_two_phases_alternately_are_one_slow_rank():
    draw, ranks, said = random.Random(0), SlowRanks(FOUR), []
    for _ in range(1_500):
        of_ranks = [times() for _ in range(4)]
        of_ranks[1] = times(forward=draw.choice((0.0, 0.6)), backward=draw.choice((0.0, 0.6)))
        said += ranks.add(2, table(of_ranks))
    assert [(one.rank, one.ended) for one in said] == [(1, False)]


def save_for(seconds):
    time.sleep(seconds)


def test_the_clock_counts_a_thread_s_own_work_by_part_and_leaves_its_waits_apart(monkeypatch):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.3)
            return grad

    class Work:  # what a collective returns, which waits in C++
        wait = staticmethod(time.sleep)

    clock = PartClock(on_device=False)
    assert all(map(math.isnan, clock.take().values())), "it does not run"
    # A function of the file that saves.
    code = save_for.__code__.replace(co_filename=checkpointing.__file__)
    monkeypatch.setattr(save_for, "__code__", code)
    clock.start()
    try:
        Slow.apply(torch.ones(1, requires_grad=True)).sum().backward()
        save_for(0.4)
        Work().wait(0.5)
        time.sleep(0.2)
        found = clock.take()
        time.sleep(0.1)
        later = clock.take()
    finally:
        clock.close()
    assert {name for name in CLOCKED if found[name] > 0.1} == {"backward", "save", "collectives", "other"}, found
    assert sum(found.values()) > 1.2
    assert {name for name in CLOCKED if later[name]} == {"other"}, later
