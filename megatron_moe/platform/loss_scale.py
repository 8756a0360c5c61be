"""Resets the engine's scale of auxiliary losses, a class attribute that outlives models and process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_loss_scale() -> Iterator[None]:
    """Run the block as if no step had set a scale yet, and restore the scale afterwards."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
