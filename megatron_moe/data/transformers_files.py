"""Makes the files by which transformers loads the tokenizer of a run: tokenizer.json and tokenizer_config.json.

The tokenizer of `tokenizer.json` is compared with the run's on texts before anything is written. Neither transformers
nor code of the tokenizer's folder is run.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.hugging_face_folder import JSON, SETTINGS, SPECIAL, TEMPLATE
from megatron_moe.data.tiktoken_models import RankedTokenizer, byte_letters
from megatron_moe.data.tokenizers import (
    REPLACEMENT,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

if TYPE_CHECKING:
    import tokenizers

PIECES = "tokenizer.model"
_KEPT = ("chat_template", "padding_side", "truncation_side", "model_input_names", "split_special_tokens")
"""Keys of a tokenizer_config.json that are kept. Others choose a class, which could build another tokenizer than the
tokenizer.json says, or are written anew."""
_TEXTS = (
    "Hello world, this is a test.",
    "  two  spaces, a\ttab and\r\n\nblank lines \n",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x ** 2 / 3.14e-10}  # comment\n",
    "naïve café, Ελληνικά, русский, العربية, हिन्दी, 中文字符，日本語のテキスト, 한국어",
    "emoji 👩‍🚀🇫🇷 and symbols ∑∫√ ½ “quotes” — dashes…",
    "1234567890 12.5% $99 2026-01-31T23:59:59Z 0xDEADBEEF",
    "I'm, you're, WE'LL, HTTPServer, snake_case, camelCase, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " leading and trailing ",
    "\n",
    "",
)
_ODD_TEXTS = {
    "decomposed Hangul": "\u1112\u1161\u11ab",
    "half-width katakana with a mark": "\uff76\uff9e",
    "the spelling of a byte such as <0x41>": "<0x41>",
    "U+2581": "\u2581",
}
"""Texts that the tokenizers library is known to read in other ways than SentencePiece."""
_PIECES_A_TEXT, _MOST_PIECES, _STRIDE = 32, 2048, 7919


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
"""Types of models."""
_SPACE = "\u2581"
_WIDTHS = {1: 8, 5: 4}
"""Bytes of a protocol buffer's values of a fixed width, by their type."""


@dataclass(frozen=True)
class TransformersFiles:
    """A tokenizer as files for transformers.

    contents: name -> content. eos, bos, pad: ids of the special tokens; None for those that it has not.
    notes: what a user should know. texts: number of texts on which the ids were compared.
    """

    contents: dict[str, bytes]
    eos: int
    bos: int | None
    pad: int | None
    notes: tuple[str, ...] = ()
    texts: int = 0


