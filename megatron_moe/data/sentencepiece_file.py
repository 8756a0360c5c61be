"""Reads a SentencePiece model file and makes a tokenizer of the tokenizers library that gives the same ids.

The file is a protocol buffer (sentencepiece_model.proto): pieces with scores and types, the trainer's settings and the
normaliser's. It is read here by its wire format, without the protobuf package.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
"""Types of models."""
_SPACE = "\u2581"


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a model file.

    pieces: (text, score, type) by id. model_type: `UNIGRAM`, `BPE` or another number. The rest are settings of the
    normaliser: charsmap is its compiled table of replacements, empty for the identity.
    """

    pieces: tuple[tuple[str, float, int], ...]
    model_type: int
    space_after_words: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    @classmethod
    def parse(cls, content: bytes) -> SentencePieceModel:
        """Parse a model file.

        Raises:
            ValueError: it is no protocol buffer, or a piece is not as it has to be.
        """
        model = _fields(content)
        pieces = []
        for piece in map(_fields, model.get(1, ())):
            (score,) = struct.unpack("<f", piece[2][-1]) if 2 in piece else (0.0,)
            pieces.append((piece[1][-1].decode(), float(score), piece.get(3, [NORMAL])[-1]))
        trainer, normalizer = (_fields(model[field][-1]) if field in model else {} for field in (2, 3))
        return cls(
            tuple(pieces),
            trainer.get(3, [UNIGRAM])[-1],
            bool(trainer.get(24, [0])[-1]),
            normalizer.get(2, [b""])[-1],
            *(bool(normalizer.get(field, [1])[-1]) for field in (3, 4, 5)),
        )

    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer of the tokenizers library, except that it knows the control pieces in a text.

        A U+2581 of a text counts as a space, as in SentencePiece itself.

        Raises:
            ConfigError: the library has no tokenizer of this kind.
        """
        import tokenizers

        if self.model_type not in (UNIGRAM, BPE) or self.space_after_words or not self.escape_whitespaces:
            raise ConfigError(
                f"--tokenizer-type SentencePieceTokenizer: the model is of type {self.model_type}, space after words "
                f"{self.space_after_words}, spaces escaped {self.escape_whitespaces}; the tokenizers library, by which "
                "transformers reads it, has the types 1 and 2 (unigram and bpe) with an escaped space before a word"
            )
        result = tokenizers.Tokenizer(self._model())
        result.normalizer = self._normalizer()
        if symbols := self._symbols(result.normalizer):
            # Added tokens would cut the text before it is normalised, and each part would begin with a space.
            pattern = "|".join(re.escape(text) for text in sorted(symbols, key=len, reverse=True))
            result.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        steps: list[Any] = [tokenizers.decoders.Replace(_SPACE, " "), tokenizers.decoders.ByteFallback()]
        steps.append(tokenizers.decoders.Fuse())
        if self.add_dummy_prefix:
            steps.append(tokenizers.decoders.Strip(" ", 1, 0))
        result.decoder = tokenizers.decoders.Sequence(steps)
        result.add_tokens(
            [
                tokenizers.AddedToken(text, special=True, normalized=False)
                for text, _, kind in self.pieces
                if kind in (UNKNOWN, CONTROL)
            ]
        )
        return result

    def _symbols(self, normalizer: Any) -> list[str]:
        """Return the user-defined symbols, which SentencePiece takes out of a text as they are.

        Raises:
            ConfigError: the library cannot do that with one.
        """
        symbols = [text for text, _, kind in self.pieces if kind == USER_DEFINED]
        for text in symbols:
            reason = None
            if normalizer.normalize_str(text).removeprefix(_SPACE if self.add_dummy_prefix else "") != text:
                reason = "would normalise it"
            elif self.model_type == UNIGRAM and any(text != other and text in other for other in symbols):
                reason = "would choose otherwise between it and a longer one that contains it"
            if reason is not None:
                raise ConfigError(
                    f"--tokenizer-type SentencePieceTokenizer: has the user-defined symbol {text!r}, and the "
                    f"tokenizers library, by which transformers reads it, {reason}; --no-tokenizer exports the model "
                    "without one"
                )
        return symbols

    def _model(self) -> Any:
        import tokenizers

        unknown = next((i for i, (_, _, kind) in enumerate(self.pieces) if kind == UNKNOWN), None)
        has_bytes = any(kind == BYTE for _, _, kind in self.pieces)
        if self.model_type == UNIGRAM:
            scored = [(text, score) for text, score, _ in self.pieces]
            return tokenizers.models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes)
        return tokenizers.models.BPE(
            {text: i for i, (text, _, _) in enumerate(self.pieces)},
            self._merges(),
            unk_token=None if unknown is None else self.pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=has_bytes,
            ignore_merges=any(kind == USER_DEFINED for _, _, kind in self.pieces),  # these are no results of merges
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Return every pair of pieces that is a piece when joined, the piece of the highest score first."""
        ids = {text: i for i, (text, _, kind) in enumerate(self.pieces) if kind in (NORMAL, USER_DEFINED, UNUSED)}
        found = []
        for text, i in ids.items():
            if self.pieces[i][2] != NORMAL:
                continue
            for left, right in ((text[:cut], text[cut:]) for cut in range(1, len(text))):
                if left in ids and right in ids:
                    found.append((-self.pieces[i][1], ids[left], ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _normalizer(self) -> Any:
        import tokenizers

        steps: list[Any] = []
        if self.charsmap:
            steps.append(tokenizers.normalizers.Precompiled(self.charsmap))
        if self.remove_extra_whitespaces:
            steps += [
                # Strip would take any white space, such as U+0085 and the line breaks of an identity normalisation.
                tokenizers.normalizers.Replace(tokenizers.Regex("^ +| +$"), ""),
                tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
            ]
        if self.add_dummy_prefix:
            steps.append(tokenizers.normalizers.Prepend(_SPACE))
        steps.append(tokenizers.normalizers.Replace(" ", _SPACE))
        return tokenizers.normalizers.Sequence(steps)


def _fields(content: bytes) -> dict[int, list[Any]]:
    """Return the values of a protocol buffer's message by field: int for varints, else bytes.

    Raises:
        ValueError: it is malformed.
    """
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(content, at)
            found.setdefault(field, []).append(value)
            continue
        length, at = _varint(content, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), at)
        if length < 0 or at + length > len(content):
            raise ValueError(f"field {field} at byte {at} is cut short")
        found.setdefault(field, []).append(content[at : at + length])
        at += length
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = 0
    for shift in itertools.count(step=7):
        if at >= len(content) or shift > 63:
            raise ValueError(f"no number at byte {at}")
        byte = content[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise AssertionError
