"""A schedule of a DeepSpeed file that is taken gives the rates of DeepSpeed's formula, iteration by iteration."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe.optim.optimizer import build_scheduler
from tests.compat.deepspeed_files import scheduler

pytestmark = pytest.mark.engine

# DeepSpeed's formulas, as functions of the iterations done; `p` are the parameters.


def warmup(t: int, p: dict[str, Any]) -> float:
    steps, total = max(2, p["warmup_num_steps"]), p.get("total_num_steps")
    falling = 1.0 if total is None else max(0.0, (total - t) / max(1.0, total - steps))
    share = t / steps if t < steps else falling
    return p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * share


def one_cycle(t: int, p: dict[str, Any]) -> float:
    rise, fall = p["cycle_first_step_size"], p.get("cycle_second_step_size", p["cycle_first_step_size"])
    share = t / rise if t <= rise else max(0.0, (rise + fall - t) / fall)
    return p["cycle_min_lr"] + (p["cycle_max_lr"] - p["cycle_min_lr"]) * share


LINEAR = {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": 3e-4, "cycle_momentum": False}

SCHEDULES = [
    ("WarmupLR", warmup, {**LINEAR, "warmup_num_steps": 7}),
    ("WarmupLR", warmup, {**LINEAR, "warmup_num_steps": 1}),
    ("WarmupLR", warmup, {**LINEAR, "warmup_num_steps": 10, "warmup_min_lr": 0.0}),
    ("WarmupDecayLR", warmup, {**LINEAR, "warmup_num_steps": 7, "total_num_steps": 30}),
    ("WarmupDecayLR", warmup, {**LINEAR, "warmup_num_steps": 2, "total_num_steps": 3}),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 5, "cycle_second_step_size": 12}),
    ("OneCycle", one_cycle, {**CYCLE, "cycle_first_step_size": 6}),
]


@pytest.mark.parametrize(("kind", "formula", "params"), SCHEDULES)
def test_a_schedule_that_is_taken_has_deepspeeds_rates(deepspeed, kind, formula, params):
    run = deepspeed(scheduler(kind, **params), "--preset", "demo", "--train-iters", "40")
    group = {"lr": None, "weight_decay": None, "default_config": True}
    schedule = build_scheduler(run, SimpleNamespace(param_groups=[group]))
    for done in range(40):
        assert group["lr"] == pytest.approx(formula(done, params), rel=1e-12, abs=1e-18), done
        schedule.step(1)
