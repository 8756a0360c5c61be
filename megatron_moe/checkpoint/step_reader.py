"""Reading the tensors and values of a step, without a model or a process group.

Pickles are read under restriction, before the engine opens them. Any box of any tensor is read, whatever parts it was
saved in.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_moe.checkpoint import index, manifest
from megatron_moe.checkpoint.index import StepIndex, StoredBytes, TensorPart, UntrustedError
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.hashing import FileEntry
from megatron_moe.io.object_storage import ObjectPath

AVERAGE = "optimizer.state.ema."
"""The key of the average of a weight is this and the weight's key; see `sharded.py`."""
COMMON = "common.pt"
SMALL_PART = 2**20
"""Up to how many bytes a part of a tensor is read from an object store as a whole."""
SMALL_READ = 8192
"""What is read at once of the small records of an archive, in bytes."""
LARGEST = 2 * 2**30
"""The largest file of plain values that is read, in bytes."""


def check(step: Path, files: Mapping[str, FileEntry]) -> StepIndex:
    """Read whatever the engine reads without restriction: the index, the values it lists, the common file.

    Tensors are not read here: torch reads them under restriction itself.

    Raises:
        UntrustedError: naming the file and what it holds.
    """
    content = index.read(step, files)
    for key, place in content.values.items():
        read_value(step, key, place)
    if COMMON in files:
        read_file(step, COMMON)
    return content


def read_file(step: Path, name: str) -> Any:
    """Return the tensors and plain values of a file that torch.save wrote, on the CPU.

    Raises:
        UntrustedError: it holds anything else, cannot be read, or is too large.
    """
    with (step / name).open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UntrustedError(f"{name} has more than {LARGEST} bytes")
    return _loaded(data, name)


def read_value(step: Path, key: str, place: StoredBytes) -> Any:
    """Return a value of a data file: tensors and plain values, on the CPU.

    Raises:
        UntrustedError: it holds anything else, or cannot be read.
    """
    with (step / place.file).open("rb", buffering=SMALL_READ) as file:
        file.seek(place.offset)
        return _loaded(file.read(place.length), f"{key} in {place.file}")


