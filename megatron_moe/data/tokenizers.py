"""Tokenizers: text to token ids and back, with one interface for SentencePiece, Hugging Face, bytes and plain ids.

A tokenizer is named by `--tokenizer-type` and read from `--tokenizer-model`, GPT-2's from `--vocab-file` and
`--merge-file`. `tokenize` adds no special tokens: the end-of-document id `eod` is added by preprocessing where
`--append-eod` asks for it. `sha256` identifies the content of the model, not the path, and is stored in the sidecar of
every dataset written with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.hugging_face_folder import read_folder_tokenizer

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer(ABC):
    """The interface of a tokenizer.

    Attributes:
        name: the value of `--tokenizer-type`.
        vocab_size: number of ids; every id is in [0, vocab_size).
        eod: id that ends a document.
        bos: id that begins a document, or None. Preprocessing does not insert it.
        sha256: hex SHA-256 of the model's content.
    """

    name: str
    vocab_size: int
    eod: int
    bos: int | None
    sha256: str

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`.

        Special tokens are left out. An id outside the vocabulary (a model's padded vocabulary has some) and a byte
        sequence that is not UTF-8 become U+FFFD, so that any generated ids can be decoded.
        """

    def byte_lengths(self) -> list[int] | None:
        """Return how many UTF-8 bytes of a text each id stands for, 0 for special tokens; None where that is unknown.

        SentencePiece's models may put a space before a text: their ids then have one byte more than it.
        """
        return None

    def remedy(self, sha256: str) -> str:
        """Return what to add to the refusal of data, or of a model, whose tokenizer has another hash."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the tokenizer: type, hash, and the ids that end and begin a document."""
        return {"type": self.name, "sha256": self.sha256, "eod": self.eod, "bos": self.bos}

    @property
    def eos(self) -> int | None:
        """Id after which a generated text ends; None where no id is known to end one."""
        return self.eod

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Type and hash of the tokenizer, which the engine writes into the key of its index caches."""
        return OrderedDict([("tokenizer_type", self.name), ("sha256", self.sha256)])


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of a SentencePiece model file; `eod` is its end-of-sentence piece, `</s>`, and `bos` its `<s>`.

    SentencePiece writes a space as U+2581 inside pieces, so that a U+2581 of the text would be decoded as a space.
    Where the model has byte pieces, that character is encoded as bytes, and the round trip is exact for every text.
    """

    name = "SentencePieceTokenizer"
    _SPACE_SYMBOL = "\u2581"

    def __init__(self, model_file: str | Path) -> None:
        import sentencepiece

        content = Path(model_file).read_bytes()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"--tokenizer-model {model_file} is not a SentencePiece model: {error}") from error
        self.vocab_size = int(self._model.vocab_size())
        if self.vocab_size == 0:
            raise ConfigError(f"--tokenizer-model {model_file} is not a SentencePiece model: it has no pieces")
        self.eod = int(self._model.eos_id())
        if self.eod < 0:
            raise ConfigError(
                f"--tokenizer-model {model_file} has no end-of-sentence piece, which ends a document here; train the "
                "model with eos_id set (megatron-moe prepare --train-tokenizer does)"
            )
        self.bos = int(self._model.bos_id()) if self._model.bos_id() >= 0 else None
        self.sha256 = hashlib.sha256(content).hexdigest()
        ids = [int(self._model.piece_to_id(f"<0x{byte:02X}>")) for byte in self._SPACE_SYMBOL.encode()]
        self._space_symbol_ids = ids if all(self._model.is_byte(i) for i in ids) else None  # None: it has no bytes

    def tokenize(self, text: str) -> list[int]:
        if self._space_symbol_ids is None or self._SPACE_SYMBOL not in text:
            return self._model.encode(text)
        ids: list[int] = []
        for number, part in enumerate(text.split(self._SPACE_SYMBOL)):
            if number:
                ids.extend(self._space_symbol_ids)
            ids.extend(self._model.encode(part))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return decode_runs(ids, self.vocab_size, self._model.decode)

    def byte_lengths(self) -> list[int]:
        lengths = []
        for token in range(self.vocab_size):
            is_text = not (self._model.is_control(token) or self._model.is_unknown(token))
            lengths.append(_piece_bytes(self._model.id_to_piece(token)) if is_text else 0)
        return lengths


