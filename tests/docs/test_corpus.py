"""The corpus: every file in one split only, the same each time, never half written."""

import json
from pathlib import Path

import pytest

from megatron_moe.config.errors import ConfigError
from tools import corpus as corpus_module
from tools.corpus import split_of, write_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    (root / "package" / "tests").mkdir(parents=True)
    (root / "site-packages").mkdir()
    for i in range(120):
        (root / "package" / f"m{i}.py").write_text(f"value = {i}\n\tx\r\n", newline="")
    for i in range(40):
        (root / f"copy{i}.py").write_text("same = 1\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_text("")
    (root / "notes.txt").write_text("no source")
    (root / "package" / "tests" / "test_m.py").write_text("tested = 1\n")
    (root / "site-packages" / "other.py").write_text("installed = 1\n")
    (root / "link.py").symlink_to(root / "package" / "m0.py")
    return root


def read(folder: Path) -> dict[str, list[dict[str, str]]]:
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "valid", "test")
    }


def test_every_source_is_in_one_split_exactly_and_nothing_else_is(library, tmp_path):
    write_corpus(tmp_path / "out", source=library)
    splits = read(tmp_path / "out")
    paths, texts = ([record[key] for records in splits.values() for record in records] for key in ("path", "text"))
    assert len(paths) == 121  # 120 modules and one of 40 copies
    assert len(set(paths)) == len(paths) and len(set(texts)) == len(texts)
    assert all(records for records in splits.values())
    assert len(splits["train"]) > 10 * len(splits["valid"])
    assert texts[paths.index("package/m7.py")] == "value = 7\n\tx\r\n"
    unwanted = {"latin.py", "empty.py", "notes.txt", "package/tests/test_m.py", "site-packages/other.py", "link.py"}
    assert not unwanted & set(paths)
    facts = json.loads((tmp_path / "out" / "corpus.json").read_text())
    for name, records in splits.items():
        size = sum(len(record["text"].encode()) for record in records)
        assert (facts["documents"][name], facts["text_bytes"][name]) == (len(records), size)


def test_a_file_stays_in_its_split_when_others_come_and_go(library, tmp_path):
    write_corpus(tmp_path / "a", source=library)
    (library / "package" / "m0.py").unlink()
    (library / "package" / "new.py").write_text("new = 1\n")
    write_corpus(tmp_path / "b", source=library)
    before, after = (
        {record["path"]: name for name, records in read(tmp_path / out).items() for record in records} for out in "ab"
    )
    assert before.pop("package/m0.py") and after.pop("package/new.py")
    assert after == before


def test_an_interrupted_write_leaves_the_old_corpus(library, tmp_path, monkeypatch):
    write_corpus(tmp_path / "out", source=library)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    calls = iter(range(50))

    def fail(path: str, shares: object) -> int:
        if next(calls) == 20:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(corpus_module, "split_of", fail)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "out", source=library)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_without_sources_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no Python source files"):
        write_corpus(tmp_path / "out", source=tmp_path / "empty")


def test_shares_of_files_are_as_asked():
    splits = [split_of(f"a/b{i}.py", (0.8, 0.1, 0.1)) for i in range(5000)]
    assert [abs(splits.count(i) / 5000 - share) < 0.02 for i, share in enumerate((0.8, 0.1, 0.1))] == [True] * 3
