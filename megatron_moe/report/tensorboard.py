"""TensorBoard events. Imported only when --tensorboard-dir asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.report.records import EvalRecord, StepRecord, dropped_share, load_max_over_mean
from megatron_moe.report.records import scalars as health_scalars
from megatron_moe.report.sink import Sink


class TensorBoardSink(Sink):
    """One scalar per figure and step under `folder`.

    A resumed run writes a new event file whose first event tells TensorBoard to forget every step after
    `start_iteration` of the older files.

    Raises:
        ConfigError: the tensorboard package is missing.
    """

    def __init__(self, folder: Path, start_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder} needs the tensorboard package ({error}); "
                "install it with `pip install tensorboard`, or drop the flag"
            ) from error
        self.artifact = folder
        self._writer = SummaryWriter(str(folder), purge_step=start_iteration + 1)

    def start(self, facts: dict[str, Any]) -> None:
        table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
        self._writer.add_text("run", f"| | |\n|---|---|\n{table}", 0)

    def step(self, record: StepRecord) -> None:
        scalars: dict[str, float | None] = {
            "loss/train": record.loss,
            "optimizer/learning_rate": record.learning_rate,
            "optimizer/grad_norm": record.grad_norm,
            "optimizer/loss_scale": record.loss_scale,
            "optimizer/skipped": float(record.skipped),
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/model_tflops": record.model_tflops,
            "speed/mfu": record.mfu,
            "speed/step_seconds": record.seconds,
            "batch/global_batch_size": float(record.global_batch_size),
            "memory/peak_bytes": float(record.memory_bytes),
        }
        if record.tokens_per_expert:
            scalars["experts/load_max_over_mean"] = record.expert_load
            scalars["experts/empty"] = float(record.empty_experts)
            scalars["experts/bias_max"] = record.expert_bias_max
        for layer, counts in record.tokens_per_expert.items():
            scalars[f"experts_by_layer/load_max_over_mean_{layer}"] = load_max_over_mean(counts)
        for name, value in record.aux_losses.items():
            scalars[f"loss/{name}"] = value
        for depth, loss in enumerate(record.mtp_losses, start=1):
            scalars[f"loss/mtp_{depth}"] = loss
        scalars["experts/dropped_share"] = dropped_share(record)
        if record.health is not None:
            scalars.update(health_scalars(record.health))
        for tag, number in scalars.items():
            if number is not None:
                self._writer.add_scalar(tag, number, record.iteration)

    def evaluation(self, record: EvalRecord) -> None:
        self._writer.add_scalar(f"loss/{record.split}", record.loss, record.iteration)
        self._writer.flush()

    def close(self, summary: dict[str, Any] | None) -> None:
        self._writer.close()
