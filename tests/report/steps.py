"""The step that the tests of the reports change and report, and what reports it."""

import io
from pathlib import Path
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.report.records import StepRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe_tools.pretrain import page_sink

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


def reporter(run: Run, start: int = 0, stream: io.StringIO | None = None) -> Reporter:
    """The reporter of the rank that writes."""
    stream = stream or io.StringIO()
    return Reporter(run, is_writer=True, start_iteration=start, stream=stream, page_sink=page_sink)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in a folder: tag -> steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
