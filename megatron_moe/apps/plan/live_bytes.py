"""Bytes of all tensors that are alive, counted storage by storage while operations run.

The same counter watches a real step on real ranks and a step on the meta device, so that a plan and a measurement speak
of one quantity. What a kernel allocates inside itself, and what a communication library keeps, is not seen.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation returns, until it is freed.

    live, peak: bytes now, and the most there were since `restart_peak`.
    label_peaks: the same peak of the storages with one label alone. Storages that are older than the mode are
    counted from when an operation first returns them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.label_peaks: dict[str, int] = defaultdict(int)
        self._label_live: dict[str, int] = defaultdict(int)
        self._label: str | None = None
        self._storages: dict[int, tuple[int, str | None, weakref.ref]] = {}

    def __enter__(self) -> Any:
        """Storages are also resized without any operation: recomputation frees an output that way, and refills it. For
        the time of the count, such calls are noticed too."""
        resize = torch.UntypedStorage.resize_

        def noticed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None:
                self._forget(storage._cdata)
                self._remember(storage, storage.nbytes(), known[1])
            return result

        self._noticing = mock.patch.object(torch.UntypedStorage, "resize_", noticed)
        self._noticing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        self._noticing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = self.run(func, args, dict(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The operation itself; a subclass may do it in another way."""
        return func(*args, **kwargs)

    def label_of(self, tensor: Tensor) -> str | None:
        """The label of a new tensor: that of the `labelled` block; a subclass may know better."""
        return self._label

    def restart_peak(self) -> None:
        """From now on peaks are those of what follows."""
        self.peak = self.live
        self.label_peaks = defaultdict(int, self._label_live)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Storages made in here carry the label."""
        outer, self._label = self._label, label
        try:
            yield
        finally:
            self._label = outer

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        size = storage.nbytes()
        if known is None:
            self._remember(storage, size, self.label_of(tensor))
        elif known[0] != size:  # resized in place
            self._forget(storage._cdata)
            self._remember(storage, size, known[1])

    def _remember(self, storage: torch.UntypedStorage, size: int, label: str | None) -> None:
        key = storage._cdata
        self._storages[key] = (size, label, weakref.ref(storage, lambda _: self._forget(key)))
        self.live += size
        self.peak = max(self.peak, self.live)
        if label is not None:
            self._label_live[label] += size
            self.label_peaks[label] = max(self.label_peaks[label], self._label_live[label])

    def _forget(self, key: int) -> None:
        size, label, _ = self._storages.pop(key, (0, None, None))
        self.live -= size
        if label is not None:
            self._label_live[label] -= size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
