"""Tokenizers of tiktoken ranks give tiktoken's ids, from Kimi's folders and Megatron's JSON."""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import DataConfig
from megatron_moe.data.index_file import read_sidecar
from megatron_moe.data.tiktoken_models import KIMI_PATTERN, MEGATRON_PATTERNS, RankedTokenizer
from megatron_moe.data.tokenizer_choice import build_tokenizer, tokenizer_of_folder
from megatron_moe.data.tokenizers import Tokenizer
from tests.data.prepared import run

TEXTS = [
    "The quick brown fox's den; it'S what we'LL see, don't they'Ve I'D'RE 'ſ",
    "def total(x):\n    return x + 1  # sum\n\n\tif x:\r\n\t\ty  \n   ",
    "汉字和English混合 漢字かなカナ々〇 한국어 조선말 русский ТЕКСТ Ünïcödé ǅungla",
    "עברית العربية हिन्दी ไทย e\u0301o\u0308 ªº ʰʲ",
    "🙂👩‍👩‍👧🏽🇩🇪 \u200b\ufeff\u2028\u00a0\u3000 x\u0085y",
    "0 12 123 1234 12345 ٣٤ ½² Ⅷ 3.14e-10",
    "   leading, trailing   \n\n\n  \t\t !!!??? /// //\r\n ...",
    "aaaaaaaaaa ababababab abcabcabc banana bandana",
    "",
]


def small_ranks() -> dict[bytes, int]:
    """Return ranks as of a BPE that was trained on TEXTS: bytes, then pairs of what came before."""
    tokens = [bytes([byte]) for byte in range(256)]
    for length in (2, 3, 4, 6):
        whole = "".join(TEXTS).encode()
        tokens += sorted({whole[at : at + length] for at in range(0, len(whole) - length, length)})
    # A token that no joining arrives at, and that is taken as a whole piece.
    return {token: rank for rank, token in enumerate([*tokens, "§¶zq".encode(), b"qzqz"])}


RANKS = small_ranks()
BASE = len(RANKS)


def encoded(text: str, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> list[int]:
    """The ids of tiktoken itself; each special token stands for itself."""
    settings = {"pat_str": pattern, "mergeable_ranks": dict(ranks), "special_tokens": dict(special)}
    return tiktoken.Encoding("any", **settings).encode(text, allowed_special="all")


def lines(ranks: Mapping[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def kimi_folder(path: Path, **changes: Any) -> Path:
    """Write a folder with the files of Kimi-K2's tokenizer: small ranks, and a Python file that must not be run."""
    added = {
        BASE: {"content": "[BOS]", "special": True},
        BASE + 1: {"content": "[EOS]", "special": True},
        BASE + 2: {"content": "<|im_end|>", "special": True},
        BASE + 11: {"content": "<|tool_call_begin|>", "special": False},
        BASE + 255: {"content": "[PAD]", "special": True},
    }
    config = {
        "added_tokens_decoder": {str(i): entry for i, entry in added.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    alternatives = ",\n".join(
        f'            r"""{part}"""' for part in changes.pop("pattern", KIMI_PATTERN).split("|\0")
    )
    code = f'raise SystemExit("run")\nclass T:\n    pat_str = "|".join(\n        [\n{alternatives}\n        ]\n    )\n'
    path.mkdir(exist_ok=True)
    (path / "tiktoken.model").write_bytes(lines(RANKS))
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    (path / "tokenization_kimi.py").write_text(code)
    return path


def megatron_file(path: Path, ranks: Mapping[bytes, int] = RANKS) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for token, rank in ranks.items()
    ]
    path.write_text(json.dumps(entries))
    return path


def of_folder(folder: Path) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


def of_megatron(file: Path, vocab_size: int | None = None, **changes: Any) -> Tokenizer:
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(file), **changes)
    return build_tokenizer(data, vocab_size)


def random_texts(number: int) -> list[str]:
    rng = random.Random(7)
    letters = "".join(TEXTS)
    return ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 50))) for _ in range(number)]


