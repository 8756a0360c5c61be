"""Tokenizers of ranks of byte strings, tiktoken's format: Megatron's `TikTokenizer`, and the folders of Kimi models.

tiktoken splits a text by a pattern, takes a piece whose bytes are a token as that token, and joins in any other piece
the two neighbours whose bytes have the lowest rank, the first of them where ranks are equal, until no two are a token.
The tokenizers library does the same for a list of merges, which `merges_of` finds in the ranks; neither the tiktoken
package nor the Python code that Kimi's folders bring along is run. Oniguruma splits here and Rust's regex there: they
can differ in characters that are new in Unicode.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.hugging_face_folder import json_object, text_of_token
from megatron_moe.data.tokenizers import Tokenizer, decode_runs

if TYPE_CHECKING:
    import tokenizers

MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Value of `--tiktoken-pattern` -> the pattern that splits a text."""
KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Kimi-K2 and Moonlight, which their folders have in a Python file alone."""
MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""The special tokens that Megatron's TikTokenizer has to have, and has where no others are named."""
MEGATRON_LARGEST = 2**17
"""Ids of Megatron's TikTokenizer where `--vocab-size` is not given."""
KIMI_RESERVED = 256
"""Ids after the ranks of Kimi models, for special tokens."""
KIMI_FILE = "tiktoken.model"


