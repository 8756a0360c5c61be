"""TensorBoard events. Imported only when --tensorboard-dir asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.report.metric import MetricError
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.registry import metrics
from megatron_moe.report.sink import Sink


class TensorBoardSink(Sink):
    """Writes the scalars of all metrics under `folder`, one event per scalar and step.

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
        written: dict[str, str] = {}
        for metric in metrics():
            for tag, number in metric.scalars(record).items():
                if tag in written:
                    raise MetricError(f"metric {metric.name}: TensorBoard tag {tag} is that of {written[tag]}")
                written[tag] = metric.name
                self._writer.add_scalar(tag, number, record.iteration)

    def evaluation(self, record: EvalRecord) -> None:
        self._writer.add_scalar(f"loss/{record.split}", record.loss, record.iteration)
        self._writer.flush()

    def close(self, summary: dict[str, Any] | None) -> None:
        self._writer.close()
