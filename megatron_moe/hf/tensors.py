"""Reads the tensors of a Hugging Face folder one at a time, and writes tensors into a .safetensors file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.folder import MXFP4, MXFP4_BLOCK, HFFolder
from megatron_moe.hf.safetensors_file import StreamedFile, identity_of, shortened

_CHUNK = 1 << 24
"""Bytes that are read, and hashed while the next ones are read."""
_MOST_OPEN = 32

_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte. On a CPU, a look-up takes a seventh of the time of torch's conversion."""
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of e2m1 by their codes; the fourth bit is the sign. A byte has a code in its lower bits, then one in
the upper ones. A scale is a power of two, its exponent plus 127."""


class TensorReader:
    """A reader of a folder's tensors by name. Weights in fp8 and MXFP4 are dequantised; scales have no names here.

    Files are read, not mapped: the memory in use is that of the returned tensors. A reader is not thread-safe. It is a
    context manager; `close` ends it.
    """

    def __init__(self, folder: HFFolder) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self._hashing: ThreadPoolExecutor | None = None

    def names(self) -> list[str]:
        """Return the names of all tensors except scales, in the order of files and bytes."""
        return list(self.folder.shapes())

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the stored tensors that one is made of: itself and, where it has them, its blocks' scales."""
        scale = self.folder.scales.get(name)
        return (name,) if scale is None else (name, scale)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor as `read` returns it: bfloat16 for weights in fp8 and MXFP4."""
        if name in self.folder.scales:
            return torch.bfloat16
        stored: torch.dtype = getattr(torch, self.folder.tensors[name].dtype)
        return stored

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor into memory of its own.

        Args:
            dtype: dtype in which a weight in fp8 is returned, bfloat16 where None. Value times scale is computed in
                fp32 and rounded once: to bfloat16 to nearest even, to float32 not at all. Other tensors keep theirs.
                One in MXFP4 is exact in both.

        Raises:
            ConfigError: the file was truncated or changed since the folder was opened, or a scale is not valid.
        """
        return self._tensor(name, dtype, None)

    def read_hashed(self, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, str]]:
        """Read a tensor as `read` does, and return the SHA-256 of each stored tensor that it is made of, too."""
        digests: dict[str, str] = {}
        return self._tensor(name, dtype, digests), digests

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a stored tensor's bytes; `name` may be that of scales."""
        digests: dict[str, str] = {}
        self._stored(name, digests)
        return digests[name]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        if self._hashing is not None:
            self._hashing.shutdown()
            self._hashing = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str, digests: dict[str, str] | None) -> Tensor:
        """Return a tensor as it is stored, and put its hash into `digests`."""
        stored = self.folder.tensors[name]
        raw = torch.empty(stored.end - stored.begin, dtype=torch.uint8)
        view = memoryview(raw.numpy())
        digest = None if digests is None else hashlib.sha256()
        descriptor = self._descriptor(stored.file)
        waiting: list[Any] = []
        path, done = self.folder.path / stored.file, 0
        try:
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                while done < start + len(chunk):
                    count = os.preadv(descriptor, [chunk[done - start :]], stored.begin + done)
                    if count == 0:
                        raise ConfigError(
                            f"{path} ends within tensor {shortened(name)}: it was truncated since it was opened"
                        )
                    done += count
                if digest is None:
                    continue
                if len(view) <= _CHUNK:
                    digest.update(chunk)
                else:
                    self._hashing = self._hashing or ThreadPoolExecutor(1, thread_name_prefix="sha256")
                    waiting.append(self._hashing.submit(digest.update, chunk))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        finally:
            for task in waiting:
                task.result()
        self._check_unchanged(descriptor, stored.file)
        if digest is not None and digests is not None:
            digests[name] = digest.hexdigest()
        return raw if stored.dtype == MXFP4 else raw.view(getattr(torch, stored.dtype)).reshape(stored.shape)

    def _descriptor(self, file: str) -> int:
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            path = self.folder.path / file
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read any more: {error.strerror or error}") from error
        self._open[file] = descriptor  # the one used last is the last
        self._check_unchanged(descriptor, file)
        if len(self._open) > _MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        return descriptor

    def _check_unchanged(self, descriptor: int, file: str) -> None:
        if identity_of(os.fstat(descriptor)) != self.folder.identities[file]:
            raise ConfigError(
                f"{self.folder.path / file} changed since it was opened; nothing else may write to the folder"
            )

    def _tensor(self, name: str, dtype: torch.dtype | None, digests: dict[str, str] | None) -> Tensor:
        """Return a tensor as it is stored; one in fp8 or MXFP4 as each value times the scale of its block."""
        if name not in self.folder.scales:
            return self._stored(name, digests)
        rows, columns = self.folder.block
        scale_name = self.folder.scales[name]
        stored_scales = self._stored(scale_name, digests)
        where = f"{self.folder.path / self.folder.tensors[scale_name].file}: tensor {shortened(scale_name)}"
        if self.folder.tensors[name].dtype == MXFP4:
            if bool((stored_scales == 255).any()):
                raise ConfigError(f"{where} holds 255, which is no number")
            return _unpacked(self._stored(name, digests), stored_scales, dtype or torch.bfloat16)
        scales = stored_scales.float()
        wrong = scales[~(torch.isfinite(scales) & (scales >= 0))]
        if len(wrong):
            raise ConfigError(f"{where} holds {float(wrong[0])}; scales are positive finite numbers")
        codes = self._stored(name, digests).view(torch.uint8)
        result = torch.empty(codes.shape, dtype=dtype or torch.bfloat16)
        for number, row in enumerate(scales):  # a row of blocks at a time: no copy of the whole in fp32
            here = slice(number * rows, (number + 1) * rows)
            wide = _FP8_VALUES.index_select(0, codes[here].reshape(-1).int()).reshape(-1, codes.shape[1])
            factors = row.repeat_interleave(columns)[: codes.shape[1]]
            if not bool(row.all()) and bool(wide[:, factors == 0].any()):
                raise ConfigError(f"{where} holds 0 for a block with other numbers than 0; scales are positive")
            result[here] = wide * factors
        return result


