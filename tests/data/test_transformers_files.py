"""Every tokenizer of a run becomes files that transformers loads, with the same ids; what cannot is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import DataConfig
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.data.transformers_files import SentencePieceModel, TransformersFiles, transformers_files
from megatron_moe_tools.prepare.preprocess import train_sentencepiece
from tests.data.prepared import byte_level_bpe
from tests.data.test_tiktoken_models import TEXTS, kimi_folder, megatron_file

WORDS = [f"def f_{i}(x):\n    return x ** {i} / 3.5  # the {i}th\n" for i in range(80)] + TEXTS


def of(kind: str, file: Path) -> DataConfig:
    return DataConfig(tokenizer_type=f"{kind}Tokenizer", tokenizer_model=str(file))


def own_pieces(folder: Path, kind: str) -> DataConfig:
    train_sentencepiece(WORDS, folder / "own.model", 410, model_type=kind)
    return of("SentencePiece", folder / "own.model")


def usual_pieces(folder: Path, kind: str, *symbols: str) -> DataConfig:
    """A model by SentencePiece's defaults: a space before a text, NFKC, white space cleaned up."""
    (folder / "words").write_text("\n".join(WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words"), model_prefix=str(folder / "usual"), vocab_size=450, byte_fallback=True,
        model_type=kind, minloglevel=2, num_threads=1, hard_vocab_limit=False, user_defined_symbols=list(symbols),
    )  # fmt: skip
    return of("SentencePiece", folder / "usual.model")


def gpt2(folder: Path) -> DataConfig:
    vocabulary, merges = byte_level_bpe(WORDS).model.save(str(folder))
    return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)


def folder_with_more(folder: Path) -> DataConfig:
    """A folder whose settings add tokens to its tokenizer.json, and take the spelling of special ones as text."""
    byte_level_bpe(WORDS).save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "split_special_tokens": True}
    listed = {"400": {"content": "return", "special": False}, "401": {"content": "x ", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "added_tokens_decoder": listed}))
    return of("HuggingFace", folder)


MADE: dict[str, Callable[[Path], DataConfig]] = {
    "own bpe": lambda folder: own_pieces(folder, "bpe"),
    "own unigram": lambda folder: own_pieces(folder, "unigram"),
    "bpe with a prefix": lambda folder: usual_pieces(folder, "bpe", "<sep>", "tur", "(x"),
    "unigram with a prefix": lambda folder: usual_pieces(folder, "unigram", "<sep>", "tur", "(x"),
    "gpt2": gpt2,
    "folder": folder_with_more,
    "kimi": lambda folder: of("HuggingFace", kimi_folder(folder / "kimi")),
    "tiktoken": lambda folder: of("Tik", megatron_file(folder / "vocabulary.json")),
    "bytes": lambda folder: DataConfig(tokenizer_type="ByteTokenizer"),
}


def files_of(data: DataConfig, vocab_size: int | None = None) -> tuple[Tokenizer, TransformersFiles | None]:
    tokenizer = build_tokenizer(data, vocab_size)
    return tokenizer, transformers_files(tokenizer, data.tokenizer_model and Path(data.tokenizer_model), length=64)


@pytest.mark.parametrize("kind", MADE)
def test_transformers_gives_the_ids_of_the_run(tmp_path, kind):
    import transformers

    tokenizer, made = files_of(MADE[kind](tmp_path))
    assert made.texts > 10
    out = tmp_path / "out"
    out.mkdir()
    for name, content in made.contents.items():
        (out / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for text in [*WORDS[::7], *TEXTS, "\x85 a\x85", "\u2028a  \n", "a<sep>b", "<sep>return  <sep><sep> c"]:
        ids = tokenizer.tokenize(text)
        assert theirs(text)["input_ids"] == ids
        if tokenizer.detokenize(ids) == text:
            assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.eod, tokenizer.bos) == (made.eos, made.bos)
    assert theirs.decode([*tokenizer.tokenize("ab"), tokenizer.eod], skip_special_tokens=True) == "ab"
    assert len(theirs) <= tokenizer.vocab_size and theirs.model_max_length == 64


def test_a_tokenizer_json_that_adds_nothing_is_copied_byte_for_byte(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<e>": 2, "<u>": 3}, unk_token="<u>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<e>"])
    # Of this name, so that the files beside it add nothing to it.
    model.save(str(tmp_path / "mine.json"))
    said = {"pad_token": "<p>", "chat_template": "x", "tokenizer_class": "LlamaTokenizer", "auto_map": {"a": "b"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    _, made = files_of(of("HuggingFace", tmp_path / "mine.json"))
    assert made.contents["tokenizer.json"] == (tmp_path / "mine.json").read_bytes()
    settings = json.loads(made.contents["tokenizer_config.json"])
    assert settings["eos_token"] == "<e>" and settings["chat_template"] == "x"
    # A token that is not in the vocabulary would get an id beyond the model's.
    assert "pad_token" not in settings and "auto_map" not in settings and len(made.notes) == 1
    assert (made.eos, made.bos, made.pad) == (2, None, None)


def test_ids_that_stand_for_no_text_have_no_files():
    assert files_of(DataConfig(mock_data=True), 99)[1] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("char",), "unigram and bpe"),
        (("word",), "unigram and bpe"),
        (("bpe", "\u2460"), "user-defined symbol '\u2460'.* normalise it; --no-tokenizer"),
        (("unigram", "<a>", "<a><a>"), "user-defined symbol '<a>'.* a longer one that contains it"),
    ],
)
def test_a_kind_or_symbol_that_the_library_has_not_is_refused_with_the_reason(tmp_path, words, says):
    with pytest.raises(ConfigError, match=says):
        files_of(usual_pieces(tmp_path, *words))


def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path, monkeypatch):
    merges = SentencePieceModel._merges
    monkeypatch.setattr(SentencePieceModel, "_merges", lambda self: merges(self)[:-40])
    with pytest.raises(ConfigError, match="--no-tokenizer"):
        files_of(own_pieces(tmp_path, "bpe"))


@pytest.mark.parametrize("content", [b"\x0a\xff", b"\x0a\x05ab", b"\xff" * 12, b"\x08"])
def test_what_is_no_model_file_is_an_error(content):
    with pytest.raises(ValueError):
        SentencePieceModel.parse(content)
