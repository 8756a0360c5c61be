"""The ids of a Hugging Face folder are those of transformers, which is installed or not, or it is refused."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_moe.config.errors import ConfigError
from megatron_moe.data import hugging_face_folder
from megatron_moe.data.tokenizers import HuggingFaceTokenizer
from tests.data.prepared import byte_level_bpe

CORPUS = ["def f(x):\n    return x + 1\n", "the quick brown fox, café 日本語 🙂 it's WE'LL 12345 "]
TEXTS = [
    "", " ", "\n", "  a", "a  ", "the thes", "Think think", "cafe\u0301 ﬁ",
    "👩‍🚀", "\u2581 a", "\u00a0", "<0x41>", "\x00",
]  # fmt: skip
BITS = [
    "<a>", "<A>", "<b>", "</s>", "<s>", "<unk>", "<end>", " <end> ", "<pad>", "<PAD>", "<x>", "[CLS]", "the", " the",
    "Word", "sWord", "\n\n", "  ", "é", "日", "!", "x+1", "0", "'s", "\u2581", "def f",
]  # fmt: skip
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
SPECIAL, MODEL = hugging_face_folder.SPECIAL, "config.json"
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<end>", "pad_token": "<end>", "unk_token": None}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
PIECES = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}


PLAIN = {"alone", "plain", "no class", "qwen", "mixtral", "deepseek"}
REFUSED = {"own code": 2, **dict.fromkeys(
    ("prefix", "neox", "qwen by its model", "qwen with less", "llama", "list with a hole"), 1
)}  # fmt: skip
"""Folders that are refused: 1 without transformers, 2 always."""


def by_bytes(**changes: Any) -> Tokenizer:
    model = byte_level_bpe(CORPUS * 20)
    model.add_special_tokens(["<end>"])
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(hugging_face_folder._QWEN_SPLIT), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    return by_bytes(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence([split, letters]))


def pieces(added: bool = True) -> Tokenizer:
    """As older files of Llama and Mixtral are: the space before a text is of the normalizer."""
    special = ["<unk>", "<s>", "</s>"]
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))]
    )
    model.train_from_iterator([text.replace(" ", "\u2581") for text in CORPUS * 20], trainer)
    model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    said = json.loads(model.to_str())
    return Tokenizer.from_str(json.dumps({**said, "added_tokens": said["added_tokens"][: 3 * added]}))


def lower() -> Tokenizer:
    model = by_bytes(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    model.add_tokens([AddedToken("Think", normalized=True)])
    return model


def truncating() -> Tokenizer:
    model = by_bytes()
    model.enable_truncation(3)
    model.enable_padding(length=7, pad_token="!")
    return model


def token(content: str, special: bool = False, **flags: bool) -> dict[str, Any]:
    said = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **said, **flags}


def listed(**tokens: Any) -> dict[str, Any]:
    """A list of added tokens by the distance of their ids from the first free one."""
    return {"added_tokens_decoder": tokens}


QWEN_LIST = {"_-1": token("<end>", True), "<|endoftext|>": token("<|endoftext|>", True)}
Folder = tuple[Callable[[], Tokenizer], dict[str, Any], dict[str, Any]]
FOLDERS: dict[str, Folder] = {
    "alone": (by_bytes, {}, {}),
    "plain": (by_bytes, FAST, {}),
    "no class": (by_bytes, {"eos_token": "<end>"}, {}),
    "listed": (by_bytes, {**FAST, **listed(_0=token("<a>", True), _1=token("<A>"))}, {}),
    "with flags": (by_bytes, {**FAST, **listed(_0=token("<a>", lstrip=True), _1=token("Word", single_word=True))}, {}),
    "listed anew": (by_bytes, {**FAST, **listed(**{"_-1": token("<end>", True, lstrip=True, rstrip=True)})}, {}),
    "listed piece": (by_bytes, {**FAST, **listed(the=token("the"))}, {}),
    "additional special": (by_bytes, {**FAST, "additional_special_tokens": ["<a>", "<b>"], "pad_token": "<pad>"}, {}),
    "extra list": (by_bytes, {**FAST, "extra_special_tokens": ["<b>"]}, {}),
    "extra object": (by_bytes, {**FAST, "extra_special_tokens": {"image_token": "<x>"}, "boi_token": "<b>"}, {}),
    "special map": (
        by_bytes, {"tokenizer_class": "PreTrainedTokenizerFast"},
        {SPECIAL: {"eos_token": token("<end>"), "pad_token": "<pad>", "additional_special_tokens": ["<x>"]}},
    ),
    "special map and list": (by_bytes, {**FAST, **listed(_0=token("<a>"))}, {SPECIAL: {"pad_token": "<pad>"}}),
    "added_tokens.json": (by_bytes, {**FAST, "pad_token": "<b>"}, {"added_tokens.json": {"<b>": 1, "<a>": 0}}),
    "prefix": (by_bytes, {**FAST, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
    "neox": (by_bytes, {**FAST, "tokenizer_class": "GPTNeoXTokenizerFast"}, {}),
    "text as text": (by_bytes, {**FAST, "split_special_tokens": True}, {}),
    "qwen": (qwen, QWEN, {MODEL: {"model_type": "qwen3_moe"}}),
    "qwen with more": (qwen, {**QWEN, **listed(**QWEN_LIST, _0=token("<a>"))}, {}),
    "qwen with less": (qwen, {**QWEN, **listed(_0=token("<a>"))}, {}),
    "qwen by its model": (by_bytes, {}, {MODEL: {"model_type": "qwen3_moe"}}),
    "mixtral": (pieces, LLAMA, {MODEL: {"model_type": "mixtral"}}),
    "llama": (pieces, LLAMA, {}),
    "deepseek": (by_bytes, {**LLAMA, "bos_token": None, "eos_token": "<end>"}, {MODEL: {"model_type": "deepseek_v3"}}),
    "roles of pieces": (lambda: pieces(added=False), {**PIECES, "bos_token": "<s>"}, {}),
    "lower case": (lower, {**FAST, "pad_token": "<PAD>", **listed(_0=token("<A>", normalized=True))}, {}),
    "truncating": (truncating, FAST, {}),
    "own code": (by_bytes, {**FAST, "auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}, {}),
    "list with a hole": (by_bytes, {**FAST, **listed(_5=token("<a>"))}, {}),
}  # fmt: skip


def write(folder: Path, made: Folder) -> None:
    model, settings, others = made[0](), dict(made[1]), dict(made[2])
    free = model.get_vocab_size()
    model.save(str(folder / "tokenizer.json"))
    if "added_tokens_decoder" in settings:
        places = settings["added_tokens_decoder"].items()
        ids = ((free + int(name[1:]) if name[0] == "_" else model.token_to_id(name), said) for name, said in places)
        settings["added_tokens_decoder"] = {str(number): said for number, said in ids}
    if "added_tokens.json" in others:
        others["added_tokens.json"] = {name: free + place for name, place in others["added_tokens.json"].items()}
    if settings:
        others["tokenizer_config.json"] = settings
    for name, content in others.items():
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_are_those_of_transformers_or_refused(tmp_path, monkeypatch, kind):
    from transformers import AutoTokenizer

    write(tmp_path, FOLDERS[kind])
    rng = random.Random(kind)
    texts = TEXTS + ["".join(rng.choices(BITS, k=rng.randrange(1, 9))) for _ in range(300)]
    made = []
    for there in (True, False):
        monkeypatch.setattr(hugging_face_folder, "has_transformers", lambda there=there: there)
        try:
            made.append(HuggingFaceTokenizer(tmp_path))
        except ConfigError as error:
            assert str(tmp_path) in str(error)
    assert len(made) == 2 - REFUSED.get(kind, 0)
    if not made:
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    expected = [theirs.encode(text, add_special_tokens=False) for text in texts]
    for tokenizer in (*made, pickle.loads(pickle.dumps(made[0]))):
        assert [tokenizer.tokenize(text) for text in texts] == expected
        assert tokenizer.vocab_size == len(theirs) and theirs.eos_token_id in (None, tokenizer.eod)
        assert theirs.bos_token_id in (None, tokenizer.bos)
    assert len({tokenizer.sha256 for tokenizer in made}) == 1
    # A dataset of an older version, which read tokenizer.json alone, is taken where no text can differ.
    assert (made[0].sha256 == made[0].sha256_of_file) == (kind in PLAIN)
    assert "tokenizer.json alone" in made[0].remedy(made[0].sha256_of_file) and made[0].remedy("0") == ""


def test_older_files_are_read_by_transformers_alone(tmp_path, monkeypatch):
    byte_level_bpe(CORPUS).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**FAST, "tokenizer_class": "GPT2Tokenizer"}))
    made = HuggingFaceTokenizer(tmp_path)
    assert made.tokenize("a<end>")[-1] == made.eod == made.vocab_size - 1 and made.sha256_of_file is None
    monkeypatch.setattr(hugging_face_folder, "has_transformers", lambda: False)
    with pytest.raises(ConfigError, match="pip install transformers"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "settings", ["[", "[]", {"added_tokens_decoder": {"x": token("<a>")}}, {"added_tokens_decoder": {"900": "<a>"}},
                 {"extra_special_tokens": [token("<a>")]}, {"eos_token": {"content": "<end>"}}],
)  # fmt: skip
def test_settings_that_transformers_does_not_read_are_refused_by_folder(tmp_path, monkeypatch, settings, there):
    monkeypatch.setattr(hugging_face_folder, "has_transformers", lambda: there)
    by_bytes().save(str(tmp_path / "tokenizer.json"))
    content = settings if isinstance(settings, str) else json.dumps({**FAST, **settings})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        HuggingFaceTokenizer(tmp_path)
