"""Text from checkpoints: token by token what transformers generates; the tool's text, flags, tokenizers and errors."""

import json
import os
import shutil

import pytest
import tokenizers
import torch

from megatron_moe.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer, SentencePieceTokenizer
from megatron_moe.model.generate import continuation
from megatron_moe_tools import generate
from megatron_moe_tools.generate import TextStream
from megatron_moe_tools.models.load_model import load_model
from megatron_moe_tools.models.source import locate
from megatron_moe_tools.prepare.preprocess import train_sentencepiece
from tests.helpers import tiny_models
from tests.helpers.conversions import convert
from tests.helpers.rows import rows
from tests.helpers.tiny_tokenizers import byte_level
from tests.helpers.trained_steps import SMALL, trained

PROMPTS = ([5], [3, 90, 17, 17, 64, 2, 101])
NEW = 12


def continued(model, prompt, new=NEW):
    """What transformers' model continues without drawing, by whole passes.

    Its cache would keep keys that longrope has turned by the factors of a shorter text.
    """
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.engine
@pytest.mark.parametrize("case", rows(tiny_models.CASES, test=["deepseek-v3", "qwen2-moe"]))
def test_greedy_tokens_are_those_of_transformers(case, tmp_path):
    model = tiny_models.make(case, 1, tmp_path)
    with load_model(locate(tmp_path)) as found:
        for prompt in PROMPTS:
            longest = getattr(model.config, "index_topk", NEW + len(prompt))  # where sparse attention would begin
            new = min(NEW, longest - len(prompt))
            got = list(continuation(found.model, prompt, new, vocab_size=found.vocab_size))
            assert got == continued(model, prompt, new)