class RankedTokenizer(Tokenizer):
    """A byte-level BPE by ranks, with special tokens. A text that contains one of those gets its id.

    Args:
        name: the value of `--tokenizer-type`.
        ranks: bytes of a token -> its id; the order of ids is the order of merges. Each single byte is a token.
        pattern: splits a text into pieces; no token crosses their borders.
        special: special token -> id. vocab_size: number of ids.
        shown: those of the special tokens that `detokenize` writes out.
    """

    def __init__(
        self,
        name: str,
        ranks: Mapping[bytes, int],
        pattern: str,
        special: Mapping[str, int],
        vocab_size: int,
        shown: Iterable[str] = (),
    ) -> None:
        import tokenizers

        letters = byte_letters()
        written = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
        self._model = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                {written[token]: rank for token, rank in ranks.items()},
                [(written[left], written[right]) for left, right in merges_of(ranks)],
                ignore_merges=True,
            )
        )
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self.name = name
        self.vocab_size = vocab_size
        self._special, self._shown = dict(special), frozenset(shown)
        # The longest first, grouped by their first two characters: a `<` of a text is not compared with each of them.
        groups: dict[str, list[str]] = {}
        for token in sorted(self._special, key=len, reverse=True):
            groups.setdefault(token[:2], []).append(re.escape(token[2:]))
        patterns = (f"{re.escape(start)}(?:{'|'.join(rest)})" for start, rest in groups.items())
        self._find_special = re.compile(f"({'|'.join(patterns)})")
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes.update({special[token]: token.encode() for token in self._shown})

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._find_special.split(text)):
            if number % 2:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._model.encode(part, add_special_tokens=False).ids)
        return ids

    def byte_lengths(self) -> list[int]:
        return [len(self._bytes.get(token, b"")) for token in range(self.vocab_size)]

    def detokenize(self, ids: Iterable[int]) -> str:
        return decode_runs(
            ids,
            self.vocab_size,
            lambda run: b"".join(self._bytes.get(i, b"") for i in run).decode("utf-8", errors="replace"),
        )

    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer of the tokenizers library, which finds the special tokens by itself."""
        import tokenizers

        said = json.loads(self._model.to_str())
        said["model"]["vocab"] |= self._special  # the library gives added tokens the ids that the vocabulary has
        result = tokenizers.Tokenizer.from_str(json.dumps(said))
        result.decoder = tokenizers.decoders.ByteLevel()
        result.add_tokens(
            [
                tokenizers.AddedToken(token, special=token not in self._shown, normalized=False)
                for token in self._special
            ]
        )
        return result


def megatron_tiktoken(
    file: Path, pattern: str, special_tokens: Iterable[str], num_special_tokens: int, vocab_size: int | None
) -> RankedTokenizer:
    """Return Megatron's TikTokenizer: special tokens have the first ids, and the ranks of a JSON file those after.

    Args:
        file: a list of objects with `rank`, `token_bytes` (base64) and `token_str`, by rank.
        pattern: a key of MEGATRON_PATTERNS.
        special_tokens: the first special tokens; `<SPECIAL_i>` fill up to `num_special_tokens`.
        vocab_size: the number of ids; ranks beyond it are left out. Default: MEGATRON_LARGEST, or all if fewer.

    Raises:
        ConfigError: the file is malformed, or the numbers do not fit it.
    """
    named = list(special_tokens)
    for token in MEGATRON_SPECIAL:
        if token not in named:
            raise ConfigError(
                f"--tiktoken-special-tokens {' '.join(named)}: {token} is missing; {' '.join(MEGATRON_SPECIAL)} have "
                "to be among them"
            )
    all_special = named + [f"<SPECIAL_{i}>" for i in range(len(named), num_special_tokens)]
    special = {token: i for i, token in enumerate(all_special)}
    if len(named) > num_special_tokens or len(special) < len(all_special) or "" in special:
        raise ConfigError(
            f"--tiktoken-special-tokens {' '.join(named)}, --tiktoken-num-special-tokens {num_special_tokens}: these "
            f"are {len(named)} tokens, which have to be different, and at most that number"
        )
    content = file.read_bytes()
    tokens = _json_tokens(file, content)
    if vocab_size is None:
        vocab_size = min(MEGATRON_LARGEST, len(special) + len(tokens))
    kept = vocab_size - len(special)
    if not 256 <= kept <= len(tokens):
        raise ConfigError(
            f"--vocab-size {vocab_size}, --tiktoken-num-special-tokens {len(special)}: {file} has {len(tokens)} "
            "tokens, of which 256 are the bytes; with the special ones --vocab-size is from "
            f"{len(special) + 256} to {len(special) + len(tokens)}"
        )
    ranks = {token: len(special) + rank for rank, token in enumerate(tokens[:kept])}
    _check_ranks(file, ranks, kept)
    found = RankedTokenizer("TikTokenizer", ranks, MEGATRON_PATTERNS[pattern], special, vocab_size)
    found.eod, found.bos = special["</s>"], special["<s>"]
    settings = json.dumps([pattern, vocab_size, list(special)]).encode()
    found.sha256 = hashlib.sha256(settings + b"\0" + content).hexdigest()
    return found


def kimi_tokenizer(folder: Path) -> RankedTokenizer:
    """Return the tokenizer of a folder with `tiktoken.model`, as Kimi-K2's and Moonlight's.

    Special tokens are those of `tokenizer_config.json`; its `eos_token` is `eod`, and `bos_token` `bos`. The Python
    file that it names is read for the pattern that splits a text, and not run.

    Raises:
        ConfigError: a file is missing or malformed, or the Python file has another pattern.
    """
    file, config = folder / KIMI_FILE, folder / "tokenizer_config.json"
    if not config.is_file():
        raise ConfigError(f"{config}: is missing; {KIMI_FILE} has no special tokens")
    content, said = file.read_bytes(), json_object(config)
    _check_pattern(folder, said)
    tokens = _lines(file, content)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    _check_ranks(file, ranks, len(tokens))
    added: dict[int, tuple[str, bool]] = {}  # id -> special token, and whether it is left out of decoded text
    try:
        for i, entry in dict(said["added_tokens_decoder"]).items():
            added[int(i)] = (str(entry["content"]), entry.get("special", True) is True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{config}: added_tokens_decoder has to be an object of ids and tokens with content"
        ) from error
    if len({token for token, _ in added.values()} | {""}) <= len(added):
        raise ConfigError(f"{config}: added_tokens_decoder has an empty token, or one twice")
    last = len(tokens) + KIMI_RESERVED
    outside = [i for i in added if not len(tokens) <= i < last]
    if outside:
        raise ConfigError(
            f"{config}: added_tokens_decoder has id {outside[0]}; the special tokens of {file} are {len(tokens)} to "
            f"{last - 1}: the files do not belong together"
        )
    names = {i: added[i][0] if i in added else f"<|reserved_token_{i}|>" for i in range(len(tokens), last)}
    special = {name: i for i, name in names.items()}
    shown = [name for name, is_special in added.values() if not is_special]
    found = RankedTokenizer("HuggingFaceTokenizer", ranks, KIMI_PATTERN, special, last, shown)
    eod, bos = text_of_token(said.get("eos_token")), text_of_token(said.get("bos_token"))
    if eod not in special:
        raise ConfigError(f"{config}: eos_token {eod!r} is not among its added tokens; it ends a document here")
    found.eod, found.bos = special[eod], special.get(bos or "")
    found.sha256 = hashlib.sha256(json.dumps(sorted(special.items())).encode() + b"\0" + content).hexdigest()
    return found


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair of tokens that each longer token is joined from, in the order of their ranks.

    Of the ways to cut a token in two, only one can occur: where the joining by ranks arrives at these bytes in some
    text, it has joined inside them what it joins in these bytes alone, since nothing crossed their borders. So one pair
    a token is enough; a list of all pairs would also have to break ties as tiktoken does. A token that the bytes alone
    do not arrive at has no pair: it is taken as a whole piece or not at all.
    """
    pairs: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = (ranks.get(left + right, math.inf) for left, right in itertools.pairwise(parts))
            rank, at = min((rank, i) for i, rank in enumerate(joined))
            if rank == math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:  # what is left before the last join
            pairs.append((parts[0], parts[1]))
    return pairs


