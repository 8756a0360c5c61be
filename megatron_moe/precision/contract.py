"""Verification that declared fp32 state is fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_moe.precision.fp32_state import Fp32State
from megatron_moe.precision.islands import declared_fp32_parameters


class PrecisionError(RuntimeError):
    """A tensor breaks the precision contract; the message names it, its dtype and what it should be."""


def declared_fp32_state(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that some submodule declares as fp32 state or that lies in an island, with its qualified name."""
    for path, submodule in module.named_modules():
        if isinstance(submodule, Fp32State):
            for name in submodule.fp32_state:
                tensor = getattr(submodule, name)
                if tensor is not None:
                    yield (f"{path}.{name}" if path else name), tensor
    yield from declared_fp32_parameters(module)


def verify_fp32_state(module: torch.nn.Module, boundary: str) -> int:
    """Check all declared fp32 state of `module`.

    Args:
        module: any module; its submodules are searched.
        boundary: where the check is made, for the message ("wrapping in Float16Module").

    Returns:
        How many tensors were checked.

    Raises:
        PrecisionError: naming every tensor that is not float32.
    """
    checked = list(declared_fp32_state(module))
    broken = [f"{name} is {tensor.dtype}" for name, tensor in checked if tensor.dtype != torch.float32]
    if broken:
        raise PrecisionError(f"after {boundary}, state that must be torch.float32 is not: {'; '.join(broken)}")
    return len(checked)
