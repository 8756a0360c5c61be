"""Where a token of a sample lies on disk: file, document, token. For error messages: it reads the sample again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy


class Part(NamedTuple):
    """What one sample took from one sequence of an indexed dataset."""

    data: Any
    sequence: int
    offset: int
    tokens: int


def place_of_token(dataset: Any, sample: int, position: int) -> str:
    """In words, file, byte offset, document and token of the document of one of the S + 1 tokens of a sample.

    Args:
        dataset: of `build_datasets`.
        position: 0 to S; the label at position i is token i + 1.
    """
    for part in _parts(dataset, sample):
        if position < part.tokens:
            return _words(part, part.offset + position)
        position -= part.tokens
    return "of no data file"


def _parts(dataset: Any, sample: int) -> list[Part]:
    """The sequences that a sample is cut from, in order, as the engine asks for them while it is read."""
    parts: list[Part] = []
    with ExitStack() as stack:
        for member in getattr(dataset, "datasets", [dataset]):
            if hasattr(member, "dataset"):
                stack.enter_context(_listening(member.dataset, parts))
        dataset[sample]
    return parts


@contextmanager
def _listening(data: Any, parts: list[Part]) -> Iterator[None]:
    get = data.get

    def listened(idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        tokens = get(idx, offset, length)
        parts.append(Part(data, int(idx), offset, len(tokens)))
        return tokens

    data.get = listened
    try:
        yield
    finally:
        del data.get


def _words(part: Part, token: int) -> str:
    if not hasattr(part.data, "index"):  # made-up tokens
        return f"made-up sequence {part.sequence}, token {token}"
    index, marks = part.data.index, part.data.document_indices
    at = int(index.sequence_pointers[part.sequence]) + token * numpy.dtype(index.dtype).itemsize
    document = int(numpy.searchsorted(marks, part.sequence, side="right")) - 1
    inside = int(index.sequence_lengths[int(marks[document]) : part.sequence].sum()) + token
    return f"{part.data.path_prefix}.bin, byte offset {at} (document {document}, token {inside})"
