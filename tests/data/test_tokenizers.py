"""Tokenizers: ids in range, text that comes back, an identity, and errors that say what to do."""

import json
import random
import sysconfig
from pathlib import Path

import pytest
import tokenizers

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import DataConfig
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import (
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
)
from megatron_moe_tools.prepare.preprocess import sample_texts, train_sentencepiece
from tests.data.prepared import byte_level_bpe
from tools.corpus import source_files

LIBRARY = Path(sysconfig.get_path("stdlib"))
AWKWARD = [
    "", " ", "\n", "\n\n\n", "  leading", "trailing  \n", "\tif x:\r\n\t\ty\r\n", "a\u2581b \u2581 \u2581\u2581",
    "\u2581", "e\u2585x", "\ufeffbom", "日本語 𝒳 🙂", "nul \x00 byte", "<s></s><unk><0x41>", "\u2028\u00a0\u3000",
]  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> list[str]:
    paths = source_files(LIBRARY)
    assert len(paths) > 100
    return [(LIBRARY / path).read_bytes().decode("utf-8", errors="replace") for path in paths[::40]]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "m.model"
    train_sentencepiece(sources, file, 600, model_type=request.param, limit_bytes=60_000)
    return file


@pytest.fixture(scope="module")
def huggingface_file(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    model = byte_level_bpe(sources[:10])
    model.enable_truncation(5)
    model.enable_padding(length=7)
    file = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(file))
    return file


@pytest.fixture(scope="module")
def gpt2_files(huggingface_file: Path) -> tuple[Path, Path]:
    """A vocab.json and a merges.txt as GPT-2's look: a version in the first line, `<|endoftext|>` as the last id."""
    model = json.loads(huggingface_file.read_text())["model"]
    tokens = [token for token in model["vocab"] if token != "<|endoftext|>"] + ["<|endoftext|>"]
    vocab, merges = huggingface_file.with_name("vocab.json"), huggingface_file.with_name("merges.txt")
    vocab.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    merges.write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]))
    return vocab, merges


def test_source_text_comes_back_exactly_from_sentencepiece(trained, sources):
    tokenizer = SentencePieceTokenizer(trained)
    assert len(tokenizer.tokenize("        return")) <= 4
    assert len(tokenizer.tokenize("\n")) == 1
    for text in sources[:40] + AWKWARD:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids and tokenizer.bos not in ids


def test_every_tokenizer_turns_any_ids_into_text(trained, huggingface_file, gpt2_files):
    rng = random.Random(0)
    others = [HuggingFaceTokenizer(huggingface_file), GPT2BPETokenizer(*gpt2_files), ByteTokenizer(), NullTokenizer(50)]
    for tokenizer in (SentencePieceTokenizer(trained), *others):
        for _ in range(50):
            text = tokenizer.detokenize([rng.randrange(-2, tokenizer.vocab_size + 50) for _ in range(20)])
            text.encode("utf-8")
        assert tokenizer.detokenize([tokenizer.vocab_size, -1]).replace(" ", "") == "\ufffd\ufffd"
        assert tokenizer.detokenize([tokenizer.eod]) == ""
        assert tokenizer.detokenize([]) == ""


def test_awkward_text_comes_back_from_bytes_and_from_byte_level_bpe(huggingface_file, sources):
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(huggingface_file)):
        for text in AWKWARD + sources[:20]:
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_the_bytes_of_ids_add_up_to_those_of_the_text(trained, huggingface_file, gpt2_files, sources):
    others = [HuggingFaceTokenizer(huggingface_file), GPT2BPETokenizer(*gpt2_files), ByteTokenizer()]
    for tokenizer in (SentencePieceTokenizer(trained), *others):
        lengths = tokenizer.byte_lengths()
        assert len(lengths) == tokenizer.vocab_size and lengths[tokenizer.eod] == 0
        for text in (*sources[:3], "naïve 日本語 🙂\n"):
            assert sum(lengths[token] for token in tokenizer.tokenize(text)) == len(text.encode())
    assert NullTokenizer(50).byte_lengths() is None


