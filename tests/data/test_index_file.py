"""Damaged index files are found when they are opened, and the message names the file and the place."""

import math
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.index_file import HEADER_BYTES, label_counts, label_entropy, open_index
from tests.config.refused import refused

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
COUNT = len(DOCUMENTS)
POINTERS_AT = HEADER_BYTES + 4 * COUNT
DOCUMENTS_AT = POINTERS_AT + 8 * COUNT


@pytest.fixture
def prefix(write_ids: Callable[..., str]) -> str:
    return write_ids(DOCUMENTS)


def patch(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def refuse(prefix: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_index(prefix)


@pytest.mark.engine
def test_an_index_agrees_with_the_engines_reader(prefix):
    index, engine = open_index(prefix), IndexedDataset(prefix)
    assert index.lengths.tolist() == engine.sequence_lengths.tolist() == [3, 1, 2, 4]
    assert index.documents.tolist() == engine.document_indices.tolist()
    assert (index.num_tokens, index.num_documents) == (10, 4)
    assert [tokens.tolist() for _, tokens in index.chunks()] == [list(range(1, 11))]
    flat = [(number, offset) for number, document in enumerate(DOCUMENTS) for offset in range(len(document))]
    assert [index.document_of(i) for i in range(10)] == flat
    pairs = replace(index, documents=index.documents[::2])  # of two sequences each
    assert [pairs.document_of(i) for i in range(10)] == [*((0, i) for i in range(4)), *((1, i) for i in range(6))]


DAMAGE = {
    "bad magic": (0, b"XX", "bad header at offset 0"),
    "version 2": (9, struct.pack("<Q", 2), "version 2 at offset 9"),
    "unknown dtype": (17, b"\x63", "dtype code 99 at offset 17"),
    "float dtype": (17, b"\x07", "dtype code 7 at offset 17"),
    "other dtype": (17, b"\x04", "sequence 1 points to byte"),
    "count one more": (18, struct.pack("<Q", COUNT + 1), "cut short"),
    "count one less": (18, struct.pack("<Q", COUNT - 1), "too long"),
    "count 2^60": (18, struct.pack("<Q", 2**60), "cut short"),
    "count 0": (18, struct.pack("<Q", 0), "no documents"),
    "marks one more": (26, struct.pack("<Q", COUNT + 2), "cut short"),
    "length zero": (HEADER_BYTES + 4, struct.pack("<i", 0), f"sequence 1 has length 0 at offset {HEADER_BYTES + 4}"),
    "length negative": (HEADER_BYTES + 8, struct.pack("<i", -5), "sequence 2 has length -5"),
    "length too large": (HEADER_BYTES, struct.pack("<i", 4), "sequence 1 points to byte 6"),
    "last length too large": (HEADER_BYTES + 12, struct.pack("<i", 5), "20 bytes, shorter than the 22"),
    "pointer beyond the end": (POINTERS_AT + 16, struct.pack("<q", 1 << 40), f"at offset {POINTERS_AT + 16}"),
    "pointer falls": (POINTERS_AT + 8, struct.pack("<q", -2), "sequence 1 points to byte -2"),
    "first document": (DOCUMENTS_AT, struct.pack("<q", 1), "first document begins at sequence 1"),
    "documents fall": (DOCUMENTS_AT + 16, struct.pack("<q", 0), "fall from 1 to 0"),
    "last document": (DOCUMENTS_AT + 8 * COUNT, struct.pack("<q", 9), "must be 4"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused_with_its_place(prefix, name):
    offset, content, words = DAMAGE[name]
    patch(f"{prefix}.idx", offset, content)
    refused(lambda: open_index(prefix), words, f"{prefix}.")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_truncation_and_every_extension_is_refused(prefix, suffix):
    path = Path(prefix + suffix)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refuse(prefix, r"\.(bin|idx)")
    for extra in (1, 2, 3, 5, 100):
        path.write_bytes(content + b"\x00" * extra)
        refuse(prefix, "long")
    multimodal_tail = b"\x00" * COUNT if suffix == ".idx" else b""
    path.write_bytes(content + multimodal_tail)
    assert open_index(prefix).num_tokens == 10


def test_a_flipped_byte_of_an_index_is_refused_or_harmless(prefix):
    """Harmless: the document marks, which the engine's GPT datasets do not read, may differ and stay in order."""
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    lengths = open_index(prefix).lengths.tolist()
    rng = random.Random(0)
    for offset in range(len(content)):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            index = open_index(prefix)
        except ConfigError:
            continue
        assert offset >= DOCUMENTS_AT and index.lengths.tolist() == lengths


def test_missing_and_swapped_files_are_named(prefix):
    os.rename(f"{prefix}.bin", f"{prefix}.aside")
    refuse(prefix, r"\.bin does not exist")
    os.rename(f"{prefix}.idx", f"{prefix}.bin")
    os.rename(f"{prefix}.aside", f"{prefix}.idx")
    refuse(prefix, r"\.idx: ")
    Path(prefix + ".bin").write_bytes(b"")
    refuse(prefix, r"\.bin is empty")


def test_chunks_cover_all_tokens_in_order(prefix, monkeypatch):
    monkeypatch.setattr("megatron_moe.data.index_file._CHUNK_TOKENS", 3)
    parts = list(open_index(prefix).chunks())
    assert [first for first, _ in parts] == [0, 3, 6, 9]
    assert numpy.concatenate([tokens for _, tokens in parts]).tolist() == list(range(1, 11))


def test_label_entropy_in_nats_counts_what_an_evaluation_predicts():
    def of(count: int, *samples: tuple[list[int], list[float]]) -> float:
        dataset = [{"labels": torch.tensor(a), "loss_mask": torch.tensor(b)} for a, b in samples]
        return label_entropy(label_counts(dataset, count))

    every = [1.0, 1.0, 1.0]
    samples = ([1, 1, 2], [1.0, 1.0, 0.0]), ([3, 3, 9], every), ([50, 50, 50], every)
    wanted = -2 * 2 / 5 * math.log(2 / 5) - 1 / 5 * math.log(1 / 5)  # of 1 1 3 3 9
    assert of(2, *samples) == pytest.approx(wanted, rel=1e-15)
    assert of(1, ([1, 1, 1], every)) == 0.0
    with pytest.raises(ValueError, match="no tokens"):
        of(1, ([1, 2], [0.0, 0.0]))