WORDS = ["<s>", "</s>", *(f"w{number}" for number in range(2, tiny_models.VOCABULARY))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer of one token per word, as transformers saves both; and the model."""
    path = tmp_path_factory.mktemp("made") / "hf"
    model = tiny_models.make("deepseek-v3", 2, path)
    by_word = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(by_word, unk_token="w2"))
    words.add_special_tokens(["<s>", "</s>"])
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    said = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path, model


@pytest.fixture(scope="module")
def native(folder):
    convert("hf", "native", folder[0], folder[0].parent / "native")
    return folder[0].parent / "native"


def run(capsys, *flags):
    """(exit code, stdout, stderr without its prefix)."""
    code = generate.main([str(flag) for flag in flags])
    told = capsys.readouterr()
    return code, told.out, [line.removeprefix("megatron-moe generate: ") for line in told.err.splitlines()]


def text(ids):
    return " ".join(WORDS[token] for token in ids if token > 1)


def test_a_converted_checkpoint_speaks_with_the_tokenizer_it_came_with(native, folder, capsys, tmp_path):
    prompt = "w7 w11 w30"
    (tmp_path / "prompt").write_text(prompt)
    flags = ["--load", native, "--max-new-tokens", 8, "--no-stop-at-eod"]
    code, out, err = run(capsys, *flags, "--prompt", "w40", "--prompt-file", tmp_path / "prompt")
    asked = {"w40": [0, 40], prompt: [0, 7, 11, 30]}
    assert code == 0
    assert out == "\n".join(f"{words} {text(continued(folder[1], ids, 8))}\n" for words, ids in asked.items())
    assert "prompt of 2 tokens" in err[-2] and "prompt of 4 tokens" in err[-1] and "7 tokens: " in err[-1]
    # Without the first token, and in bfloat16, other text comes.
    other = f"{prompt} {text(continued(folder[1], [7, 11, 30], 8))}\n"
    assert run(capsys, *flags, "--prompt", prompt, "--no-add-bos")[1] == other
    code, half, _ = run(capsys, *flags, "--prompt", prompt, "--dtype", "bf16")
    assert code == 0 and half.startswith(prompt) and len(half.split()) > 4


def test_draws_repeat_with_their_seed_and_stop_at_the_end_of_a_document(native, capsys):
    flags = ["--load", native, "--prompt", "w9", "--temperature", 3.0, "--max-new-tokens"]
    first, again, other = (run(capsys, *flags, 9, "--top-p", 0.99, "--seed", seed) for seed in (3, 3, 4))
    assert first[:2] == again[:2] and first[1] != other[1]
    until = run(capsys, *flags, 20, "--seed", 6)  # which draws the end of a document early
    beyond = run(capsys, *flags, 20, "--seed", 6, "--no-stop-at-eod")
    assert until[0] == beyond[0] == 0
    assert beyond[1].startswith(until[1].rstrip("\n")) and len(beyond[1]) > len(until[1])
    narrow = run(capsys, *flags, 5, "--top-k", 1)
    assert narrow[1] == run(capsys, "--load", native, "--prompt", "w9", "--max-new-tokens", 5)[1]


def test_an_imported_model_begins_and_ends_as_its_files_say(folder, capsys, tmp_path):
    """Without `add_bos_token` it is the post-processor that begins a text; several tokens may end it."""
    path, model = folder
    shutil.copytree(path, tmp_path / "hf")
    words = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    words.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    expected = continued(model, [0, 40], 8)
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, expected[4]]}))
    end = expected.index(expected[4]) + 1
    flags = ["--load", tmp_path / "hf", "--prompt", "w40", "--max-new-tokens", 8]
    assert run(capsys, *flags)[1] == f"w40 {text(expected[:end])}\n"
    assert run(capsys, *flags, "--no-stop-at-eod")[1] == f"w40 {text(expected)}\n"


REFUSED = {
    "beyond the positions": (["--prompt", "w5 w6", "--max-new-tokens", "2558"], "2560 positions; 2557 is the most"),
    "a prompt beyond them": (["--prompt", "w5 " * 2600], "shorten the prompt"),
    "not UTF-8": (["--prompt", os.fsdecode(b"\xff")], "--prompt: is not UTF-8"),
    "another tokenizer": (["--prompt", "é", "--tokenizer-type", "ByteTokenizer"], "gives token 195 and the model has"),
    "no begin": (["--prompt", "5", "--tokenizer-type", "NullTokenizer", "--add-bos"], "--add-bos: NullTokenizer has"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_told_in_one_line(native, capsys, flags, message):
    code, out, err = run(capsys, "--load", native, *flags)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("error: ") and message in err[0]


def test_a_folder_without_a_tokenizer_says_how_to_name_one(folder, capsys, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder[0], bare, ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = run(capsys, "--load", bare, "--prompt", "5")
    assert code == 2 and "holds neither tokenizer.json nor tokenizer.model" in err[0]
    null = ["--tokenizer-type", "NullTokenizer", "--max-new-tokens", 3]
    code, out, _ = run(capsys, "--load", bare, "--prompt", "5", *null)
    assert code == 0 and [int(word) for word in out.split()] == [5, *continued(folder[1], [5], 3)]


def test_a_run_that_was_trained_here_speaks_with_its_own_tokenizer_and_no_other(gloo, folder, capsys, tmp_path):
    shutil.copy(folder[0] / "tokenizer.json", tmp_path)
    save, tokenizer = str(tmp_path / "run"), tmp_path / "tokenizer.json"
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    gloo.run(1, trained, flags={**SMALL, "save": save, "train_iters": 1, **named})
    flags = ["--load", save, "--prompt", "w7 w8", "--max-new-tokens", 6]
    code, out, _ = run(capsys, *flags)
    assert code == 0 and out.startswith("w7 w8")
    tokenizer.write_text(tokenizer.read_text().replace('"w7"', '"w777"'))
    code, out, err = run(capsys, *flags)
    assert (code, out, len(err)) == (2, "", 1)
    assert "was trained with another tokenizer than" in err[0]
    assert run(capsys, *flags, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer)[0] == 0


TEXT = "def total(x):\n    return x + 1  # Größe, 日本語, 🙂\n\n\tif x:\r\n  the the tower" * 2


@pytest.fixture(scope="module", params=["sentencepiece", "byte-level", "bytes"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        train_sentencepiece([TEXT] * 3, folder / "m.model", 320, limit_bytes=10_000)
        return SentencePieceTokenizer(folder / "m.model")
    return HuggingFaceTokenizer(byte_level(folder / "made") / "tokenizer.json")


def test_the_parts_are_the_whole(tokenizer):
    ids = tokenizer.tokenize(TEXT)
    for start in (0, 1, 3, 11, len(ids) // 2):
        while "�" in tokenizer.detokenize(ids[:start]):
            start += 1
        stream = TextStream(tokenizer, ids[:start])
        parts = [stream.add(token) for token in ids[start:]]
        assert tokenizer.detokenize(ids[:start]) + "".join(parts) + stream.rest() == TEXT
        assert "�" not in "".join(parts)
        assert sum(map(bool, parts)) > len(parts) // 2
        assert stream.rest() == ""


def test_the_end_of_a_document_has_no_text_and_text_goes_on_behind_it(tokenizer):
    ids = tokenizer.tokenize("the tower")
    stream = TextStream(tokenizer, ids)
    parts = [stream.add(token) for token in [tokenizer.eod, *ids]]
    assert parts[0] == ""
    assert "".join(parts) + stream.rest() == tokenizer.detokenize([*ids, tokenizer.eod, *ids])[len("the tower") :]


def test_numbers_have_a_space_between_them_and_a_character_that_is_not_ended_is_told_at_the_end():
    stream = TextStream(NullTokenizer(50), [7])
    assert [stream.add(token) for token in (1, 22, 3)] == [" 1", " 22", " 3"]
    stream = TextStream(ByteTokenizer(), b"ab")
    assert [stream.add(byte) for byte in "cé".encode()[:-1]] == ["c", ""]
    assert stream.rest() == "�"
