"""What preprocessing reads: compressed files, tables, folders of Hugging Face's, and how it says what it does not."""

import gzip
import importlib.util
import json
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.prepare.inputs import (
    LARGEST_SHARD,
    SMALLEST_SHARD,
    InputRecord,
    Span,
    find_inputs,
    plan_shards,
    read_span,
)
from tests.data.odd_texts import line, packed_by_zstd

TEXTS = [f"text {i} é" for i in range(50)]
LINES = b"\n".join(map(line, TEXTS)) + b"\n"


def records(path: Path, keys: tuple[str, ...] = ("text",)) -> list[InputRecord]:
    return [record for shard in plan_shards([str(path)]) for span in shard for record in read_span(span, keys)]


def texts(path: Path, key: str = "text") -> list[object]:
    return [record.bad.reason if record.bad else record.values[0] for record in records(path, (key,))]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_table(path: Path, table: pyarrow.Table, kind: str = "parquet", rows: int | None = None) -> None:
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return
    make = pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def find(path: Path) -> list[str]:
    return find_inputs([str(path)])


def refuse(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find(path)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("", bytes),
        (".gz", lambda content: gzip.compress(content[:99]) + gzip.compress(content[99:])),
        (".zst", packed_by_zstd),
    ],
)
def test_lines_are_read_however_they_are_packed(suffix, pack, mark, end, tmp_path):
    content = mark + LINES.replace(b"\n", end)
    assert texts(write(tmp_path / f"a.jsonl{suffix}", pack(content))) == TEXTS
    assert texts(write(tmp_path / f"b.json{suffix}", pack(content.rstrip(b"\r\n")))) == TEXTS
    assert texts(write(tmp_path / f"c.txt{suffix}", pack(mark + b"a" + end))) == [(b"a" + end).decode()]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_each_cut_of_a_compressed_file_is_seen(suffix, tmp_path):
    """The lines before the cut are read, and what is left is one bad record."""
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    whole = pack(LINES[:400]) + pack(LINES[400:])
    boundary = len(pack(LINES[:400]))
    for size in range(1, len(whole), 7):
        found = texts(write(tmp_path / f"a.jsonl.{suffix}", whole[:size]))
        if size == boundary:
            continue
        assert found[-1] in ("cut file", "damaged file"), size
        assert found[:-1] == TEXTS[: len(found) - 1]
    damaged = bytearray(whole)
    damaged[boundary // 2] ^= 255
    found = texts(write(tmp_path / f"a.jsonl.{suffix}", bytes(damaged)))
    assert any(text not in TEXTS for text in found)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz"])
def test_a_file_in_another_encoding_is_named_once(encoding, name, tmp_path):
    content = LINES.decode().encode(encoding)
    found = records(write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content))
    assert [record.bad.reason for record in found] == [encoding[:6].upper()] and "iconv" in found[0].bad.problem


def test_capitals_and_other_usual_names_say_the_same(tmp_path):
    for name in ("a.JSONL", "b.ndjson", "c.jsonlines", "d.Json"):
        assert texts(write(tmp_path / name, LINES)) == TEXTS, name
    assert texts(write(tmp_path / "e.NDJSON.GZ", gzip.compress(LINES))) == TEXTS
    assert texts(write(tmp_path / "f.jsonl.ZST", zstandard.compress(LINES))) == TEXTS
    write_table(tmp_path / "g.PARQUET", pyarrow.table({"text": TEXTS}))
    assert texts(tmp_path / "g.PARQUET") == TEXTS
    refuse(write(tmp_path / "a.ZIP", b"x"), "a.ZIP")


