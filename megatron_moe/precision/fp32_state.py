"""State of a module that stays fp32 when the module is cast or moved.

`torch.nn.Module.half()`, `.bfloat16()`, `.double()`, `.to(dtype)`, `.type(dtype)` and every wrapper built on them go
through `Module._apply(fn)`. A module that mixes in `Fp32State` shows `fn` the int32 bits of its declared state instead
of the floats. A cast of floating-point tensors skips integers, and a move (`.cuda()`, `.to(device)`, `to_empty`,
`share_memory`) moves them with their bits: nothing has to be restored, because nothing is cast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_moe.engine.modules import moved_with_its_bits


class PrecisionWarning(UserWarning):
    """A warning that state which must be fp32 is loaded from another dtype, in which it has lost bits."""


class Fp32State:
    """A mixin for `torch.nn.Module` whose buffers named in `fp32_state` are float32 and keep their bits.

    It goes before `torch.nn.Module` among the bases. `fp32_conversions` lists the tensors that `load_state_dict`
    converted, as (tensor name, dtype found), so that a run can record them.
    """

    fp32_state: tuple[str, ...] = ()
    fp32_conversions: tuple[tuple[str, torch.dtype], ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        buffers: dict[str, Tensor | None] = self._buffers  # type: ignore[attr-defined]
        kept = {name: buffers.pop(name) for name in self.fp32_state if buffers.get(name) is not None}
        order = list(buffers)
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, tensor in kept.items():
            assert tensor is not None
            buffers[name] = moved_with_its_bits(tensor, fn)
        for name in order:  # the protected buffers go back in front, where they were registered
            buffers[name] = buffers.pop(name)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Convert narrower tensors before they are loaded: with `assign=True` they would replace the buffer.

        `load_state_dict` has made the dictionary, the caller's stays as it was.
        """
        for name in self.fp32_state:
            found = state_dict.get(prefix + name)
            if isinstance(found, Tensor) and found.dtype != torch.float32:
                warnings.warn(
                    f"{prefix + name} is {found.dtype} in the state being loaded but must be float32: its value was "
                    "rounded before it came here. It is loaded as it is and kept in float32 from now on.",
                    PrecisionWarning,
                    stacklevel=2,
                )
                self.fp32_conversions = (*self.fp32_conversions, (prefix + name, found.dtype))
                state_dict[prefix + name] = found.to(torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]
