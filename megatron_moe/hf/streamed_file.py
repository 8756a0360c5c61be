"""Writes a .safetensors file tensor by tensor, in any order, without keeping the tensors in memory. Loads no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_moe.hf.safetensors_file import CODES, LENGTH, Stored, bytes_of
from megatron_moe.io.hashing import SideHasher

_MOST_WRITTEN = 1 << 30
"""Bytes per call of the system, which takes no more than 2 GiB."""


class StreamedFile:
    """A new .safetensors file that is written tensor by tensor, in any order.

    It is a context manager: the file is complete and on the disk when the block ends, and removed when it ends in an
    error.

    Args:
        path: the file, which must not exist yet.
        layout: every tensor's dtype (torch's name) and shape. The bytes are in this order, unless a tensor would be
            misaligned: then the wider dtypes come first.
        metadata: strings; transformers wants {"format": "pt"}.
    """

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        header, self.layout = _header(path.name, layout, {"format": "pt"} if metadata is None else metadata)
        self.bytes = max((stored.end for stored in self.layout.values()), default=len(header))
        self.digests: dict[str, str] = {}
        self._hasher = SideHasher()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.truncate(self._descriptor, self.bytes)
            self._put(memoryview(header), 0)
        except BaseException:
            self._give_up()
            raise

    def write(self, name: str, data: Any) -> str:
        """Write one tensor's bytes, from any object with the buffer protocol, and return their SHA-256.

        Raises:
            ValueError: the file has no such tensor, it is written already, or it has another size.
            OSError: writing failed.
        """
        view = memoryview(data).cast("B")
        stored = self.layout.get(name)
        if stored is None or name in self.digests or len(view) != stored.end - stored.begin:
            known = "not in the file" if stored is None else "written already" if name in self.digests else None
            raise ValueError(f"{self.path}: {name} is {known or f'{len(view)} bytes, not those of {stored}'}")
        digest = hashlib.sha256()
        self._hasher.write(view, digest, lambda piece: self._put(piece, stored.begin))
        self.digests[name] = digest.hexdigest()
        return self.digests[name]

    def close(self) -> None:
        """Bring the file to disk; on an error, remove it.

        Raises:
            ValueError: a tensor was not written.
            OSError: writing failed.
        """
        missing = [name for name in self.layout if name not in self.digests]
        try:
            if missing:
                raise ValueError(f"{self.path}: {len(missing)} tensors were not written: {', '.join(missing[:5])}")
            os.fsync(self._descriptor)
        except BaseException:
            self._give_up()
            raise
        self._release()

    def _put(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwrite(self._descriptor, view[:_MOST_WRITTEN], offset)
            view, offset = view[count:], offset + count

    def _release(self) -> None:
        self._hasher.close()
        os.close(self._descriptor)

    def _give_up(self) -> None:
        self._release()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()


def _header(
    file: str, layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Stored]]:
    """Return the bytes before the numbers, and the location of each tensor."""
    order = list(layout.items())
    at, aligned = 0, True
    for _, (dtype, shape) in order:
        aligned = aligned and at % CODES[dtype][1] == 0
        at += bytes_of(dtype, shape)
    if not aligned:
        order.sort(key=lambda item: -CODES[item[1][0]][1])
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in order:
        places[name] = (at, at + bytes_of(dtype, shape))
        at = places[name][1]
        content[name] = {"dtype": CODES[dtype][0], "shape": list(shape), "data_offsets": list(places[name])}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH.size + len(text)
    stored = {name: Stored(file, *layout[name], start + begin, start + end) for name, (begin, end) in places.items()}
    return LENGTH.pack(len(text)) + text, stored
