"""A module's weights in fp32 for a while: the same values, other tensors, and the very same parameters afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

_NARROW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def fp32_weights(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put fp32 copies in the place of all bf16 and fp16 parameters, and the originals back, also after an exception.

    The originals are not touched: assigning to `Parameter.data` with another dtype would make autograd forget who
    accumulates its gradient, and data-parallel hooks would be lost without a word. A weight that several modules share
    is copied once. Costs 4 bytes per narrow parameter while it lasts.

    Args:
        modules: parts of a model; all modules within are searched.
    """
    copies: dict[int, torch.nn.Parameter] = {}
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for module in modules:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is None or parameter.dtype not in _NARROW:
                        continue
                    if id(parameter) not in copies:
                        wide = parameter.detach().float()
                        copies[id(parameter)] = torch.nn.Parameter(wide, requires_grad=parameter.requires_grad)
                    replaced.append((part, name, parameter))
                    part._parameters[name] = copies[id(parameter)]
        yield
    finally:
        for part, name, parameter in reversed(replaced):
            part._parameters[name] = parameter
