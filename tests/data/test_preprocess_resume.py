"""Preprocessing that is killed goes on where it was, and ends with the same bytes; other parts are not taken."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.data.index_file import open_index
from megatron_moe.data.tokenizers import SentencePieceTokenizer
from megatron_moe_tools.prepare import output
from megatron_moe_tools.prepare import preprocess as preprocess_module
from megatron_moe_tools.prepare.inputs import plan_shards
from megatron_moe_tools.prepare.merge import merge
from tests.data.odd_texts import line, write_odd_texts
from tests.data.prepared import dataset_bytes, run
from tests.helpers.rows import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ROOT = Path(__file__).parents[2]
TRAINED = {"tokenizer_type": None, "train_tokenizer": True, "tokenizer_vocab_size": 290}


def contents(folder: Path, name: str = "out") -> dict[str, bytes]:
    """All files of an output, without their prefix."""
    return {path.name[len(name) :]: path.read_bytes() for path in folder.iterdir() if path.name.startswith(name)}


@pytest.fixture
def sources(tmp_path: Path, shards_of: Callable[[int], None]) -> list[Path]:
    """Three files that make four shards, with a bad line."""
    shards_of(150)
    texts = {"a": ["1", "22"], "b": ["333" * i for i in range(9)], "c": ["4444"]}
    for name, parts in texts.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(line(part) + b"\n" for part in parts))
    return [tmp_path / f"{name}.jsonl" for name in texts]


# ---- real processes


def test_a_folder_of_odd_files_survives_a_kill(tmp_path):
    odd = write_odd_texts(tmp_path / "odd", large=4000)
    expected = run([odd.clean(tmp_path / "clean.jsonl")], tmp_path / "clean")
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(odd.folder), "--append-eod", "--workers", "2"]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer", "--on-bad-line", "skip"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    work = tmp_path / ".out.parts"
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not finished(work / "parts"):
        time.sleep(0.005)
    process.kill()
    process.wait()
    subprocess.run(["flock", "--timeout", "300", work / "workers", "true"], check=True)  # its workers end with it
    assert finished(work / "parts") and not (tmp_path / "out_text_document.idx").exists()
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    assert dataset_bytes(tmp_path / "out_text_document") == dataset_bytes(expected)
    rejects = [json.loads(text) for text in (tmp_path / "out_rejects.jsonl").read_text().splitlines()]
    assert Counter(reject["reason"] for reject in rejects) == odd.rejected
    assert not list(tmp_path.glob(".out*"))


def finished(parts: Path) -> list[str]:
    return [path.name for path in parts.iterdir() if "." not in path.name] if parts.exists() else []


# ---- a kill at each step


STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that is killed before its `number`-th change of the disk; return whether it was."""
    child = os.fork()
    if child == 0:
        left = iter(range(number))
        for name in STEPS:
            setattr(os, name, dying(getattr(os, name), left))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def dying(step: Callable[..., object], left: Iterator[int]) -> Callable[..., object]:
    def one(*arguments: object, **named: object) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments, **named)

    return one


@pytest.mark.parametrize(
    ("overwrite", "stride"), rows([(False, 13), (True, 19), (False, 2), (True, 4)], test=[(False, 13), (True, 19)])
)
def test_a_kill_at_any_step_changes_nothing(overwrite, stride, tmp_path, sources):
    changes = {"partitions": 2, "on_bad_line": "skip", "overwrite": overwrite}
    run(sources, tmp_path / "expected", **changes)
    expected = contents(tmp_path, "expected")
    assert set(expected) == {"_rejects.jsonl", *(f"_text_document{suffix}" for suffix in (".bin", ".idx", ".json"))}
    steps = 0
    for number in range(0, 1000, stride):
        folder = tmp_path / str(number)
        folder.mkdir()
        if overwrite:
            run(sources[:1], folder / "out")
        if not killed_at(number, lambda to=folder / "out": run(sources, to, **changes)):
            break
        index = folder / "out_text_document.idx"
        if index.exists() and not overwrite:  # the last one to appear
            assert contents(folder) == expected
        if not index.exists() or overwrite:
            run(sources, folder / "out", **changes)
        assert contents(folder) == expected, f"killed at step {number}"
        steps += 1
    assert steps > 2


