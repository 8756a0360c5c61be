"""Where a step's time goes: the engine's timers, reported at log intervals (`--timing-log-level`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_moe.engine.schedules import Timers, configure, configured, get_model_config

# By level, in the order of a step. Every rank asks for the same names, whichever of them its stage has: the times of
# all ranks are gathered in one collective.
_NAMES = {
    1: ("forward-backward", "all-grads-sync", "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce")
    + ("optimizer",),
    2: ("forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv", "backward-send"),
}


def start_timing(model: Sequence[torch.nn.Module], level: int) -> None:
    """Have the engine's schedules time themselves from now on: 1 a step's parts, 2 every micro-batch; 0 not at all.

    Level 1 and above put a barrier before each part, so that waiting for other ranks is not counted as work.
    """
    configure(model, timers=Timers(level, "minmax") if level else None)


@contextlib.contextmanager
def timed(model: Sequence[torch.nn.Module], name: str) -> Iterator[None]:
    """Time the block as one of level 1's parts, where timing is on."""
    timers = get_model_config(model[0]).timers
    if timers is None:
        yield
        return
    timers(name, log_level=1).start()
    yield
    timers(name).stop()


def untimed(model: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Turn the engine's timers off in the block: an evaluation runs the same schedules."""
    return configured(model, timers=None)


def interval_times(
    model: Sequence[torch.nn.Module], level: int, iterations: int
) -> dict[str, tuple[float, float]] | None:
    """Return the least and most seconds of any rank per iteration, by part, since the last call. Collective.

    None where timing is off.
    """
    timers = get_model_config(model[0]).timers
    if timers is None:
        return None
    names: list[str] = []
    for at, group in _NAMES.items():
        if at <= level:
            names += group
    return timers._get_global_min_max_time(names, True, False, float(iterations))
