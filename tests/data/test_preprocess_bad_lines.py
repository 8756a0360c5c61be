"""Lines that are no documents: named, or skipped, counted by reason and listed; the others' tokens are the same."""

import json
from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.index_file import read_sidecar
from megatron_moe_tools.prepare.preprocess import main
from tests.data.odd_texts import BAD_LINES, line, write_odd_texts
from tests.data.prepared import dataset_bytes, run

SKIP = {"on_bad_line": "skip"}


@pytest.mark.parametrize(("shard_bytes", "partitions"), [(None, 1), (300, 3)])
def test_skipped_lines_leave_the_bytes_of_the_clean_lines_alone(shard_bytes, partitions, tmp_path, shards_of, capsys):
    odd = write_odd_texts(tmp_path / "odd")
    assert len(list(odd.folder.iterdir())) > 30
    expected = run(odd.clean(tmp_path / "clean.jsonl"), tmp_path / "clean", partitions=partitions)
    shards_of(shard_bytes)
    flags = f"--tokenizer-type ByteTokenizer --append-eod --workers 1 --partitions {partitions} --on-bad-line skip"
    assert main(f"--input {odd.folder} --output-prefix {tmp_path}/out {flags}".split()) == 0
    prefix = f"{tmp_path}/out_text_document"
    assert dataset_bytes(prefix) == dataset_bytes(expected)
    facts = read_sidecar(prefix)
    assert facts.rejected == odd.rejected and facts.documents == len(odd.documents)
    rejects = [json.loads(text) for text in (tmp_path / "out_rejects.jsonl").read_text().splitlines()]
    assert Counter(reject["reason"] for reject in rejects) == odd.rejected
    assert "rejected" not in json.loads(Path(f"{expected}.json").read_text())
    said, bad = capsys.readouterr().out, odd.rejected.total()
    assert f"{len(odd.documents) + bad} records = {len(odd.documents)} documents + {bad} rejected" in said
    assert all(f"{count} {reason}" in said for reason, count in odd.rejected.items())


@pytest.mark.parametrize("shard_bytes", [None, 50])
def test_a_reject_names_its_file_line_offset_and_beginning(shard_bytes, tmp_path, shards_of):
    shards_of(shard_bytes)
    short = [bad for bad in BAD_LINES if len(bad) < 100]
    lines = [line(f"good {i}") if i % 3 else bad for i, bad in enumerate([*short, *short, b"last"])]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    run(source, tmp_path / "out", **SKIP)
    offsets = [sum(len(before) + 1 for before in lines[:i]) for i in range(len(lines))]
    expected = [(i + 1, offsets[i], BAD_LINES.get(lines[i], "invalid JSON")) for i in range(0, len(lines), 3)]
    rejects = [json.loads(text) for text in (tmp_path / "out_rejects.jsonl").read_text().splitlines()]
    assert [(r["line"], r["offset"], r["reason"]) for r in rejects] == expected
    for reject in rejects:
        assert reject["file"] == str(source) and reject["problem"]
        if reject["reason"] == "invalid JSON":
            assert lines[reject["line"] - 1].decode().startswith(reject["excerpt"]) and len(reject["excerpt"]) <= 80


@pytest.mark.parametrize(
    ("bad", "limit", "is_refused"), [(1, 0.1, False), (1, 0.09, True), (0, 0.0, False), (1, 0.0, True), (5, 0.5, False)]
)
def test_too_large_a_share_of_bad_lines_stops_the_work(bad, limit, is_refused, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([line("good")] * (10 - bad) + [b"bad"] * bad) + b"\n")
    if not is_refused:
        run(tmp_path / "in.jsonl", tmp_path / "out", max_bad_lines=limit, **SKIP)
        return
    with pytest.raises(ConfigError, match=f"--max-bad-lines {limit}: 1 of 10"):
        run(tmp_path / "in.jsonl", tmp_path / "out", max_bad_lines=limit, **SKIP)
    assert not list(tmp_path.glob("out*"))
    run(tmp_path / "in.jsonl", tmp_path / "out", max_bad_lines=0.1, **SKIP)  # what is finished serves another limit
    assert not list(tmp_path.glob(".out*"))


def test_what_the_command_itself_wrote_is_no_input(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(line("good") + b"\nbad\n")
    run(tmp_path, tmp_path / "out", **SKIP)
    for path in sorted(tmp_path.glob("out*"))[::-1]:
        with pytest.raises(ConfigError, match=r"is what this command writes"):
            run(tmp_path, tmp_path / "out", overwrite=True, **SKIP)
        path.unlink()
    run(tmp_path, tmp_path / "out", **SKIP)


def test_an_input_without_any_document_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"bad\n\n")
    with pytest.raises(ConfigError, match="no document.*1 empty line, 1 invalid JSON"):
        run(tmp_path / "in.jsonl", tmp_path / "out", **SKIP)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]  # no parts that another --json-keys would meet


def test_what_a_tokenizer_cannot_read_is_a_bad_line(tmp_path):
    (tmp_path / "ids.jsonl").write_bytes(b"\n".join(map(line, ["1 0002", "9" * 5000, "7"])))
    (tmp_path / "words.jsonl").write_bytes(b"\n".join(map(line, ["a", "b", "a a"])))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))  # without a token for the unknown
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    own = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "tokenizer.json")}
    for name, flags in {"ids": {"tokenizer_type": "NullTokenizer", "vocab_size": 99}, "words": own}.items():
        facts = read_sidecar(run(tmp_path / f"{name}.jsonl", tmp_path / name, **flags, **SKIP))
        assert (facts.documents, facts.rejected) == (2, {"refused by the tokenizer": 1})


def test_what_is_in_the_way_of_an_output_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(line("good") + b"\n")
    (tmp_path / "a_rejects.jsonl").write_bytes(b"somebody's")
    (tmp_path / "b_text_document.bin").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, *flags in (["a"], ["in.jsonl/c"], ["d" * 250], ["\udce9"], ["b", "--overwrite"]):
        command = ["--input", f"{tmp_path}/in.jsonl", "--output-prefix", f"{tmp_path}/{name}", *flags]
        assert main([*command, "--tokenizer-type", "ByteTokenizer", "--workers", "1"]) == 2, name
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, name
    assert sorted(tmp_path.iterdir()) == before
