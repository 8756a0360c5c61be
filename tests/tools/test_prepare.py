"""Preprocessing as Megatron-LM's tool does it: its flags, its bytes, and the data that it wrote."""

import json
from pathlib import Path

import numpy
import pytest
import tokenizers
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_moe.data.index_file import open_index, read_sidecar
from megatron_moe_tools.prepare.preprocess import main

LINES: list[dict] = [
    {"text": f"text {i} " * (i % 5 + 1), "n": i, "more": [f"one {i}", "", "two", "three"][: i % 4 + 1]}
    for i in range(23)
]
KEYS = ("text", "more")


def in_bytes(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def jsonl(tmp_path):
    def write(lines: list, name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def megatron_writes(prefix, lines, tokenize, eod, vocab_size, order):
    """Write what Megatron-LM's tool writes: the engine's builder, a document a line, in the order of its partitions."""
    for key in KEYS:
        name = f"{prefix}_{key}_document"
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=DType.optimal_dtype(vocab_size))
        for i in order:
            value = lines[i][key]
            sequences = [ids for text in ([value] if isinstance(value, str) else value) if (ids := tokenize(text))]
            lengths = [len(ids) for ids in sequences]
            if eod is not None and lengths:
                sequences[-1] = [*sequences[-1], eod]
                lengths[-1] += 1
            builder.add_document([i for ids in sequences for i in ids], lengths)
        builder.finalize(f"{name}.idx")


def in_partitions(count: int, partitions: int) -> list[int]:
    return [i for part in range(partitions) for i in range(part, count, partitions)]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ("--workers 1 --partitions 4 --log-interval 10", in_partitions(23, 4)),
        ("--append-eod --workers 2 --partitions 2", in_partitions(23, 2)),
        ("--append-eod --workers 1 --partitions 4 --keep-sequential-samples", in_partitions(23, 1)),
    ],
)
def test_the_bytes_are_those_of_megatrons_tool(flags, order, jsonl, tmp_path):
    source = jsonl(LINES)
    eod = 256 if "--append-eod" in flags else None
    (tmp_path / "theirs").mkdir()
    megatron_writes(tmp_path / "theirs" / "d", LINES, in_bytes, eod, 257, order)
    command = f"--input {source} --output-prefix {tmp_path}/ours/d --json-keys text more --tokenizer-type ByteTokenizer"
    assert main([*command.split(), *flags.split()]) == 0
    theirs = sorted((tmp_path / "theirs").iterdir())
    assert len(theirs) == 4
    for file in theirs:
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes(), file.name


def test_gpt2_data_has_the_bytes_of_transformers_ids(jsonl, tmp_path):
    from transformers import GPT2TokenizerFast

    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "te", "xt", "text", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt e\nx t\nte xt\n")
    expected = GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    (tmp_path / "theirs").mkdir()
    megatron_writes(tmp_path / "theirs" / "d", LINES, expected.encode, 259, len(expected), list(range(23)))
    command = f"--input {jsonl(LINES)} --output-prefix {tmp_path}/d --json-keys text more --append-eod --workers 1"
    files = f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    assert main(f"{command} --tokenizer-type GPT2BPETokenizer {files}".split()) == 0
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    facts = read_sidecar(f"{tmp_path}/d_more_document")
    assert facts is not None
    assert (facts.tokenizer_type, facts.eod, facts.vocab_size, facts.documents) == ("GPT2BPETokenizer", 259, 260, 23)


@pytest.mark.parametrize("vocab_size", [257, 70_000])
def test_what_megatron_wrote_is_read(vocab_size, tmp_path):
    lines = [*LINES[:5], {"text": "", "more": []}, *LINES[5:]]
    megatron_writes(tmp_path / "d", lines, in_bytes, None, vocab_size, list(range(len(lines))))
    for key in KEYS:
        index = open_index(f"{tmp_path}/d_{key}_document")
        dataset = IndexedDataset(index.prefix)
        texts = [text.encode() for line in lines for text in ([line[key]] if key == "text" else line[key]) if text]
        assert index.dtype == (numpy.int32 if vocab_size == 70_000 else numpy.uint16)
        assert [bytes(dataset[i].tolist()) for i in range(len(dataset))] == texts
        assert index.num_documents == len(lines) and index.documents[5] == index.documents[6]
        assert index.documents.tolist() == dataset.document_indices.tolist()


def test_special_tokens_of_a_tokenizer_file_are_added_only_where_that_is_asked_for(jsonl, tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    command = f"--input {jsonl([{'text': 'a'}])} --append-eod --workers 1 --output-prefix {tmp_path}/".split()
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    extra = "--tokenizer-hf-include-special-tokens"
    for name, flags, ids in (
        ("plain", kind, [0, 2]),
        ("plainly", [*kind, "--tokenizer-hf-no-include-special-tokens"], [0, 2]),
        ("more", [*kind, extra], [1, 0, 2]),
    ):
        assert main([*command[:-1], command[-1] + name, *flags]) == 0
        dataset = IndexedDataset(f"{tmp_path}/{name}_text_document")  # it owns the memory of its documents
        assert dataset[0].tolist() == ids
    assert main([*command[:-1], command[-1] + "x", "--tokenizer-type", "ByteTokenizer", extra]) == 2


def test_a_pattern_of_inputs_is_its_files_in_sorted_order(jsonl, tmp_path):
    for name in ("b.jsonl", "a.jsonl", "[c].jsonl"):
        jsonl([{"text": name}], name)
    inputs = ["--input", f"{tmp_path}/[ab].jsonl", f"{tmp_path}/[c].jsonl", "--output-prefix", f"{tmp_path}/o"]
    assert main([*inputs, "--tokenizer-type", "ByteTokenizer", "--workers", "1"]) == 0
    dataset = IndexedDataset(f"{tmp_path}/o_text_document")
    assert [bytes(dataset[i].tolist()) for i in range(3)] == [b"a.jsonl", b"b.jsonl", b"[c].jsonl"]


def test_flags_of_megatrons_tool_that_change_nothing_here_are_named(jsonl, tmp_path, capsys):
    flags = "--workers 1 --lang german --dataset-impl mmap --trust-remote-code --tokenizer-type NullTokenizer"
    source = jsonl([{"text": "1 2"}])
    assert main(f"--input {source} --output-prefix {tmp_path}/o {flags} --vocab-size 9".split()) == 0
    said = capsys.readouterr().err
    assert "ignored: --lang german" in said and "--dataset-impl mmap" in said and "--trust-remote-code" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--split-sentences", ["--split-sentences", "list of texts"]),
        ("--find-optimal-num-workers --workers-to-check 1 2", ["2 flags", "--find-optimal", "--workers-to-check"]),
        ("--vision-pretraining-type x", ["--vision-pretraining-type: is a flag of training"]),
        ("--tokenizer-name x", ["--tokenizer-name", "--tokenizer-model"]),
        ("--tokenizer-type BertWordPieceCase", ["BertWordPieceCase", "HuggingFaceTokenizer"]),
        ("--tokenizer-type Llama2Tokenizer", ["SentencePieceTokenizer", "--tokenizer-model PATH"]),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v", ["--merge-file PATH"]),
        ("--tokenizer-type ByteTokenizer --partitions 0", ["--partitions 0"]),
        ("--tokenizer-type ByteTokenizer --log-interval 0", ["--log-interval 0"]),
    ],
)
def test_other_flags_of_megatron_are_answered(flags, words, jsonl, tmp_path, capsys):
    assert main(f"--input {jsonl(LINES)} --output-prefix {tmp_path}/o {flags}".split()) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