def test_a_file_of_another_format_than_its_name_says_is_named_once(tmp_path):
    write_table(tmp_path / "table", pyarrow.table({"text": TEXTS}))
    contents = {
        "a.jsonl": gzip.compress(LINES), "b.jsonl": zstandard.compress(LINES), "c.txt": gzip.compress(LINES),
        "d.json": (tmp_path / "table").read_bytes(), "e.jsonl.gz": gzip.compress(gzip.compress(LINES)),
    }  # fmt: skip
    for name, content in contents.items():
        assert texts(write(tmp_path / name, content)) == ["other format"], name
    assert texts(write(tmp_path / "f.txt", b"PAR1 is how a text may begin")) == ["PAR1 is how a text may begin"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_are_no_texts_are_named(suffix, tmp_path):
    """Also those whose values Python has not, such as nanoseconds, and two of one name."""
    number, ns, us = pyarrow.array([1]), pyarrow.timestamp("ns"), pyarrow.timestamp("us")
    columns = [pyarrow.array([1], ns), pyarrow.array([1 << 62], us), number, number]
    table = pyarrow.table(columns, names=["ns", "far", "twice", "twice"])
    path = tmp_path / f"a.{suffix}"
    write_table(path, table, suffix)
    for key in ("ns", "far", "twice"):
        assert texts(path, key) == ["not a text"], key
    (record,) = records(path)
    assert "'ns', 'far', 'twice'" in record.bad.problem


# ---- folders


def test_links_are_followed_and_what_is_no_file_is_refused_or_left_out(tmp_path, capsys):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for path in (folder / "a.jsonl", folder / "x" / "b.jsonl", elsewhere / "c.jsonl"):
        write(path, LINES)
    (folder / "loop").symlink_to(".")
    (folder / "x" / "up").symlink_to("..")
    (folder / "y").symlink_to(elsewhere)
    expected = [str(folder / name) for name in ("a.jsonl", "x/b.jsonl", "y/c.jsonl")]
    assert find(folder) == expected
    assert find(folder / "[ay]*") == [expected[0], expected[2]]
    refuse(folder / "**" / "b.jsonl", r"\*\*")  # which Python would follow through the loops
    os.mkfifo(folder / "pipe")
    (folder / "broken.jsonl").symlink_to("nowhere")
    (folder / "self.jsonl").symlink_to("self.jsonl")
    assert find_inputs([str(folder)], refuse_empty=False) == expected
    said = capsys.readouterr().err
    assert all(name in said for name in ("pipe", "broken.jsonl", "self.jsonl"))
    for name in ("broken.jsonl", "pipe", "self.jsonl"):
        refuse(folder, name)
        (folder / name).unlink()
    refuse(Path("/dev/null"), "regular file")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow file"])
def test_tables_are_read_row_by_row(kind, tmp_path):
    column = pyarrow.array([*TEXTS[:3], None, ""])
    lists = pyarrow.array([["a", "b"], ["c"], [], None, [""]])
    invalid = pyarrow.array([b"a", b"b", b"\xff", b"d", b"e"]).view(pyarrow.string())
    table = pyarrow.table({"id": [1, 2, 3, 4, 5], "text": column, "lists": lists, "invalid": invalid})
    path = tmp_path / f"a.{kind.split()[0]}"
    write_table(path, table, kind, rows=2)
    assert texts(path) == [*TEXTS[:3], "not a text", "empty text"]
    assert texts(path, "lists") == [["a", "b"], ["c"], "empty text", "not a text", "empty text"]
    assert texts(path, "invalid") == ["a", "b", "invalid UTF-8", "d", "e"]
    assert [r.bad.reason for r in records(path, ("nothing", "text")) if r.bad] == ["missing key"] * 5
    content = path.read_bytes()
    for size in (10, len(content) // 2, len(content) - 20):
        path.write_bytes(content[:size])
        assert texts(path)[-1] == "damaged file", size


# ---- folders of Hugging Face's


def saved_to_disk(folder: Path, shards: list[list[str]]) -> None:
    """What `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, part in zip(names, shards):
        write_table(folder / name, pyarrow.table({"text": part}), "arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_data_files_in_their_order(tmp_path):
    saved_to_disk(tmp_path / "one", [["a", "b"], ["c"]])
    found = find(tmp_path / "one")
    assert [Path(path).name for path in found] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [text for path in found for text in texts(Path(path))] == ["a", "b", "c"]
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match="00001"):  # also where bad lines are skipped
        find_inputs([str(tmp_path / "one")], refuse_empty=False)
    (tmp_path / "one" / "state.json").write_text("{}")
    refuse(tmp_path / "one", r"state\.json")


def test_of_a_saved_dict_one_split_is_read(tmp_path):
    for split in ("train", "test"):
        saved_to_disk(tmp_path / "dict" / split, [[split]])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refuse(tmp_path / "dict", r"2 splits[\s\S]*dict/train")
    assert [texts(Path(path)) for path in find(tmp_path / "dict" / "train")] == [["train"]]
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert [texts(Path(path)) for path in find(tmp_path / "dict")] == [["test"]]


def test_of_a_download_the_data_files_are_read(tmp_path, capsys):
    hub = tmp_path / "hub"
    write(hub / "README.md", b"---\nlicense: mit\n---\n# A dataset\n")
    write(hub / "LICENSE", b"MIT")
    write(hub / "dataset_infos.json", b"{}")
    write(hub / ".cache" / "huggingface" / "x.jsonl", b"x")
    names = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    (hub / "data").mkdir()
    for name in names:
        write_table(hub / name, pyarrow.table({"text": [name]}))
    assert find(hub) == [str(hub / name) for name in names]
    assert "2 data files are read, 3 others are not" in capsys.readouterr().err
    write(hub / "data" / "validation-00000-of-00001.jsonl.zst", zstandard.compress(LINES))
    refuse(hub, r"2 splits[\s\S]*train: [\s\S]*validation: ")
    for path in (hub / "data").iterdir():
        path.unlink()
    refuse(hub, "dataset of the hub without")
    # any other folder is read as a whole
    write(hub / "README.md", b"# Notes\n")
    assert [Path(path).name for path in find(hub)] == ["LICENSE", "README.md", "dataset_infos.json"]


# ---- what is not read


@pytest.mark.parametrize(
    "name", ["a.jsonl.bz2", "a.xz", "a.zip", "a.tar.gz", "a.parquet.gz", "a.arrow.zst", "a.CSV", "a.tsv.gz", "a.xlsx"]
)
def test_what_is_not_read_is_refused_by_name(name, tmp_path):
    refuse(write(tmp_path / name, b"x"), name)


@pytest.mark.parametrize(("name", "library"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_library_is_named_before_the_work(name, library, tmp_path, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == library else there(wanted))
    refuse(write(tmp_path / name, b"x"), f"pip install {library}")
    find(write(tmp_path / "a.jsonl.gz", b"x"))
    assert library in sys.modules  # the test's own


# ---- shards


def test_shards_cover_the_input_once_in_order(tmp_path):
    names = ["a.jsonl", "b.txt", "c.jsonl", "d.jsonl.gz", "e.txt", "f.txt", "g.txt", "h"]
    sizes = dict(zip(names, (10, 3, 250, 300, 120, 70, 40, 1)))
    files = [str(write(tmp_path / name, b"x" * size)) for name, size in sizes.items()]
    shards = [[(Path(span.path).name, span.start, span.end) for span in shard] for shard in plan_shards(files, 100)]
    assert shards == [
        [("a.jsonl", 0, 10), ("b.txt", 0, 3)],
        [("c.jsonl", 0, 100)], [("c.jsonl", 100, 200)], [("c.jsonl", 200, 250)],
        [("d.jsonl.gz", 0, 300)],
        [("e.txt", 0, 120)],
        [("f.txt", 0, 70), ("g.txt", 0, 40)],
        [("h", 0, 1)],
    ]  # fmt: skip


def test_cuts_stay_where_they_are_while_an_input_grows_a_little(tmp_path):
    path = tmp_path / "a.jsonl"

    def spans(size: int) -> list[Span]:
        with open(path, "wb") as file:
            file.truncate(size)
        return [span for shard in plan_shards([str(path)]) for span in shard]

    small, large, huge = spans(3 << 20), spans(10 << 30), spans(1 << 40)
    assert [span.end - span.start for span in small] == [SMALLEST_SHARD] * 3
    assert [span.start for span in spans((10 << 30) + 12345)][: len(large)] == [span.start for span in large]
    assert len(huge) == (1 << 40) // LARGEST_SHARD
