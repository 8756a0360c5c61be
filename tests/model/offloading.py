"""The offload of activations where there is no device: host memory and the device's are then both the CPU's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_moe.config.schema import Run
from megatron_moe.model.activation_offload import ActivationOffload
from megatron_moe.platform import pinned_memory

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")


def offloading(*modules: str, **changes: Any) -> dict[str, Any]:
    """Return the fields that offload some modules, and tensors of any size."""
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": modules,
        "min_offloaded_tensor_size": 1,
        **changes,
    }


@contextmanager
def on_a_cpu(host_memory: Callable[..., torch.Tensor] | None = None) -> Iterator[None]:
    """Let models that are built in this block offload on a CPU too; into memory from another function, if given."""

    def from_run(run: Run) -> ActivationOffload | None:
        training = run.training
        if not training.fine_grained_activation_offloading:
            return None
        return ActivationOffload(training.offload_modules or (), training.min_offloaded_tensor_size)

    memory = pinned_memory.host_memory if host_memory is None else host_memory
    with (
        mock.patch.object(ActivationOffload, "from_run", from_run),
        mock.patch.object(pinned_memory, "host_memory", memory),
    ):
        yield
