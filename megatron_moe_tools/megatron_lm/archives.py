"""Reads what Megatron-LM pickled without running any of it: command-line arguments, enumerations, random states.

torch reads tensors and plain values under restriction. Megatron-LM's files hold more: `args` is a Namespace with
members of the engine's enumerations, and random states are arrays of numpy's. The classes that such a file names are
listed before it is read. Each of a known package is read as a record that runs nothing, and is imported nowhere; a file
that names anything else is refused.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint import pickles
from megatron_moe.checkpoint.index import UntrustedError

_NAMESPACE = "argparse.Namespace"
_PACKAGES = frozenset(
    "megatron transformer_engine modelopt torch numpy argparse collections enum pathlib signal datetime functools "
    "_io _codecs".split()
)
"""Packages whose classes and functions are read as records."""
_PLAIN = frozenset(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "slice", "complex"))


class Record:
    """What a file says of an object of a class that is not imported: how it was made, and its state.

    Attributes:
        arguments: the values that it was made of, for a member of an enumeration its value.
        state: what was restored into it.
    """

    def __new__(cls, *arguments: Any) -> Record:
        """Make a record of an object, whatever its class would have done."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.arguments}"


def read_file(path: Path) -> Any:
    """Return what a file of torch.save holds; tensors stay in the file until they are used.

    Raises:
        UntrustedError: the file is damaged, or names something that has no place in a checkpoint.
    """
    return _read(path, path.name, mmap=True)


def read_bytes(data: bytes, name: str) -> Any:
    """Return what bytes of torch.save hold; `name` names them in a message.

    Raises:
        UntrustedError: they are damaged, or name something that has no place in a checkpoint.
    """
    return _read(io.BytesIO(data), name, mmap=False)


def require_intact(file: Any, name: str) -> None:
    """Check the checksums of an archive of torch.save, which is read once for that.

    Args:
        file: the archive, open for reading.
        name: the archive, for a message.

    Raises:
        UntrustedError: a record is not what was written, or it is no archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    # zipfile's errors for a changed header, by which a record seems encrypted or compressed in an unknown way.
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UntrustedError(f"{name} is damaged: {str(error)[:100]}") from None
    if damaged is not None:
        raise UntrustedError(f"{name} is damaged: {damaged} does not have the checksum (CRC-32) it was written with")


def _read(source: Any, name: str, *, mmap: bool) -> Any:
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception as error:  # whatever an archive made for it can raise
        raise UntrustedError(f"{name} is damaged, or no file of torch.save: {pickles.words(error)}") from None
    unknown = sorted(one for one in named if one.split(".")[0] not in _PACKAGES and one not in _PLAIN)
    if unknown:
        raise UntrustedError(f"{name} refers to {', '.join(unknown[:3])}, which has no place in a checkpoint")
    known: list[Any] = [(argparse.Namespace, _NAMESPACE)]
    known += [(type(one.rpartition(".")[2], (Record,), {}), one) for one in named if one != _NAMESPACE]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # whatever a pickle or an archive made for it can raise
        raise UntrustedError(f"{name} is damaged or harmful: {pickles.words(error)}") from None
