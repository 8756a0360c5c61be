"""CUDA graphs on a CPU: operations are recorded, undone, and replayed on the very tensors that they were recorded with.

What a captured pass reads from the host, or from memory that is not the same in each pass, is then as wrong as it
would be on a card. Memory that is used again, streams and speed are not shown.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_moe.engine.patching import replaced


class RecordedGraph(TorchDispatchMode):
    """A graph, made by the name of a pool."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.replays, self.pool = 0, pool
        self.freed: list[torch.UntypedStorage] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage] | None] = {}  # None: made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device in a capture"
        given = {**dict(zip((one.name for one in func._schema.arguments), args)), **(kwargs or {})}
        written = [given[one.name] for one in func._schema.arguments if one.is_write and one.name in given]
        for storage in storages(written):
            self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result, made = made_by(func, args, kwargs or {})
        self._before.update((storage.data_ptr(), None) for storage in storages(made))
        self.calls.append((func, args, kwargs or {}, made))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        random = torch.get_rng_state()
        of_storages = {name: self._recorded(getattr(torch.UntypedStorage, name)) for name in ("resize_", "copy_")}
        with replaced([torch], get_rng_state=_not_in_a_capture, set_rng_state=_not_in_a_capture):
            with self, replaced([torch.UntypedStorage], **of_storages):
                yield
        torch.set_rng_state(random)
        for storage, bits in filter(None, self._before.values()):
            storage.copy_(bits)

    def _recorded(self, change: Any) -> Any:
        def changed(storage: torch.UntypedStorage, given: Any) -> Any:  # recomputation frees one, and fills it again
            self.calls.append((change, (storage, given), {}, []))
            if given == 0:
                self.freed.append(storage)
            with _disable_current_modes():
                return change(storage, given)

        return changed

    def replay(self) -> None:
        if not self.replays:  # NaN, and indices out of range, for what no operation makes again
            for storage in storages([made for *_, made in self.calls]):
                storage.fill_(0xFF)
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                for here, again in zip(made, made_by(func, args, kwargs)[1], strict=True):
                    if not here.untyped_storage().nbytes():
                        here.untyped_storage().resize_(again.untyped_storage().nbytes())
                    here.copy_(again)


def _not_in_a_capture(*_: Any) -> Any:
    raise AssertionError("the state of the random numbers is asked for in a capture")


class RecordedGraphs(list[RecordedGraph]):
    """Graphs in the order of their capture: what stands for `TorchGraphs`."""

    def __call__(self, pool: Any) -> RecordedGraph:
        self.append(RecordedGraph(pool))
        return self[-1]


def strided(nest: Any) -> list[torch.Tensor]:
    tensors = [one for one in tree_leaves(nest) if isinstance(one, torch.Tensor) and one.layout == torch.strided]
    return [one for one in tensors if one.untyped_storage().nbytes()]


def storages(nest: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in strided(nest)]


def made_by(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """The result of an operation, and what of it is in memory of its own."""
    read = {storage.data_ptr() for storage in storages((args, kwargs))}
    result = func(*args, **kwargs)
    return result, [one for one in strided(result) if one.untyped_storage().data_ptr() not in read]
