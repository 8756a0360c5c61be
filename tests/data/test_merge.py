"""Merging: the bytes of preprocessing all inputs together, of data that fit together only."""

import json
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.index_file import open_index, read_sidecar
from megatron_moe_tools.prepare.merge import main, merge
from tests.data.prepared import dataset_bytes, run


def write(folder: Path, name: str, first: int, count: int, **changes: object) -> str:
    """A dataset of documents with several sequences, and two lines that are none; returns the prefix of `more`."""
    lines = [
        json.dumps({"text": f"text {i}", "more": [f"{i}", "ab" * i][: i % 2 + 1]}) for i in range(first, first + count)
    ]
    source = folder / f"{name}.jsonl"
    source.write_text("\n".join([*lines, "bad", ""]) + "\n")
    return dataset(source, folder / name, **changes)


def dataset(source: Path, prefix: Path, **changes: object) -> str:
    run(source, prefix, json_keys=("text", "more"), on_bad_line="skip", **changes)
    return f"{prefix}_more_document"


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    return [write(tmp_path, name, first, count) for name, first, count in (("a", 0, 5), ("c", 5, 9), ("b", 14, 1))]


def test_the_bytes_are_those_of_preprocessing_all(three, tmp_path):
    joined = tmp_path / "all.jsonl"
    joined.write_bytes(b"".join((tmp_path / f"{name}.jsonl").read_bytes() for name in "acb"))
    expected = dataset(joined, tmp_path / "all")
    assert main(["--input", *three, "--output-prefix", f"{tmp_path}/merged"]) == 0
    suffixes = (".bin", ".idx", ".json")
    assert dataset_bytes(tmp_path / "merged", *suffixes) == dataset_bytes(expected, *suffixes)
    assert read_sidecar(f"{tmp_path}/merged").rejected == {"invalid JSON": 3, "empty line": 3}
    assert not list(tmp_path.glob(".merged*"))


@pytest.mark.engine
def test_a_folder_is_merged_as_megatrons_tool_does(three, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for prefix in three:
        for suffix in (".bin", ".idx"):
            (folder / f"{Path(prefix).name}{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=open_index(three[0]).dtype.type)
    for prefix in sorted(three):
        builder.add_index(prefix)
    builder.finalize(f"{tmp_path}/theirs.idx")
    for number, given in enumerate(([str(folder)], [f"{folder}/*_more_document"], [f"{folder}/*.idx"])):
        merge(given, f"{tmp_path}/ours{number}")
        assert dataset_bytes(f"{tmp_path}/ours{number}") == dataset_bytes(tmp_path / "theirs")
        assert read_sidecar(f"{tmp_path}/ours{number}") is None  # as theirs have none


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"append_eod": False}, "append_eod"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 300}, "tokenizer"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 70_000}, "int32"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, words, three, tmp_path):
    if "vocab_size" in changes:
        (tmp_path / "x.jsonl").write_text('{"text": "1 2"}\n')
        other = run(tmp_path / "x.jsonl", tmp_path / "x", **changes)
    else:
        other = write(tmp_path, "x", 0, 3, **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        merge([*three, other], f"{tmp_path}/merged")
    assert other in str(caught.value)
    assert not list(tmp_path.glob("merged*"))


def test_a_dataset_without_its_facts_and_an_output_that_is_there_are_refused(three, tmp_path):
    output = f"{tmp_path}/merged"
    Path(f"{three[1]}.json").rename(tmp_path / "aside")
    with pytest.raises(ConfigError, match=r"c_more_document\.json is missing"):
        merge(three, output)
    (tmp_path / "aside").rename(f"{three[1]}.json")
    merge(three[:1], output)
    with pytest.raises(ConfigError, match="--overwrite"):
        merge(three, output)
    assert merge(three, output, overwrite=True).num_documents == 15


def test_a_dataset_that_changed_after_it_was_written_is_refused(three, tmp_path, capsys):
    content = Path(f"{three[1]}.bin").read_bytes()
    Path(f"{three[1]}.bin").write_bytes(content[:10] + bytes([content[10] ^ 1]) + content[11:])
    assert main(["--input", *three, "--output-prefix", f"{tmp_path}/merged"]) == 1
    assert f"{three[1]}.bin" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))


def test_a_full_disk_is_refused_before_the_copy(three, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_moe_tools.prepare.dataset_files.free_bytes", lambda folder: 10)
    with pytest.raises(ConfigError, match="needs .* more, 10 bytes are free"):
        merge(three, f"{tmp_path}/merged")


def test_multimodal_data_are_refused(three, tmp_path):
    with open(f"{three[0]}.idx", "ab") as file:
        file.write(b"\0" * len(open_index(three[0]).lengths))
    Path(f"{three[0]}.json").unlink()
    with pytest.raises(ConfigError, match="multimodal"):
        merge(three[:1], f"{tmp_path}/merged")
