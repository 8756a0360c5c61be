"""Count the bytes of all live tensors, storage by storage, while operations run.

The same counter observes a real step on real ranks and a step on the meta device, so that a plan and a measurement
mean the same quantity. What a kernel allocates inside itself, and what a communication library keeps, is not counted.
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
    """A dispatch mode that counts every storage that an operation returns, until the storage is freed.

    Storages that are older than the mode are counted from when an operation first returns them.

    Attributes:
        live: bytes now.
        peak: largest `live` since `restart_peak`.
        label_peaks: the same peak of the storages with one label.
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
        """Start counting; storages that are resized without an operation are counted too.

        Recomputation frees and refills an output by `UntypedStorage.resize_`, which no dispatch mode sees.
        """
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None:
                self._forget(storage._cdata)
                self._remember(storage, storage.nbytes(), known[1])
            return result

        self._patched_resize = mock.patch.object(torch.UntypedStorage, "resize_", counted_resize)
        self._patched_resize.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        self._patched_resize.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = self.run(func, args, dict(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the operation; a subclass may do it in another way."""
        return func(*args, **kwargs)

    def label_of(self, tensor: Tensor) -> str | None:
        """Return the label of a new tensor: that of the `labelled` block, unless a subclass decides otherwise."""
        return self._label

    def restart_peak(self) -> None:
        """Forget earlier peaks: from now on peaks are those of what follows."""
        self.peak = self.live
        self.label_peaks = defaultdict(int, self._label_live)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label the storages that are made in this context."""
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
    """Return the bytes of the distinct storages of some tensors."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