class _LibraryTokenizer(Tokenizer):
    """A tokenizer that the tokenizers library runs."""

    _model: tokenizers.Tokenizer
    include_special_tokens = False
    """Whether `tokenize` adds the tokens that the post-processor of a `tokenizer.json` adds to a text."""

    def tokenize(self, text: str) -> list[int]:
        try:
            return self._model.encode(text, add_special_tokens=self.include_special_tokens).ids
        except Exception as error:  # the library raises bare Exception for a text outside a vocabulary without <unk>
            raise ConfigError(f"{self.name}: {error}") from error

    def detokenize(self, ids: Iterable[int]) -> str:
        return decode_runs(ids, self.vocab_size, self._model.decode)

    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the tokenizers library."""
        return self._model

    def byte_lengths(self) -> list[int] | None:
        decoder = json.loads(self._model.to_str())["decoder"] or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        if "ByteLevel" in kinds:
            count: Callable[[str], int] = len  # a letter for each byte
        elif "ByteFallback" in kinds:
            count = _piece_bytes
        else:
            return None
        lengths = [0] * self.vocab_size
        for text, token in self._model.get_vocab(with_added_tokens=False).items():
            lengths[token] = count(text)
        for token, added in self._model.get_added_tokens_decoder().items():
            lengths[token] = 0 if added.special else len(added.content.encode())
        return lengths


class HuggingFaceTokenizer(_LibraryTokenizer):
    """The tokenizer of a Hugging Face folder, or of a `tokenizer.json` file, with the ids that transformers gives.

    `eod` is the end-of-sequence token that the folder names; where it names none, the one token of the vocabulary whose
    name is among the usual ones. Truncation and padding that the file may set are switched off: they would cut
    documents.

    Attributes:
        roles: role, such as `pad_token` -> the token that has it.
        sha256_of_file: of `tokenizer.json` alone, which differs from `sha256` where other files change its ids; None
            where there is no such file.
        splits_special_tokens: whether the spelling of a special token in a text is text.
    """

    name = "HuggingFaceTokenizer"
    _USUAL_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
    _USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>")

    def __init__(self, model: str | Path) -> None:
        self._model, self.roles, self.sha256, self.sha256_of_file = read_folder_tokenizer(Path(model))
        self.splits_special_tokens = self._model.encode_special_tokens
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"--tokenizer-model {model} has an empty vocabulary")
        # Ids may have holes, so the number of entries is not the bound of the ids.
        self.vocab_size = max(vocabulary.values()) + 1
        eod = _special_token(model, "eos_token", self.roles, self._USUAL_EOD, vocabulary)
        if eod is None:
            raise ConfigError(
                f"--tokenizer-model {model}: no end-of-sequence token found, which ends a document here; name one as "
                '"eos_token" in the tokenizer_config.json of its folder'
            )
        self.eod = eod
        self.bos = _special_token(model, "bos_token", self.roles, self._USUAL_BOS, vocabulary)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The library does not write this setting into the form in which a tokenizer goes to another process.
        self.__dict__.update(state)
        self._model.encode_special_tokens = self.splits_special_tokens

    def remedy(self, sha256: str) -> str:
        if sha256 != self.sha256_of_file:
            return ""
        return (
            "; that hash is of tokenizer.json alone, and other files of its folder change ids for transformers: "
            "to go on with those of the file, copy it into a folder of its own and give that"
        )

    def begins_with_bos(self) -> bool:
        """Return whether the post-processor of the file puts `bos` before a text."""
        return self.bos is not None and self._model.encode("", add_special_tokens=True).ids[:1] == [self.bos]


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE of two files; `<|endoftext|>`, also where a text contains it, is `eod` and `bos`."""

    name = "GPT2BPETokenizer"
    _END = "<|endoftext|>"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        import tokenizers

        contents = Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()
        try:
            vocabulary = json.loads(contents[0])
        except ValueError as error:
            raise ConfigError(f"--vocab-file {vocab_file} is not JSON: {error}") from error
        if not isinstance(vocabulary, dict) or not all(type(i) is int and i >= 0 for i in vocabulary.values()):
            raise ConfigError(f"--vocab-file {vocab_file} is not a vocab.json, an object of tokens and their ids")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise ConfigError(f"--vocab-file {vocab_file} gives two tokens the same id")
        lacking = sorted(({self._END} | set(tokenizers.pre_tokenizers.ByteLevel.alphabet())) - vocabulary.keys())
        if lacking:
            raise ConfigError(
                f"--vocab-file {vocab_file} lacks {lacking[0]!r}: GPT-2's vocabulary has a token for each of the 256 "
                f"bytes and {self._END}, which ends a document; another one needs its tokenizer.json and "
                "--tokenizer-type HuggingFaceTokenizer"
            )
        try:
            _, merges = tokenizers.models.BPE.read_file(str(vocab_file), str(merge_file))
            bpe = tokenizers.models.BPE(vocabulary, merges)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ConfigError(f"--merge-file {merge_file} is not the merges of {vocab_file}: {error}") from error
        self._model = tokenizers.Tokenizer(bpe)
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = tokenizers.decoders.ByteLevel()
        self._model.add_special_tokens([self._END])
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = self.bos = vocabulary[self._END]
        self.sha256 = hashlib.sha256(b"\0".join(contents)).hexdigest()