def transformers_files(tokenizer: Tokenizer, file: Path | None, length: int) -> TransformersFiles | None:
    """Return the files of a tokenizer for transformers, compared with it; None for ids without a text.

    Args:
        tokenizer: the tokenizer of a run.
        file: the file or folder of `--tokenizer-model`, which it was read from, where its type has one.
        length: the most tokens that the model takes.

    Raises:
        ConfigError: the tokenizers library cannot be made to give the same ids.
    """
    import tokenizers

    said: dict[str, Any] = {}
    others: dict[str, bytes] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        assert file is not None
        path = file / JSON if file.is_dir() else file
        for name in (SPECIAL, SETTINGS):
            if (path.parent / name).is_file():
                said |= json.loads((path.parent / name).read_text(encoding="utf-8"))
        model, template = tokenizer.fast_tokenizer(), path.parent / TEMPLATE
        if template.is_file():
            others[TEMPLATE] = template.read_bytes()
        roles = tokenizer.roles | _roles(tokenizer, model)
        # As it is where the rest of its folder changes no ids.
        whole = tokenizer.sha256 == tokenizer.sha256_of_file
        content = path.read_bytes() if whole else model.to_str(pretty=True).encode()
    else:
        if isinstance(tokenizer, SentencePieceTokenizer):
            assert file is not None
            others[PIECES] = file.read_bytes()
            model = SentencePieceModel.parse(others[PIECES]).fast_tokenizer()
        elif isinstance(tokenizer, (GPT2BPETokenizer, RankedTokenizer)):
            model = tokenizer.fast_tokenizer()
        elif isinstance(tokenizer, ByteTokenizer):
            end = "<|endoftext|>"  # after a token for each byte, whose id it is
            letters = {letter: byte for byte, letter in enumerate(byte_letters())}
            model = tokenizers.Tokenizer(tokenizers.models.BPE({**letters, end: ByteTokenizer.eod}, []))
            model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            model.decoder = tokenizers.decoders.ByteLevel()
            model.add_special_tokens([end])
        else:
            return None
        roles, content = _roles(tokenizer, model), model.to_str().encode()
    model = tokenizers.Tokenizer.from_str(content.decode())
    notes = []
    known = {role: token for role, token in roles.items() if model.token_to_id(token) is not None}
    if unknown := sorted(roles.keys() - known.keys()):
        notes.append(f"{', '.join(unknown)} of {SETTINGS} name no token of {JSON} and are left out")
    settings: dict[str, Any] = {
        "model_input_names": ["input_ids", "attention_mask"],  # the models know no types of tokens
        **{key: said[key] for key in _KEPT if key in said},
        **known,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    if model.encode("a").ids != model.encode("a", add_special_tokens=False).ids:
        content = json_bytes({**json.loads(content), "post_processor": None})
        notes.append(
            f"{JSON} is written without its post-processor, which adds special tokens to every text; training here "
            "adds none, unless the data was made with --tokenizer-hf-include-special-tokens"
        )
        model = tokenizers.Tokenizer.from_str(content.decode())
    ids = {role: model.token_to_id(token) for role, token in known.items()}
    if ids.get("eos_token") != tokenizer.eod or ids.get("bos_token") != tokenizer.bos:
        raise ConfigError(
            f"{tokenizer.name}: {JSON} has eos_token {ids['eos_token']} and bos_token {ids.get('bos_token')}, training "
            f"{tokenizer.eod} and {tokenizer.bos}; --no-tokenizer exports the model without a tokenizer"
        )
    model.encode_special_tokens = bool(settings.get("split_special_tokens"))
    # Texts of pieces from all over the vocabulary, without those that are no whole characters.
    texts, vocabulary = list(_TEXTS), tokenizer.vocab_size
    sampled = (tokenizer.detokenize([i * _STRIDE % vocabulary]) for i in range(min(vocabulary, _MOST_PIECES)))
    pieces = [text for text in sampled if REPLACEMENT not in text]
    for start in range(0, len(pieces), _PIECES_A_TEXT):
        texts.append("".join(pieces[start : start + _PIECES_A_TEXT]))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        texts.append("".join(known.values()))
    model.no_truncation()
    model.no_padding()
    for text in texts:
        own = tokenizer.tokenize(text)
        back = tokenizer.detokenize(own)
        if model.encode(text).ids != own or (back == text and model.decode(own) != text):
            raise ConfigError(
                f"{tokenizer.name}: transformers would read {text[:60]!r} as other tokens, or write it otherwise, than "
                "the tokenizer of the training; --no-tokenizer exports the model without a tokenizer"
            )
    if odd := [name for name, text in _ODD_TEXTS.items() if model.encode(text).ids != tokenizer.tokenize(text)]:
        notes.append(f"{JSON}: in transformers other tokens than in training stand for {', '.join(odd)}")
    contents = {JSON: content, SETTINGS: json_bytes(settings), **others}
    return TransformersFiles(
        contents, tokenizer.eod, tokenizer.bos, ids.get("pad_token"), tuple(notes), texts=len(texts)
    )


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return a JSON file as Hugging Face's libraries write it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _roles(tokenizer: Tokenizer, model: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the tokens that end and begin a document, as a tokenizer of the library writes them."""
    ids = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos}
    tokens = {role: model.id_to_token(i) for role, i in ids.items() if i is not None}
    return {role: token for role, token in tokens.items() if token is not None}


# A SentencePiece model file is a protocol buffer (sentencepiece_model.proto): pieces with scores and types, the
# trainer's settings and the normaliser's. It is read by its wire format, without the protobuf package.


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
        """Parse a model file; a ValueError if it is no protocol buffer, or a piece is not as it has to be."""
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
        steps: list[Any] = [tokenizers.normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.remove_extra_whitespaces:
            steps += [
                # Strip would take any white space, such as U+0085 and the line breaks of an identity normalisation.
                tokenizers.normalizers.Replace(tokenizers.Regex("^ +| +$"), ""),
                tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
            ]
        if self.add_dummy_prefix:
            steps.append(tokenizers.normalizers.Prepend(_SPACE))
        steps.append(tokenizers.normalizers.Replace(" ", _SPACE))
        result.normalizer = tokenizers.normalizers.Sequence(steps)
        if symbols := self._symbols(result.normalizer):
            # Added tokens would cut the text before it is normalised, and each part would begin with a space.
            pattern = "|".join(re.escape(text) for text in sorted(symbols, key=len, reverse=True))
            result.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        steps = [tokenizers.decoders.Replace(_SPACE, " "), tokenizers.decoders.ByteFallback()]
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

    def _symbols(self, normalizer: tokenizers.normalizers.Normalizer) -> list[str]:
        """Return the user-defined symbols, which SentencePiece takes out of a text; refuse what the library cannot."""
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


def _fields(content: bytes) -> dict[int, list[Any]]:
    """Return the values of a protocol buffer's message by field: int for varints, else bytes."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        field, wire = key >> 3, key & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(content, at)
        else:
            if wire == 2:
                length, at = _varint(content, at)
            elif wire in _WIDTHS:
                length = _WIDTHS[wire]
            else:
                raise ValueError(f"field {field} at byte {at} has the unknown type {wire}")
            value = content[at : at + length]
            at += length
            if at > len(content):
                raise ValueError(f"field {field} is cut short at byte {len(content)}")
        found.setdefault(field, []).append(value)
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(content):
            break
        byte = content[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError(f"no number ends at byte {at}")