@pytest.mark.parametrize("pattern", [KIMI_PATTERN, *MEGATRON_PATTERNS.values()], ids=["kimi", *MEGATRON_PATTERNS])
def test_ids_are_tiktokens(pattern):
    special = {"<|im_end|>": BASE, "[EOS]": BASE + 1}
    tokenizer = RankedTokenizer("any", RANKS, pattern, special, BASE + 2)
    for text in [*TEXTS, *random_texts(20), "§¶zq", " qzqz qzqzqz", "a<|im_end|>[EOS] <|im_end|", "[EOS"]:
        ids = tokenizer.tokenize(text)
        assert ids == encoded(text, RANKS, pattern, special), text
        assert tokenizer.detokenize(ids) == text.replace("<|im_end|>", "").replace("[EOS]", "")


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_ranks_is_joined_as_tiktoken_does(seed):
    """Ranks that no training would give: longer tokens before their parts, parts that are missing, many ties."""
    rng = random.Random(seed)
    letters = "ab" if seed % 2 else "abc"
    tokens = {"".join(rng.choice(letters) for _ in range(rng.randrange(2, 7))).encode() for _ in range(30)}
    order = [bytes([byte]) for byte in range(256)] + sorted(tokens, key=lambda _: rng.random())
    ranks = {token: rank for rank, token in enumerate(order)}
    tokenizer = RankedTokenizer("any", ranks, r"\p{L}+|.", {"[EOS]": len(ranks)}, len(ranks) + 1)
    for _ in range(60):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 24)))
        assert tokenizer.tokenize(text) == encoded(text, ranks, r"\p{L}+|.", {})


def test_bytes_that_are_no_text_become_replacement_characters():
    tokenizer = RankedTokenizer("any", RANKS, KIMI_PATTERN, {"[EOS]": BASE}, BASE + 1)
    assert tokenizer.detokenize([0xE6, BASE, 0x41, BASE + 5, -1, 0xFF]) == "\ufffdA\ufffd\ufffd\ufffd"
    euro = list("€".encode())
    assert tokenizer.detokenize([*euro[:2], BASE + 1, euro[2]]) == "\ufffd\ufffd\ufffd"
    assert tokenizer.detokenize(euro) == "€"
    assert sum(tokenizer.byte_lengths()[token] for token in euro) == 3


def test_a_kimi_folder_has_its_special_tokens_and_vocabulary(tmp_path):
    folder = kimi_folder(tmp_path / "kimi")
    tokenizer = of_folder(folder)
    assert (tokenizer.name, tokenizer.vocab_size) == ("HuggingFaceTokenizer", BASE + 256)
    assert (tokenizer.bos, tokenizer.eod) == (BASE, BASE + 1)
    text = f"汉<|im_end|>x<|tool_call_begin|>y<|reserved_token_{BASE + 3}|>[PAD]"
    ids = tokenizer.tokenize(text)
    assert [i for i in ids if i >= BASE] == [BASE + 2, BASE + 11, BASE + 3, BASE + 255]
    assert tokenizer.detokenize(ids) == "汉x<|tool_call_begin|>y"
    came_along = tokenizer_of_folder(folder, {file.name: file for file in folder.iterdir()})
    assert came_along is not None
    assert {of_folder(folder / "tiktoken.model").sha256, came_along.sha256} == {tokenizer.sha256}
    other = kimi_folder(tmp_path / "other", added_tokens_decoder={str(BASE): {"content": "[EOS]"}})
    assert of_folder(other).bos is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pattern": r"\p{N}"}, "another pattern"),
        ({"auto_map": None}, "None.py"),
        ({"auto_map": {"AutoTokenizer": "nowhere.T"}}, "nowhere"),
        ({"eos_token": "<eos>"}, "<eos>"),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, "id 5"),
        ({"added_tokens_decoder": {str(BASE): "x"}}, "added_tokens_decoder"),
    ],
)
def test_a_kimi_folder_that_cannot_be_right_is_refused(changes, words, tmp_path):
    folder = kimi_folder(tmp_path / "kimi", **changes)
    with pytest.raises(ConfigError, match=words):
        of_folder(folder)


