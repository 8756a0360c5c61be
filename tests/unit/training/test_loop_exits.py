"""When a run stops before its last iteration: one rank's reason is every rank's."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe.checkpoint.state import Progress
from megatron_moe.config.schema import Run, replace
from megatron_moe.training.loop import exit_reason


def job(iteration: int, **flags: Any) -> Any:
    return SimpleNamespace(run=replace(Run(), train_iters=100, **flags), progress=Progress(iteration, 0))


QUIET = SimpleNamespace(stop_signal=0)


def test_an_exit_interval_stops_after_the_iteration_it_divides():
    reasons = [exit_reason(job(iteration, exit_interval=5), QUIET, time.monotonic()) for iteration in (4, 5, 6, 100)]
    assert reasons == [None, "stopped at iteration 5 (--exit-interval 5)", None, None]


def agreed(flags: dict[str, Any], asked: int | None, late: int | None) -> str | None:
    """Rank `asked` got SIGTERM, the clock of rank `late` is two minutes ahead."""
    import torch

    rank = torch.distributed.get_rank()
    stop = SimpleNamespace(stop_signal=int(signal.SIGTERM) if rank == asked else 0)
    return exit_reason(job(7, **flags), stop, time.monotonic() - (120 if rank == late else 0))


@pytest.mark.parametrize(
    ("flags", "asked", "late", "reason"),
    [
        ({"exit_signal_handler": True}, 1, None, "stopped at iteration 7 by SIGTERM"),
        ({"exit_duration_in_mins": 1.0}, None, 1, "stopped at iteration 7 (--exit-duration-in-mins 1)"),
        ({"exit_signal_handler": True, "exit_duration_in_mins": 5.0}, None, 1, None),
    ],
)
def test_what_one_rank_sees_all_ranks_do(gloo, flags, asked, late, reason):
    assert gloo.run(2, agreed, flags=flags, asked=asked, late=late) == [reason, reason]
