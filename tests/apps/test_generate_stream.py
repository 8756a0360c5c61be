"""Text told token by token is the text of all tokens, in whole characters."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from megatron_moe.apps.generate import TextStream
from megatron_moe.data.tokenizers import (
    REPLACEMENT,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
)
from megatron_moe.data.train_tokenizer import train_sentencepiece

pytestmark = pytest.mark.engine

TEXT = "def total(x):\n    return x + 1  # Größe, 日本語, 🙂\n\n\tif x:\r\n  the the tower" * 2


@pytest.fixture(scope="module", params=["sentencepiece", "byte-level", "bytes"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        train_sentencepiece([TEXT] * 3, folder / "m.model", 320, limit_bytes=10_000)
        return SentencePieceTokenizer(folder / "m.model")
    return byte_level(folder / "tokenizer.json")


def byte_level(path: Path):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT], trainer)
    model.save(str(path))
    return HuggingFaceTokenizer(path)


def test_the_parts_are_the_whole(tokenizer):
    ids = tokenizer.tokenize(TEXT)
    for start in (0, 1, 3, 11, len(ids) // 2):
        while "�" in tokenizer.detokenize(ids[:start]):
            start += 1
        stream = TextStream(tokenizer, ids[:start])
        parts = [stream.add(token) for token in ids[start:]]
        assert tokenizer.detokenize(ids[:start]) + "".join(parts) + stream.rest() == TEXT
        assert REPLACEMENT not in "".join(parts)
        assert sum(map(bool, parts)) > len(parts) // 2
        assert stream.rest() == ""


def test_a_character_that_is_not_ended_is_told_at_the_end():
    stream = TextStream(ByteTokenizer(), b"ab")
    assert [stream.add(byte) for byte in "cé".encode()[:-1]] == ["c", ""]
    assert stream.rest() == REPLACEMENT


def test_the_end_of_a_document_has_no_text_and_text_goes_on_behind_it(tokenizer):
    ids = tokenizer.tokenize("the tower")
    stream = TextStream(tokenizer, ids)
    parts = [stream.add(token) for token in [tokenizer.eod, *ids]]
    assert parts[0] == ""
    assert "".join(parts) + stream.rest() == tokenizer.detokenize([*ids, tokenizer.eod, *ids])[len("the tower") :]


def test_numbers_are_told_with_the_space_between_them():
    stream = TextStream(NullTokenizer(50), [7])
    assert [stream.add(token) for token in (1, 22, 3)] == [" 1", " 22", " 3"]