def _loaded(data: bytes, where: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a pickle or an archive made for it can raise
        raise UntrustedError(f"{where} is damaged or harmful: {words(error)}") from None


def words(error: BaseException) -> str:
    """Return torch's reason for refusing a file, without its advice on how to read it all the same."""
    lines = str(error).splitlines() or [""]
    wanted = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    kind = "" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: "
    return f"{kind}{(wanted or lines)[0].strip()[:200]}"


PER_PART = 2048
"""An upper bound of the bytes that torch's archive adds to a tensor in a data file, for estimates."""


def by_itself(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the same memory, but not as a view of a larger one.

    An archive holds all of the memory that a tensor is a view of, and torch's writer would copy such a tensor first.
    """
    value = value.detach()
    if value.is_cuda or not value.numel() or value.untyped_storage().nbytes() == value.nbytes:
        return value
    content = value.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(value.dtype).view(value.shape)


# Any box of any tensor


class _Layout(NamedTuple):
    """Where a part's storage begins in its file, and the tensor's layout in it."""

    first_byte: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    storage_offset: int


class StepReader:
    """A reader of the tensors of one step.

    Args:
        step: the folder.
        index: the index, if it is read and checked already; a step of ours has a manifest to check it against.

    Attributes:
        index: shapes, dtypes and parts of all tensors, checked against the manifest.

    Raises:
        ConfigError: the index or the manifest is damaged or harmful, or cannot be read.
    """

    def __init__(self, step: Path, index: StepIndex | None = None) -> None:
        self.step = step
        try:
            self.index: StepIndex = check(step, manifest.read(step).files) if index is None else index
        except (UntrustedError, manifest.ManifestError, OSError) as error:
            raise ConfigError(f"{step}: refused: {error}") from error
        self._layouts: dict[StoredBytes, _Layout] = {}
        self._small: tuple[StoredBytes | None, Tensor] = None, torch.empty(0)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        dtype: torch.dtype = getattr(torch, self.index.tensors[key].dtype)
        return dtype

    def read(
        self,
        key: str,
        start: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Return a box of a tensor in memory of its own; by default all of it.

        Args:
            into: contiguous host memory of the box's shape and the stored dtype, which is filled and returned instead.

        Raises:
            ConfigError: a part is not what the index says, or cannot be read.
        """
        whole = self.index.tensors[key]
        start = (0,) * len(whole.shape) if start is None else start
        shape = whole.shape if shape is None else shape
        result, filled = into, 0
        for part in whole.parts:
            low = [max(a, b) for a, b in zip(start, part.start)]
            high = [min(a + m, b + n) for a, m, b, n in zip(start, shape, part.start, part.shape)]
            if not all(a < b for a, b in zip(low, high)):
                continue
            box = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, part.start))
            extent = tuple(b - a for a, b in zip(low, high))
            if result is None and extent != tuple(shape):
                result = torch.empty(shape, dtype=self.dtype(key))
            target = None
            if result is not None:
                target = result[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))]
            try:
                content = self._box(key, part, box, target)
            except (UntrustedError, OSError) as error:
                raise ConfigError(f"{self.step}: refused: {error}") from error
            filled += content.numel()
            result = content if result is None else result
        if filled != math.prod(shape):
            raise ConfigError(f"{self.step}: {key} holds {filled} of the {math.prod(shape)} elements from {start} on")
        return torch.empty(shape, dtype=self.dtype(key)) if result is None else result

    def _box(self, key: str, part: TensorPart, box: tuple[slice, ...], target: Tensor | None) -> Tensor:
        """Return a box of a part, in `target` if there is one.

        What lies between the box's first and its last element is read, and no more.
        """
        if part.place not in self._layouts:
            self._layouts[part.place] = self._layout(key, part)
        layout = self._layouts[part.place]
        extent = [along.stop - along.start for along in box]
        first = layout.storage_offset + sum(along.start * n for along, n in zip(box, layout.stride))
        count = 1 + sum((length - 1) * n for length, n in zip(extent, layout.stride))
        size = layout.dtype.itemsize
        first_byte = layout.first_byte + first * size
        if target is not None and target.is_contiguous() and _in_order(extent, layout.stride):
            self._bytes(part.place, first_byte, target.view(-1).view(torch.uint8))
            return target
        span = self._bytes(part.place, first_byte, torch.empty(count * size, dtype=torch.uint8)).view(layout.dtype)
        content = span.as_strided(extent, layout.stride)
        return content if target is None else target.copy_(content)

    def _layout(self, key: str, part: TensorPart) -> _Layout:
        """Return the layout of a part from its archive's small records; the elements are not read."""
        place = part.place
        with (self.step / place.file).open("rb", buffering=0) as file:
            archive: Any = io.BufferedReader(Section(file, place), SMALL_READ)
            if isinstance(self.step, ObjectPath) and place.length <= SMALL_PART:  # one request for it all
                whole = self._bytes(place, place.offset, torch.empty(place.length, dtype=torch.uint8))
                archive, self._small = io.BytesIO(memoryview(whole.numpy())), (place, whole)
            try:
                value = torch.load(archive, map_location="meta", weights_only=True)
            except Exception as error:  # whatever an archive made for it can raise
                raise UntrustedError(f"{key} in {place.file} is damaged or harmful: {words(error)}") from None
        fits = isinstance(value, Tensor) and value.dtype == self.dtype(key) and tuple(value.shape) == part.shape
        if not fits:
            wanted = f"{self.index.tensors[key].dtype} {list(part.shape)}"
            raise UntrustedError(f"{key} in {place.file} is not the {wanted} of the index")
        storage = value.untyped_storage()
        first: Any = getattr(storage, "_checkpoint_offset", None)
        if type(first) is not int or first < 0 or first + storage.nbytes() > place.length:
            raise UntrustedError(f"{key} in {place.file}: its numbers do not lie in its {place.length} bytes")
        # Not the tensor: it has memory for its elements, although they were not read.
        return _Layout(
            place.offset + first,
            value.dtype,
            tuple(value.stride()),
            int(value.storage_offset()),
        )

    def _bytes(self, place: StoredBytes, first: int, content: Tensor) -> Tensor:
        """Fill bytes of host memory with those of a file from `first` on, and return them."""
        count, (small, whole) = content.numel(), self._small
        if small == place:
            return content.copy_(whole[first - place.offset :][:count])
        with (self.step / place.file).open("rb", buffering=0) as file:
            file.seek(first)
            view, done = memoryview(content.numpy()), 0
            while done < count:
                got = cast(Any, file).readinto(view[done:])
                if not got:
                    raise UntrustedError(f"{place.file} ends {count - done} bytes early")
                done += got
        return content


def _in_order(extent: list[int], stride: tuple[int, ...]) -> bool:
    """Return whether elements of these strides lie one behind the other, as in a contiguous tensor."""
    expected = 1
    for length, along in zip(reversed(extent), reversed(stride)):
        if length > 1 and along != expected:
            return False
        expected *= length
    return True


class Section(io.RawIOBase):
    """One value of a data file, readable as a file of its own."""

    def __init__(self, file: Any, place: StoredBytes) -> None:
        self._file, self._place, self._position = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._place.length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._place.length - self._position)
        self._file.seek(self._place.offset + self._position)
        count = self._file.readinto(memoryview(buffer)[:left])
        self._position += count
        return count