def test_megatrons_special_tokens_come_first(tmp_path):
    tokenizer = of_megatron(megatron_file(tmp_path / "v.json"), tiktoken_num_special_tokens=10)
    shifted = {token: rank + 10 for token, rank in RANKS.items()}
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == ("TikTokenizer", BASE + 10, 1, 2)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == encoded(text, shifted, MEGATRON_PATTERNS["v2"], {})
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize("<s><SPECIAL_9></s><unk>") == [1, 9, 2, 0]
    assert tokenizer.detokenize([1, 9, 2]) == ""
    fewer = of_megatron(tmp_path / "v.json", 300, tiktoken_num_special_tokens=20, tiktoken_pattern="v1")
    assert fewer.vocab_size == 300 and max(fewer.tokenize("".join(TEXTS))) < 300
    names = ("<a>", "<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
    assert of_megatron(tmp_path / "v.json", tiktoken_special_tokens=names).eod == 3


def test_megatrons_tokenizer_gives_the_ids_of_megatron_core(tmp_path):
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    file = megatron_file(tmp_path / "v.json")
    for pattern in MEGATRON_PATTERNS:
        theirs = TikTokenTokenizer(str(file), num_special_tokens=50, pattern=pattern, vocab_size=BASE + 50)
        ours = of_megatron(file, BASE + 50, tiktoken_num_special_tokens=50, tiktoken_pattern=pattern)
        assert (ours.vocab_size, ours.eod, ours.bos) == (theirs.vocab_size, theirs.eod, theirs.bos_id)
        for text in [*TEXTS, *random_texts(50), "a</s>b<SPECIAL_30>"]:
            assert ours.tokenize(text) == theirs.text_to_ids(text)


@pytest.mark.parametrize(
    "content, changes, vocab_size, words",
    [
        ("AA== 0\n", {}, None, "HuggingFaceTokenizer"),
        ('{"vocab": []}', {}, None, "vocab"),
        ('[{"rank": 1}]', {}, None, "entry 0"),
        ('[{"rank": 0, "token_bytes": "?"}]', {}, None, "base64"),
        (None, {"tiktoken_num_special_tokens": 6}, None, "--tiktoken-num-special-tokens 6"),
        (None, {"tiktoken_special_tokens": ("<s>", "</s>")}, None, "<unk>"),
        (None, {"tiktoken_num_special_tokens": 10}, BASE + 11, "--vocab-size"),
        (None, {"tiktoken_num_special_tokens": 10}, 265, "--vocab-size"),
    ],
)
def test_a_vocabulary_that_megatron_could_not_have_is_refused(content, changes, vocab_size, words, tmp_path):
    file = megatron_file(tmp_path / "v.json")
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        of_megatron(file, vocab_size, **changes)


def test_a_vocabulary_without_a_byte_or_with_a_token_twice_is_refused(tmp_path):
    without = {token: rank for rank, token in enumerate(token for token in RANKS if token != b"x")}
    with pytest.raises(ConfigError, match="byte 120"):
        of_megatron(megatron_file(tmp_path / "v.json", without))
    folder = kimi_folder(tmp_path / "kimi")
    for rank, words in ((BASE, "twice"), (BASE + 1, f"line {BASE + 1}")):
        (folder / "tiktoken.model").write_bytes(lines(RANKS) + base64.b64encode(b"x") + b" %d\n" % rank)
        with pytest.raises(ConfigError, match=words):
            of_folder(folder)


def test_preprocessing_takes_both(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text))
    kimi = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(kimi_folder(tmp_path / "kimi"))}
    megatron: dict[str, Any] = {"tokenizer_type": "TikTokenizer", "tiktoken_num_special_tokens": 10}
    megatron["tokenizer_model"] = str(megatron_file(tmp_path / "v.json"))
    for kind, eod in ((kimi, BASE + 1), (megatron, 2)):
        facts = read_sidecar(run(source, tmp_path / "out", overwrite=True, **kind))
        assert facts is not None
        assert (facts.tokenizer_type, facts.eod, facts.documents) == (kind["tokenizer_type"], eod, len(TEXTS) - 1)