def _unpacked(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [E, K, N] of the bytes of codes, E x N x K / 2, and scales [E, N, K / 32] uint8."""
    experts, rows, groups = scales.shape
    signed, result = torch.cat((FP4_VALUES, -FP4_VALUES)), torch.empty(experts, groups * MXFP4_BLOCK, rows, dtype=dtype)
    for expert, own in enumerate(codes.view(experts, rows, groups, MXFP4_BLOCK // 2)):  # in fp32 one by one
        values = signed[torch.stack((own & 15, own >> 4), dim=-1).int()].flatten(-2)
        values = torch.ldexp(values, scales[expert].int().unsqueeze(-1) - 127)
        result[expert] = values.flatten(-2).t()
    return result


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the layout that `StreamedFile` needs for these tensors, which may be on the meta device."""
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `TensorLocation` and in layouts."""
    return str(dtype).removeprefix("torch.")


def write_tensor(file: StreamedFile, name: str, tensor: Tensor) -> str:
    """Write a tensor into a file and return the SHA-256 of its bytes.

    Raises:
        ValueError: the file's layout has no such tensor, another dtype or another shape.
        OSError: writing failed.
    """
    stored = file.layout.get(name)
    if stored is not None and (stored.dtype, stored.shape) != (dtype_name(tensor.dtype), tuple(tensor.shape)):
        raise ValueError(
            f"{file.path}: {name} is {tensor.dtype} {list(tensor.shape)}, not {stored.dtype} {stored.shape}"
        )
    return file.write(name, to_bytes(tensor))


def to_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as in a file, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes as in a file."""
    return hashlib.sha256(to_bytes(tensor)).hexdigest()
