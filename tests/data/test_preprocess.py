"""Preprocessing: the same datasets however the work is cut, nothing half written, errors that name file and line."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.index_file import open_index, read_sidecar
from megatron_moe.data.tokenizers import SentencePieceTokenizer
from megatron_moe_tools.prepare.inputs import find_inputs, plan_shards, read_span
from megatron_moe_tools.prepare.preprocess import main
from tests.data.prepared import dataset_bytes, run

TEXTS = [f"document {i}: " + "päyload \n" * (i % 17) for i in range(200)]


def documents(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_the_engine_reads_back_every_document_in_order(write_jsonl, tmp_path):
    prefix = run([write_jsonl(TEXTS)], tmp_path / "out")
    assert prefix == str(tmp_path / "out_text_document")
    assert documents(prefix) == [[*text.encode(), 256] for text in TEXTS]
    assert IndexedDataset(prefix).document_indices.tolist() == list(range(len(TEXTS) + 1))
    prefix = run([write_jsonl(TEXTS)], tmp_path / "without", append_eod=False)
    assert documents(prefix) == [list(text.encode()) for text in TEXTS]


def test_many_workers_and_small_units_write_the_same_bytes(write_jsonl, tmp_path, shards_of):
    source = write_jsonl(TEXTS)
    alone = run([source], tmp_path / "alone")
    shards_of(500)
    assert len(plan_shards([source], 500)) > 30  # more shards than the window of submitted ones holds
    together = run([source], tmp_path / "together", workers=2)
    assert dataset_bytes(alone, ".bin", ".idx", ".json") == dataset_bytes(together, ".bin", ".idx", ".json")


@pytest.mark.parametrize("shard_bytes", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("last_newline", [True, False])
def test_every_line_belongs_to_exactly_one_shard(write_jsonl, shard_bytes, last_newline):
    texts = TEXTS[:20] if shard_bytes < 10 else TEXTS
    path = write_jsonl(texts)
    if not last_newline:
        with open(path, "rb+") as file:
            file.truncate(os.path.getsize(path) - 1)
    shards = plan_shards([path], shard_bytes)
    found = [record.values[0] for shard in shards for span in shard for record in read_span(span, ("text",))]
    assert found == texts


def test_folders_and_text_files_are_one_document_a_file_in_sorted_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.txt", "a.py", "sub/c.md", ".skip", ".hidden/x.txt"):
        (folder / name).write_bytes(name.encode() + b"\r\n")
    (tmp_path / "last.jsonl").write_text('{"text": "json"}\n')
    prefix = run([str(folder), str(tmp_path / "last.jsonl")], tmp_path / "out", append_eod=False)
    assert [bytes(d) for d in documents(prefix)] == [b"a.py\r\n", b"b.txt\r\n", b"sub/c.md\r\n", b"json"]


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, "uint16"), (65_499, "uint16"), (65_500, "int32"), (200_000, "int32")]
)
def test_the_vocabulary_chooses_the_dtype(write_ids, vocab_size, dtype):
    ids = [[0, 1, vocab_size - 2], [5]]
    prefix = write_ids(ids, vocab_size=vocab_size)
    assert open_index(prefix).dtype == numpy.dtype(dtype)
    assert documents(prefix) == ids


def test_the_sidecar_says_what_the_files_are(write_jsonl, tmp_path):
    prefix = run([write_jsonl(TEXTS)], tmp_path / "out")
    facts = read_sidecar(prefix)
    ids = [i for document in documents(prefix) for i in document]
    assert (facts.tokens, facts.documents, facts.min_id, facts.max_id) == (len(ids), len(TEXTS), min(ids), 256)
    assert (facts.eod, facts.append_eod, facts.vocab_size) == (256, True, 257)
    for name in ("bin", "idx"):
        content = Path(f"{prefix}.{name}").read_bytes()
        assert getattr(facts, f"{name}_sha256") == hashlib.sha256(content).hexdigest()
        assert getattr(facts, f"{name}_bytes") == len(content)


LINES = ['{"text": "one"}', '{"text": "two"}', '{"text": "three"}']
BAD = [
    (b'{"text": "cut', "no valid JSON"),
    (b'{"text": "caf\xe9"}', "invalid UTF-8, byte 0xe9"),
    (b'{"content": "x"}', "'text' is missing"),
    (b"", "the line is empty"),
]


@pytest.mark.parametrize("bad, words", BAD)
def test_a_bad_line_is_named_and_nothing_is_written(bad, words, tmp_path, shards_of):
    shards_of(20)
    source = tmp_path / "in.jsonl"
    source.write_bytes("\n".join(LINES).encode() + b"\n" + bad + b"\n" + LINES[0].encode() + b"\n")
    (tmp_path / "good.jsonl").write_text(LINES[0] + "\n")
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 4: .*skip leaves it out") as caught:
        run([str(tmp_path / "good.jsonl"), str(source)], tmp_path / "new" / "out")
    assert words in str(caught.value)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".out.parts"]  # with the part of the first file
    still_open = {os.path.realpath(number) for number in Path("/proc/self/fd").iterdir()}
    assert not [file for file in still_open if file.startswith(str(tmp_path))]


def test_workers_that_are_ended_leave_nothing_unfinished(tmp_path, shards_of):
    shards_of(3000)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"bad\n" + b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS * 20))
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 1: "):
        run([str(source)], tmp_path / "out", workers=2)
    parts = tmp_path / ".out.parts" / "parts"
    assert not [path.name for path in (parts.iterdir() if parts.exists() else ()) if "." in path.name]


def test_bytes_that_are_no_text_and_a_text_that_gives_no_ids_are_named_with_their_line(write_jsonl, tmp_path):
    (tmp_path / "t.txt").write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(ConfigError, match=r"t\.txt, line 3: invalid UTF-8, byte 0xff at offset 11"):
        run([str(tmp_path / "t.txt")], tmp_path / "out")
    for texts, words in ((["1 2", "3 99"], "line 2: .*99"), ([" "], "line 1: the text gives no tokens")):
        with pytest.raises(ConfigError, match=rf"input\.jsonl, {words}"):
            run([write_jsonl(texts)], tmp_path / "out", tokenizer_type="NullTokenizer", vocab_size=10)


def test_existing_outputs_are_kept_unless_overwriting_is_asked_and_succeeds(write_jsonl, tmp_path):
    def outputs() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("out")}

    prefix = run([write_jsonl(TEXTS)], tmp_path / "out")
    before = outputs()
    with pytest.raises(ConfigError, match="--overwrite"):
        run([write_jsonl(["new"])], tmp_path / "out")
    with pytest.raises(ConfigError, match="empty"):
        run([write_jsonl(["fine", ""], "bad.jsonl")], tmp_path / "out", overwrite=True)
    assert outputs() == before
    run([write_jsonl(["new"])], tmp_path / "out", overwrite=True)
    assert documents(prefix) == [[*b"new", 256]]


def test_a_crash_between_the_renames_leaves_no_dataset_that_opens(write_jsonl, tmp_path, monkeypatch):
    prefix = run([write_jsonl(TEXTS)], tmp_path / "out")
    rename = os.replace
    for survivors in (0, 1, 2):
        left = iter(range(survivors))

        def crash(source: str, target: str, left: Iterator[int] = left) -> None:
            if Path(target).name.startswith("out_") and next(left, None) is None:
                raise OSError("power cut")
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            with pytest.raises(OSError, match="power cut"):
                run([write_jsonl(["new text"])], tmp_path / "out", overwrite=True)
        with pytest.raises(ConfigError, match=r"\.idx does not exist"):
            open_index(prefix)
        run([write_jsonl(TEXTS)], tmp_path / "out", overwrite=True)
        assert len(documents(prefix)) == len(TEXTS)


def test_empty_inputs_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="without files"):
        find_inputs([str(tmp_path / "folder")])
    (tmp_path / "folder" / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.txt, line 1: the file is empty"):
        find_inputs([str(tmp_path / "folder")])


def test_the_command_trains_a_tokenizer_and_uses_it(write_jsonl, tmp_path, capsys):
    source, model, prefix = write_jsonl(TEXTS), str(tmp_path / "m.model"), str(tmp_path / "out")
    flags = ["--input", source, "--output-prefix", prefix, "--append-eod", "--workers", "1"]
    assert main([*flags, "--train-tokenizer", "--tokenizer-vocab-size", "300", "--tokenizer-model", model]) == 0
    assert "200 documents" in capsys.readouterr().out
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.vocab_size == 300
    assert [tokenizer.detokenize(ids) for ids in documents(prefix + "_text_document")] == TEXTS
    assert all(ids[-1] == tokenizer.eod for ids in documents(prefix + "_text_document"))
    assert read_sidecar(prefix + "_text_document").tokenizer_sha256 == tokenizer.sha256


def test_a_broken_sidecar_is_refused_by_name(write_jsonl, tmp_path):
    prefix = run([write_jsonl(TEXTS)], tmp_path / "out")
    path = Path(prefix + ".json")
    good = json.loads(path.read_text())
    for bad in ("", "[]", "{", json.dumps({**good, "format": 2}), json.dumps({**good, "tokens": "7"})):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"out_text_document\.json"):
            read_sidecar(prefix)
    path.write_text(json.dumps({k: v for k, v in good.items() if k != "max_id"}))
    with pytest.raises(ConfigError, match="max_id is missing"):
        read_sidecar(prefix)
    path.unlink()
    assert read_sidecar(prefix) is None
