"""CUDA graphs on a CPU: operations are recorded, undone, and replayed on the very tensors that they were recorded with.

What a captured pass reads from the host, or from memory that is not the same in each pass, is then as wrong as it
would be on a card. Kernels' memory that is used again, streams and speed are not shown.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """A `Graph`, made by name of a pool."""

    def __init__(self, pool: Hashable) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.replays, self.pool = 0, pool
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage] | None] = {}  # None: made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device in a capture"
        kwargs = kwargs or {}
        for argument, given in zip(func._schema.arguments, args):
            self._keep(given if argument.is_write else None)
        self._keep([kwargs[one.name] for one in func._schema.arguments if one.is_write and one.name in kwargs])
        read = {one.untyped_storage().data_ptr() for one in _strided((args, kwargs))}
        result = func(*args, **kwargs)
        made = [one for one in _strided(result) if one.untyped_storage().data_ptr() not in read]
        self._before.update((one.untyped_storage().data_ptr(), None) for one in made)
        self.calls.append((func, args, kwargs, made))
        return result

    def _keep(self, written: Any) -> None:
        for one in _strided(written):
            storage = one.untyped_storage()
            self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    @contextmanager
    def recording(self) -> Iterator[None]:
        random = torch.get_rng_state()
        with self:
            yield
        torch.set_rng_state(random)
        for storage, bits in filter(None, self._before.values()):
            storage.copy_(bits)

    def replay(self) -> None:
        if not self.replays:  # NaN, and indices out of range, for what no operation makes again
            for storage in (one.untyped_storage() for *_, made in self.calls for one in made):
                storage.fill_(0xFF)
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                read = {one.untyped_storage().data_ptr() for one in _strided((args, kwargs))}
                again = [one for one in _strided(func(*args, **kwargs)) if one.untyped_storage().data_ptr() not in read]
                for here, one in zip(made, again, strict=True):
                    here.copy_(one)


def _strided(nest: Any) -> list[torch.Tensor]:
    return [
        one
        for one in tree_leaves(nest)
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and one.untyped_storage().nbytes()
    ]
