"""Counts the in-place additions in bf16 and fp16 that rounding swallowed: the result is what was there before.

bf16 keeps 8 bits: adding less than 1/512 of what an element holds changes nothing, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The exponent's bits; all set in an infinity and in what is no number, which keep their value for another reason."""
_MAGNITUDE = 0x7FFF
_ONE = torch.ops.aten.add_.Tensor
_MANY = torch.ops.aten._foreach_add_.List


class LostUpdates(TorchDispatchMode):
    """Watches every in-place addition of a tensor to a bf16 or fp16 tensor while it is entered; changes none.

    An element counts as an addition where something other than zero was added, and as swallowed where it kept its
    value all the same. Additions into the gradient buffers, which add up micro-batches, are told from all others, such
    as autograd's sums where a tensor was used twice. Scalars are left out: sums of losses are not accumulators of
    this kind. Sums within a kernel or a collective are not seen: they are no operation of torch's.

    Args:
        gradient_buffers: tensors whose storage holds the gradients.
    """

    def __init__(self, gradient_buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._gradients = {buffer.untyped_storage().data_ptr() for buffer in gradient_buffers}
        self._seen: dict[tuple[bool, torch.device], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and compare before and after where it is one of those watched."""
        kwargs = kwargs or {}
        if func is _ONE:
            pairs = [(args[0], args[1])]
        elif func is _MANY:
            pairs = list(zip(args[0], args[1]))
        else:
            return func(*args, **kwargs)
        watched = [(to, added) for to, added in pairs if to.dtype in _EXPONENT and to.dim() and kwargs.get("alpha", 1)]
        before = [to.clone() for to, _ in watched]
        result = func(*args, **kwargs)
        for (to, added), old in zip(watched, before):
            self._count(to, added, old)
        return result

    def _count(self, to: Tensor, added: Tensor | float, before: Tensor) -> None:
        # Integers: comparisons of half-precision numbers are several times as slow on a CPU.
        bits, exponent = to.view(torch.int16), _EXPONENT[to.dtype]
        kept = (bits == before.view(torch.int16)) & ((bits & exponent) != exponent)
        if isinstance(added, Tensor) and added.dtype in _EXPONENT:
            something = ((added.view(torch.int16) & _MAGNITUDE) != 0).expand_as(to)
        else:
            something = (torch.as_tensor(added, device=to.device) != 0).expand_as(to)
        numbers = torch.stack([torch.count_nonzero(something), torch.count_nonzero(something & kept)])
        key = (to.untyped_storage().data_ptr() in self._gradients, to.device)
        self._seen[key] = self._seen[key] + numbers if key in self._seen else numbers

    def counted(self, *, gradients: bool) -> tuple[int, int]:
        """(additions, swallowed ones) so far on this rank: into the gradient buffers, or all others."""
        found = [numbers.tolist() for (kind, _), numbers in self._seen.items() if kind == gradients]
        return sum(number for number, _ in found), sum(lost for _, lost in found)
