"""The step that the tests of the reports change and report."""

from __future__ import annotations

from typing import Any

from megatron_moe.report.metric import StepRecord

REQUIRED: dict[str, Any] = {
    "iteration": 1,
    "consumed_samples": 8,
    "loss": 3.0,
    "learning_rate": 1e-3,
    "grad_norm": 0.5,
    "loss_scale": 1.0,
    "skipped": False,
    "tokens": 1000,
    "seconds": 0.5,
}
STEP = StepRecord(**REQUIRED, tokens_per_second=2000.0, model_tflops=0.25, global_batch_size=8, seconds_left=1.0)
