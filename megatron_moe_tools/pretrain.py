"""The rank of `pretrain_moe.py` and `megatron-moe train`: the trainer, with other programs' flags and the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe import pretrain
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import filled_in
from megatron_moe_tools import compat

if TYPE_CHECKING:
    from megatron_moe.report.sink import Sink
    from megatron_moe.training.callbacks.checks import StepAudit


def main(argv: list[str]) -> int:
    """Run one rank and return the exit status; every rank of a run calls this with the same arguments."""
    return pretrain.main(argv, parse, load_audit, page_sink)


def parse(argv: list[str], world_size: int) -> Run:
    """Return the run of a command line in our flags, Megatron-LM's, or both."""
    return compat.parse(argv, filled_in, world_size)


def load_audit() -> StepAudit:
    """Return the tracer of `--audit-precision`; it is loaded where a run asks for it."""
    from megatron_moe_tools.audit.step import auditing

    return auditing


def page_sink(page: Path, metrics_file: Path, warn: Callable[[str], None]) -> Sink:
    """Return the sink of `--report-file`; it is loaded where a run asks for it."""
    from megatron_moe_tools.report.page import PageSink

    return PageSink(page, metrics_file, warn)
