"""The learning rate follows its flags, counted in committed iterations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_moe.config.schema import Run, replace
from megatron_moe.training.optimizer import build_scheduler

pytestmark = pytest.mark.engine


def rates(iterations: int, **flags: object) -> list[float]:
    """The rate that each of the first steps uses."""
    run = replace(Run(), **{"lr": 1.0, "min_lr": 0.1, "train_iters": 20, "weight_decay": 0.5, **flags})
    group = {"wd_mult": 1.0, "max_lr": run.optimizer.lr, "min_lr": run.optimizer.min_lr}
    scheduler = build_scheduler(run, SimpleNamespace(param_groups=[group]))
    used = []
    for _ in range(iterations):
        used.append(group["lr"])
        assert group["weight_decay"] == 0.5
        scheduler.step(increment=1)
    return used


SHAPES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear warm-up": ({"lr_warmup_iters": 4, "lr_warmup_init": 0.2}, [0.2, 0.4, 0.6, 0.8, 1.0]),
    "warm-up as a share of the decay": ({"lr_warmup_fraction": 0.1}, [0.0, 0.5, 1.0]),
    "constant": ({}, [1.0] * 30),
    "linear": ({"lr_decay_style": "linear"}, [*(1.0 - 0.9 * n / 20 for n in range(21)), *[0.1] * 4]),
    "cosine": ({"lr_decay_style": "cosine"}, [0.1 + 0.45 * (1 + math.cos(math.pi * n / 20)) for n in range(21)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_of_each_step_is_that_of_its_formula(name):
    flags, wanted = SHAPES[name]
    assert rates(len(wanted), **{"lr_decay_style": "constant", **flags}) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("style", "middle"), [("linear", 0.55), ("cosine", 0.55), ("exponential", 0.1 + 0.9 * (math.sqrt(2.0) - 1.0))]
)
def test_wsd_is_stable_and_then_decays(style, middle):
    used = rates(21, lr_decay_style="WSD", lr_wsd_decay_iters=8, lr_wsd_decay_style=style)
    assert used[:13] == [1.0] * 13
    assert used[16] == pytest.approx(middle)
    assert used[20] == pytest.approx(0.1)
    # Over the last tenth, unless told otherwise.
    used = rates(21, lr_decay_style="WSD", lr_wsd_decay_style="linear")
    assert used[18] == 1.0 and used[19] == pytest.approx(0.55) and used[20] == pytest.approx(0.1)


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_lengths_in_sequences_are_those_of_a_schedule_that_counts_sequences(style):
    flags = {"lr_decay_samples": 150, "lr_warmup_samples": 20, "lr_decay_style": style, "global_batch_size": 8}
    flags |= {"lr_wsd_decay_samples": 30, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
    group = {"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.1}
    decay: dict[str, Any] = {"start_wd": 0.5, "end_wd": 0.5, "wd_incr_steps": 150, "wd_incr_style": "constant"}
    steps: dict[str, Any] = {"lr_warmup_steps": 20, "lr_decay_steps": 150, "wsd_decay_steps": 30}
    styles: dict[str, Any] = {"lr_decay_style": style, "lr_wsd_decay_style": "linear"}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=0.0, max_lr=1.0, min_lr=0.1, **decay, **steps, **styles
    )
    expected = []
    for _ in range(21):
        expected.append(group["lr"])
        theirs.step(increment=8)
    assert rates(21, **flags) == pytest.approx(expected, rel=1e-12)
    assert rates(21, **flags, train_samples=167)[:20] == pytest.approx(expected[:20], rel=1e-12)