def test_gpt2_gives_the_ids_of_transformers(gpt2_files, sources):
    from transformers import GPT2TokenizerFast

    vocab, merges = map(str, gpt2_files)
    expected = GPT2TokenizerFast(vocab, merges)
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges))
    for text in [*AWKWARD, *sources[:20], "a<|endoftext|>b", "it's we'll  1234 <|endoftext|>\n\n x"]:
        ids = tokenizer.tokenize(text)
        assert ids == expected(text)["input_ids"]
        assert tokenizer.detokenize(ids) == text.replace("<|endoftext|>", "")
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(expected), expected.eos_token_id)
    assert tokenizer.eod == tokenizer.bos == tokenizer.vocab_size - 1


def test_gpt2_files_that_do_not_fit_are_refused_by_flag(gpt2_files, tmp_path):
    vocab, merges = gpt2_files
    tokens = json.loads(vocab.read_text())
    bad = tmp_path / "bad"
    without = ({token: i for token, i in tokens.items() if token != missing} for missing in ("<|endoftext|>", "a"))
    vocabularies = ([], {**tokens, "a": "7"}, {**tokens, "a": tokens["b"]}, *without)
    for content in ("{", *map(json.dumps, vocabularies)):
        bad.write_text(content)
        with pytest.raises(ConfigError, match=f"--vocab-file {bad}"):
            GPT2BPETokenizer(bad, merges)
    for content in ("#version: 0.2\nnobody knows\n", "#version: 0.2\nabc\n", vocab.read_text()):
        bad.write_text(content)
        with pytest.raises(ConfigError, match=f"--merge-file {bad}"):
            GPT2BPETokenizer(vocab, bad)
    assert GPT2BPETokenizer(vocab, merges).sha256 != HuggingFaceTokenizer(vocab.with_name("tokenizer.json")).sha256


def test_ids_with_holes_still_lie_below_the_vocabulary_size(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 41, "</s>": 7}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.tokenize("b")) == (42, 7, [41])


def test_sha256_is_of_the_content_not_the_path(trained, tmp_path):
    copy = tmp_path / "copy.model"
    copy.write_bytes(trained.read_bytes())
    assert SentencePieceTokenizer(copy).sha256 == SentencePieceTokenizer(trained).sha256
    assert len({ByteTokenizer().sha256, NullTokenizer(5).sha256, NullTokenizer(6).sha256}) == 3


def test_training_is_deterministic_and_blind_to_the_order_of_the_texts(sources, tmp_path):
    for number, texts in enumerate((sources, sources[::-1])):
        train_sentencepiece(texts, tmp_path / str(number), 500, limit_bytes=50_000)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_the_sample_keeps_its_limit_and_drops_repeats(sources):
    sample = sample_texts(sources * 2, 100_000)
    assert 0 < sum(len(text.encode()) for text in sample) <= 100_000
    assert len(set(sample)) == len(sample)
    assert sample_texts(["x" * 100], 10) == ["x" * 10]


def test_the_sample_does_not_depend_on_order_where_large_texts_do_not_fit():
    for seed in range(20):
        rng = random.Random(seed)
        texts = [f"{i} " * rng.randrange(1, 60) for i in range(30)]
        expected = sample_texts(texts, 300)
        rng.shuffle(texts)
        assert sample_texts(texts, 300) == expected


def test_a_vocabulary_that_does_not_fit_the_text_is_refused_with_one_that_does(tmp_path):
    for size, words in ((5000, r".* at most \d+"), (262, r".* at least \d+"), (100, "")):
        with pytest.raises(ConfigError, match=f"--tokenizer-vocab-size {size} {words}"):
            train_sentencepiece(["def f(x): return x"], tmp_path / "m", size)
    with pytest.raises(ConfigError, match="no text"):
        train_sentencepiece([], tmp_path / "m", 500)
    assert list(tmp_path.iterdir()) == []


def test_mock_data_needs_a_vocabulary_only():
    tokenizer = build_tokenizer(DataConfig(mock_data=True), 64)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("NullTokenizer", 64, 63)
    # nobody said that the last id ends a text: it is one like any other
    assert tokenizer.eos is None and NullTokenizer(64).eos == 63
    assert tokenizer.detokenize(tokenizer.tokenize("62 63")) == "62 63"


def test_null_tokenizer_reads_ids_and_refuses_others():
    tokenizer = NullTokenizer(10)
    assert tokenizer.tokenize(" 0 8\n3 ") == [0, 8, 3]
    assert tokenizer.detokenize([0, 8, 3, 9]) == "0 8 3"
    for word in ("9", "-1", "x", "1.0", "²"):
        with pytest.raises(ConfigError, match="0 to 8"):
            tokenizer.tokenize(word)