class ByteTokenizer(Tokenizer):
    """A tokenizer of UTF-8 bytes: ids 0 to 255 are the bytes, 256 ends a document. It needs no file."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256
    bos = None
    sha256 = hashlib.sha256(b"ByteTokenizer: 256 bytes, end of document 256").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def byte_lengths(self) -> list[int]:
        return [1] * self.eod + [0]

    def detokenize(self, ids: Iterable[int]) -> str:
        return decode_runs(
            ids, self.vocab_size, lambda run: bytes(i for i in run if i != self.eod).decode("utf-8", errors="replace")
        )


class NullTokenizer(Tokenizer):
    """A tokenizer of ids written as decimal numbers between white space, for tokenized data and mock data.

    `vocab_size` counts the end-of-document id, which is the last one: texts may use 0 to vocab_size - 2.

    Args:
        is_named: whether a flag names this tokenizer. Otherwise the ids are made up, or a program's own: the last one
            is an id like any other.
    """

    name = "NullTokenizer"
    bos = None

    def __init__(self, vocab_size: int, is_named: bool = True) -> None:
        if vocab_size < 2:
            raise ConfigError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 2 (one id and end of document)")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self._largest = vocab_size - 2 if is_named else vocab_size - 1
        self.sha256 = hashlib.sha256(f"NullTokenizer: {vocab_size} ids, the last ends a document".encode()).hexdigest()

    @property
    def eos(self) -> int | None:
        return self.eod if self._largest < self.eod else None

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            # Python refuses to read integers of thousands of digits.
            if not (word.isascii() and word.isdigit()) or int(word.lstrip("0")[:20] or 0) > self._largest:
                raise ConfigError(
                    f"NullTokenizer: {word[:40]!r} is not an id from 0 to {self._largest} (--vocab-size "
                    f"{self.vocab_size})"
                )
            ids.append(int(word.lstrip("0") or 0))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(
            str(int(i)) if 0 <= int(i) < self.vocab_size else REPLACEMENT for i in ids if int(i) != self.eos
        )


def decode_runs(ids: Iterable[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """Decode maximal runs of known ids together, with U+FFFD for each unknown id between them."""
    pieces: list[str] = []
    run: list[int] = []
    for token in map(int, ids):
        if 0 <= token < vocab_size:
            run.append(token)
            continue
        if run:
            pieces.append(decode(run))
            run = []
        pieces.append(REPLACEMENT)
    if run:
        pieces.append(decode(run))
    return "".join(pieces)


def _piece_bytes(piece: str) -> int:
    """Return the bytes that a piece of SentencePiece's stands for: one of a byte piece, and of U+2581, a space."""
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("\u2581", " ").encode())


def _special_token(
    model: str | Path, role: str, roles: dict[str, str], usual: tuple[str, ...], vocabulary: dict[str, int]
) -> int | None:
    """Return the id of a role's token, else of the usual name, if the vocabulary has exactly one; else None."""
    if role in roles:
        if roles[role] not in vocabulary:
            raise ConfigError(f"--tokenizer-model {model}: {role} {roles[role]!r} is not in the vocabulary")
        return vocabulary[roles[role]]
    found = [vocabulary[name] for name in usual if name in vocabulary]
    return found[0] if len(found) == 1 else None
