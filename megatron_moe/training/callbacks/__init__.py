"""The callbacks of every run, in the order in which the loop calls them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moe.training.callback import Callback
from megatron_moe.training.callbacks.checkpointing import Checkpointing
from megatron_moe.training.callbacks.evaluation import Evaluation
from megatron_moe.training.callbacks.garbage import GarbageCollection
from megatron_moe.training.callbacks.non_finite import NonFinite
from megatron_moe.training.callbacks.own import OwnCallbacks
from megatron_moe.training.callbacks.precision import PrecisionAudit, PrecisionCheck, StepAudit
from megatron_moe.training.callbacks.profiler import Profiler
from megatron_moe.training.callbacks.replicas import Replicas
from megatron_moe.training.callbacks.reporting import Reporting
from megatron_moe.training.callbacks.spikes import Spikes
from megatron_moe.training.callbacks.stopping import Stopping
from megatron_moe.training.signals import StopSignals


def callbacks_of(stop: StopSignals, audit: StepAudit | None, own: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run.

    Args:
        stop: the signals that this process got.
        audit: see `PrecisionAudit`.
        own: a program's own callbacks. They act before the run decides whether it stops, and before it saves.
    """
    return [
        Profiler(),
        Reporting(),
        NonFinite(),
        Spikes(),
        Replicas(),
        PrecisionAudit(audit),
        GarbageCollection(),
        OwnCallbacks(own),
        PrecisionCheck(),
        Stopping(stop),
        Checkpointing(),
        Evaluation(stop),
    ]