def test_a_merge_that_is_killed_is_done_again(tmp_path, sources):
    inputs = [run([path], tmp_path / path.stem, on_bad_line="skip") for path in sources]
    merge(inputs, str(tmp_path / "expected"))
    for number in range(0, 100, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        if not killed_at(number, lambda to=str(folder / "out"): merge(inputs, to)):
            break
        if not (folder / "out.idx").exists():
            merge(inputs, str(folder / "out"))
        assert contents(folder) == contents(tmp_path, "expected")
    assert number > 9


# ---- other commands, other inputs


def stopped_in_the_last_file(sources: list[Path], prefix: Path, **changes: object) -> Path:
    """Preprocess until a bad line in the last file; returns the folder of the parts."""
    good = sources[-1].read_bytes()
    sources[-1].write_bytes(b"bad\n")
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 1"):
        run(sources, prefix, **changes)
    sources[-1].write_bytes(good)
    return prefix.with_name(f".{prefix.name}.parts")


@pytest.fixture
def clean_sources(sources: list[Path]) -> list[Path]:
    sources[1].write_bytes(b"".join(line("b" * 10 * i) + b"\n" for i in range(1, 9)))
    return sources


def test_a_line_that_is_repaired_costs_its_own_part_alone(tmp_path, clean_sources, capsys):
    work = stopped_in_the_last_file(clean_sources, tmp_path / "out")
    assert not contents(tmp_path) and finished(work / "parts")

    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (work / "parts").iterdir()}

    inode = inodes()
    clean_sources[1].write_bytes(clean_sources[1].read_bytes().replace(b"bb", b"cc"))
    seen: dict[str, int] = {}
    in_order = preprocess_module._in_order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess_module, "_in_order", lambda *a: seen.update(inodes()) or in_order(*a))
        run(clean_sources, tmp_path / "out")
    assert "parts are of input that has changed" in capsys.readouterr().err
    kept = {name for name in inode if seen.get(name) == inode[name]}
    assert 0 < len(kept) < len(inode)
    run(clean_sources, tmp_path / "expected")
    assert contents(tmp_path) == contents(tmp_path, "expected")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"append_eod": False}, "append_eod: True, now False"),
        ({"partitions": 2}, "partitions: 1, now 2"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 9}, "NullTokenizer"),
    ],
)
def test_parts_of_another_command_are_neither_used_nor_lost(changes, words, tmp_path, clean_sources):
    work = stopped_in_the_last_file(clean_sources, tmp_path / "out")
    before = finished(work / "parts")
    with pytest.raises(ConfigError, match="parts of another command") as caught:
        run(clean_sources, tmp_path / "out", **changes)
    assert words in str(caught.value) and "--overwrite" in str(caught.value)
    assert finished(work / "parts") == before
    if "vocab_size" not in changes:
        run(clean_sources, tmp_path / "out", overwrite=True, **changes)
        run(clean_sources, tmp_path / "expected", **changes)
        assert contents(tmp_path) == contents(tmp_path, "expected")


def test_a_command_that_stopped_goes_on_when_it_may_skip(tmp_path, clean_sources):
    work = stopped_in_the_last_file(clean_sources, tmp_path / "out")
    clean_sources[-1].write_bytes(b"bad\n" + line("c") + b"\n")
    kept = finished(work / "parts")
    with pytest.MonkeyPatch.context() as patch:
        written: list[Path] = []
        write = preprocess_module.write_parts
        patch.setattr(
            preprocess_module,
            "write_parts",
            lambda o, t, tasks, lock: write(o, t, written.extend(tasks) or tasks, lock),
        )
        run(clean_sources, tmp_path / "out", on_bad_line="skip", workers=2)
    assert kept and not {place.name for _, place in written} & set(kept)
    assert open_index(str(tmp_path / "out_text_document")).num_documents == 2 + 8 + 1


def test_parts_with_rejects_do_not_serve_a_command_that_stops(tmp_path, clean_sources):
    clean_sources[0].write_bytes(b"bad\n" + clean_sources[0].read_bytes())
    with pytest.raises(ConfigError, match="--max-bad-lines"):
        run(clean_sources, tmp_path / "out", on_bad_line="skip", max_bad_lines=0.0)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1"):
        run(clean_sources, tmp_path / "out")
    assert not contents(tmp_path)


def test_a_damaged_part_is_done_again_or_named(tmp_path, clean_sources):
    work = stopped_in_the_last_file(clean_sources, tmp_path / "out")
    first, second = [path for path in (work / "parts").glob("*/0.0.bin") if path.stat().st_size][:2]
    first.write_bytes(first.read_bytes()[:-1])  # its length gives it away
    content = second.read_bytes()
    second.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(RunFault, match="not what was written"):
        run(clean_sources, tmp_path / "out")
    assert not contents(tmp_path)


def test_two_commands_do_not_write_one_output(tmp_path, clean_sources):
    with (
        output.ResumeDir(str(tmp_path / "out")),
        pytest.raises(ConfigError, match="another process is writing this output"),
    ):
        run(clean_sources, tmp_path / "out")
    run(clean_sources, tmp_path / "out")


def test_an_input_that_grows_while_it_is_read_is_refused(tmp_path, clean_sources, monkeypatch):
    planned = plan_shards(list(map(str, clean_sources)))
    with open(clean_sources[0], "ab") as file:
        file.write(line("more") + b"\n")
    monkeypatch.setattr(preprocess_module, "plan_shards", lambda files: planned)
    with pytest.raises(ConfigError, match=r"a\.jsonl was written to while it was read"):
        run(clean_sources, tmp_path / "out")


def test_a_full_disk_is_named_and_parts_are_kept(tmp_path, clean_sources, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("megatron_moe_tools.prepare.dataset_files.free_bytes", lambda folder: 10)
        with pytest.raises(ConfigError, match="needs .* more, 10 bytes are free"):
            run(clean_sources, tmp_path / "out")
    assert finished(tmp_path / ".out.parts" / "parts")
    run(clean_sources, tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def test_a_tokenizer_that_was_trained_before_a_kill_is_used(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(line(f"text number {i} " * 3) + b"\n" for i in range(50)))

    def work(folder: Path) -> None:
        run([source], folder / "out", tokenizer_model=str(folder / "out.model"), **TRAINED)

    for number in (3, 20, 1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        if killed_at(number, lambda to=folder: work(to)):
            work(folder)
    assert len(contents(tmp_path / "1000")) == 4
    assert contents(tmp_path / "3") == contents(tmp_path / "20") == contents(tmp_path / "1000")


def test_training_does_not_replace_a_model_unasked(tmp_path):
    source, model = tmp_path / "in.jsonl", tmp_path / "m"
    source.write_bytes(b"".join(line(f"text number {i} " * 3) + b"\n" for i in range(50)))
    model.write_text("mine")
    with pytest.raises(ConfigError, match=f"{model} exists"):
        run([source], tmp_path / "out", tokenizer_model=str(model), **TRAINED)
    assert model.read_text() == "mine"
    run([source], tmp_path / "out", tokenizer_model=str(model), overwrite=True, **TRAINED)
    assert SentencePieceTokenizer(model).vocab_size == 290
