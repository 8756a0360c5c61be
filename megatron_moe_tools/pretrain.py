"""What `pretrain_moe.py` and `megatron-moe train` run on each rank: the trainer, with what watches it from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe import pretrain

if TYPE_CHECKING:
    from megatron_moe.report.sink import Sink
    from megatron_moe.training.callbacks.precision import StepAudit


def main(argv: list[str]) -> int:
    """Run one rank and return the exit status; every rank of a run calls this with the same arguments."""
    return pretrain.main(argv, load_audit, page_sink)


def load_audit() -> StepAudit:
    """Return the tracer of `--audit-precision`; it is loaded where a run asks for it."""
    from megatron_moe_tools.audit.step import auditing

    return auditing


def page_sink(page: Path, metrics_file: Path, warn: Callable[[str], None]) -> Sink:
    """Return the sink of `--report-file`; it is loaded where a run asks for it."""
    from megatron_moe_tools.report.page import PageSink

    return PageSink(page, metrics_file, warn)
