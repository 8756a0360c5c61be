"""The optimizer's plain values in a checkpoint, and its packed state unpacked; `sharded.py` has its tensors.

The plain values are, of each of the engine's optimizers, {"optimizer": {"param_groups": [...]}, "grad_scaler": {...}}.
The step count and the loss scale are read; which parameters form a group, its learning rate and decay, betas and
epsilon are settings, not state: those of the present run are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_moe.config.schema import Run
from megatron_moe.engine.optimizer import parts
from megatron_moe.platform.protocols import EngineOptimizer


def plain_values(optimizer: EngineOptimizer) -> dict[Any, Any]:
    """Return the values that are no tensors: of one optimizer, or of several by their numbers."""
    states = []
    for part in parts(optimizer):
        groups = [] if part.is_stub_optimizer else part.optimizer.param_groups
        groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if getattr(part, "grad_scaler", None) is not None:
            state["grad_scaler"] = part.grad_scaler.state_dict()
        states.append(state)
    return states[0] if len(states) == 1 else dict(enumerate(states))


def put_plain_values(optimizer: EngineOptimizer, saved: dict[Any, Any]) -> None:
    """Take over the step count, which is that of all parameters, and the loss scale."""
    states = [saved] if "optimizer" in saved else list(saved.values())
    step = max((int(group.get("step", 0)) for state in states for group in _groups(state)), default=0)
    scales = [state["grad_scaler"] for state in states if "grad_scaler" in state]
    for part in parts(optimizer):
        for group in () if part.is_stub_optimizer else part.optimizer.param_groups:
            group["step"] = step
        if getattr(part, "grad_scaler", None) is not None and scales:
            part.grad_scaler.load_state_dict(scales[0])


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state["optimizer"].get("param_groups", [])


def has_main_weights(part: EngineOptimizer) -> bool:
    """Return whether the run's weights have fp32 copies that the optimizer updates."""
    return part.config.bf16 or part.config.fp16


@contextmanager
def unpacked(optimizer: EngineOptimizer, *, keep: bool) -> Iterator[None]:
    """Put fp32 tensors in the place of state that is packed (`optim/adam.py`).

    Args:
        keep: pack what is there at the end of the block; otherwise the tensors are in host memory, and stay as they are
            where something refers to them.
    """
    with ExitStack() as stack:
        for part in parts(optimizer):
            if hasattr(part.optimizer, "unpacked"):
                stack.enter_context(part.optimizer.unpacked(keep=keep))
        yield


@torch.no_grad()
def gather_packed_weights(model: Sequence[Any], optimizer: EngineOptimizer, run: Run) -> None:
    """Give all ranks the weights that packing has made of main weights, on each rank those of its shard. Collective."""
    if run.derived.packs_main_weights and any(part.config.use_distributed_optimizer for part in parts(optimizer)):
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
