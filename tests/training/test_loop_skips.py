"""Skipped steps and moves of the loss scale are counted since iteration 0, over any number of resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.report.jsonl import read_steps

pytestmark = pytest.mark.engine

# The scale starts so high that the first steps overflow.
FP16 = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "eval_iters": 0,
    "fp16": True,
    "initial_loss_scale": 2.0**40,
    "hysteresis": 1,
    "health_interval": 1,
    "log_interval": 100,
    "lr_decay_style": "constant",
}


def trained(flags: dict[str, Any]) -> str:
    """A whole run; where it saved."""
    from megatron_moe.training.run import pretrain

    return pretrain(build({**FP16, **flags}))["checkpoint"]


def test_skips_are_counted_on_after_a_resume(gloo: Any, tmp_path: Path) -> None:
    metrics, root = tmp_path / "metrics.jsonl", str(tmp_path / "run")
    flags = {"metrics_file": str(metrics), "save": root}
    step = gloo.run(1, trained, flags={**flags, "train_iters": 3})[0]
    saved = json.loads((Path(step) / "state.json").read_text())
    assert (saved["skipped_iterations"], saved["loss_scale_lowered"], saved["loss_scale_raised"]) == (3, 3, 0)
    gloo.run(1, trained, flags={**flags, "train_iters": 5, "load": root})
    told = [step.health for step in read_steps(metrics)]
    assert [health.skipped_iterations for health in told] == [1, 2, 3, 4, 5]
    assert [health.loss_scale_lowered for health in told] == [1, 2, 3, 4, 5]
    assert {health.skip_rate for health in told} == {1.0}
    # Gradients that overflowed have no norm, and every layer's routing is told all the same.
    assert {health.dense_grad_norm for health in told} == {None}
    assert all(health.layers[2].sampled_tokens for health in told)