def byte_letters() -> list[str]:
    """Return the character by which the tokenizers library writes each byte, for bytes 0 to 255.

    Bytes that are printable characters of Latin-1 are written as these, the others in order by those from U+0100 on.
    """
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    others = iter(letter for letter in alphabet if ord(letter) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]


def _json_tokens(file: Path, content: bytes) -> list[bytes]:
    """Return the tokens of Megatron's JSON file by rank."""
    what = f"--tokenizer-model {file} is not a vocabulary of TikTokenizer"
    try:
        entries = json.loads(content)
    except ValueError as error:
        raise ConfigError(
            f"{what}: it is not JSON ({error}); a tiktoken.model is read from its folder, by --tokenizer-type "
            "HuggingFaceTokenizer"
        ) from error
    if not isinstance(entries, list):
        raise ConfigError(
            f"{what}, a list of objects with rank, token_bytes and token_str; a tekken.json has it as its vocab"
        )
    tokens = []
    for rank, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise ConfigError(f"{what}: entry {rank} has to be an object of rank {rank}")
        tokens.append(_decoded(entry.get("token_bytes"), f"{what}: entry {rank}"))
    return tokens


def _lines(file: Path, content: bytes) -> list[bytes]:
    """Return the tokens of a tiktoken file by rank: lines of a token in base64 and its rank."""
    tokens: list[bytes] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        if rank != str(len(tokens)).encode():
            raise ConfigError(f"{file}, line {number}: a token and the rank {len(tokens)} are expected")
        tokens.append(_decoded(token, f"{file}, line {number}"))
    return tokens


def _decoded(token: Any, where: str) -> bytes:
    try:
        return base64.b64decode(token, validate=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: the token is not base64") from error


def _check_ranks(file: Path, ranks: Mapping[bytes, int], number: int) -> None:
    """Check that no token is empty or there twice, and that each byte is one."""
    if len(ranks) < number or b"" in ranks:
        raise ConfigError(f"{file}: a token is empty, or there twice")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{file}: byte {missing[0]} is no token; without it some texts have no tokens")


def _check_pattern(folder: Path, said: Mapping[str, Any]) -> None:
    """Check that the folder's Python file splits texts by KIMI_PATTERN. The file is parsed and not run."""
    auto_map = said.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    named = named[0] if isinstance(named, list) and named else named
    file = folder / f"{Path(str(named).split('--')[-1]).stem}.py"
    try:
        code = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer-model {folder}: {file.name}, which auto_map of tokenizer_config.json names, cannot be read "
            f"({error}); that Python file alone says how {KIMI_FILE} splits texts, and is not run: download it too"
        ) from error
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "pat_str" for name in node.targets):
            words = [word.value for word in ast.walk(node.value) if isinstance(word, ast.Constant)]
            if KIMI_PATTERN in ("|".join(map(str, words)), "|".join(map(str, words[1:]))):
                return
    raise ConfigError(
        f"--tokenizer-model {folder}: {file.name} splits texts by another pattern than those of Kimi-K2 and Moonlight, "
        "which are read here; convert it to a tokenizer.json"
    )
