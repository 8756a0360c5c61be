"""What a step reports of itself in fp16: scale used and scale to come, and whether an overflow was to be expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine


def reported(flags: dict[str, Any], spoiled: list[bool]) -> list[tuple[bool, float, float, bool]]:
    """Of each step: was it applied, its loss scale, the next step's, and whether it was an overflow."""
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer(flags)
    weight = next(p for name, p in trainer.model[0].named_parameters() if name.endswith("mlp.experts.weight1"))
    seen = []
    for bad in spoiled:
        hook = weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf"))) if bad else None
        result = trainer.step()
        if hook is not None:
            hook.remove()
        seen.append((result.committed, result.loss_scale, result.next_loss_scale, result.overflow))
    return seen


def test_a_scale_is_reported_by_the_step_that_used_it_and_an_overflow_only_where_it_can_fall(gloo: Any) -> None:
    flags = {
        "fp16": True,
        "initial_loss_scale": 256.0,
        "min_loss_scale": 128.0,
        "loss_scale_window": 2,
        "hysteresis": 1,
    }
    (seen,) = gloo.run(1, reported, flags=flags, spoiled=[False, False, True, True, True, False])
    assert seen == [
        (True, 256.0, 256.0, False),
        (True, 256.0, 512.0, False),
        (False, 512.0, 256.0, True),
        (False, 256.0, 128.0, True),
        (False, 128.0, 128.0, False),
        (True, 128.0, 128.0, False),
    ]
