"""megatron-moe convert: what cannot be right is refused, nothing is left; what was killed goes on."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.checkpoint import manifest
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.io.files import write_bytes
from megatron_moe_tools.convert import certificate, native, parity, pipeline
from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.convert.native import copy_file
from megatron_moe_tools.convert.workspace import Workspace, hidden_folder
from tests.helpers import conversions
from tests.helpers.ranks import Child
from tests.hf import small_folders

SHARD = small_folders.SHARDS[1]


def words(load: Path, save: Path, *flags: str, origin: str = "hf", target: str = "native") -> list[str]:
    return conversions.words(origin, target, load, save, *flags)


@pytest.fixture
def hf(tmp_path):
    return small_folders.sound(tmp_path / "hf", tmp_path / "sentinel")


def refused(capsys: Any, line: list[str]) -> str:
    """The one message of a command that is refused; nothing of an output is left."""
    beside = Path(line[line.index("--save") + 1]).parent
    before = sorted(beside.glob("*"))
    assert main(line) == 2
    assert sorted(beside.glob("*")) == before
    errors = [text for text in capsys.readouterr().err.splitlines() if "error: " in text]
    assert len(errors) == 1
    return errors[0]


def edit(hf: Path, change: Any) -> None:
    """Change tensors of the second shard."""
    values = load_file(hf / SHARD)
    change(values)
    save_file(values, hf / SHARD, {"format": "pt"})


def test_an_output_that_is_there_or_is_the_source_is_refused(tmp_path, capsys, monkeypatch, hf):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("kept")
    assert "is not empty, and nothing is overwritten" in refused(capsys, words(hf, full))
    assert (full / "mine.txt").read_text() == "kept"
    assert "one is inside the other" in refused(capsys, words(hf, hf))
    assert "one is inside the other" in refused(capsys, words(hf, hf / "native"))
    assert "one is inside the other" in refused(capsys, words(hf, tmp_path))
    (tmp_path / "link").symlink_to(hf)
    assert "one is inside the other" in refused(capsys, words(hf, tmp_path / "link"))
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file" in refused(capsys, words(hf, tmp_path / "file" / "native"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "full")
    assert all("is a folder that is in use" in refused(capsys, words(hf, taken)) for taken in (Path.cwd(), Path("/")))
    assert main(words(hf, tmp_path / "empty")) == 0
    assert main(words(hf, tmp_path / "none" / "yet" / "native")) == 0  # as train and prepare do, folders are made


def test_a_source_of_the_other_kind_is_named(tmp_path, capsys, hf):
    assert "--from hf converts it" in refused(capsys, words(hf, tmp_path / "x", origin="native", target="hf"))
    assert main(words(hf, tmp_path / "native")) == 0
    assert "--from native" in refused(capsys, words(tmp_path / "native", tmp_path / "x"))
    step = tmp_path / "native" / "iter_0000000"
    assert main(words(step, tmp_path / "back", origin="native", target="hf")) == 0


def test_a_dry_run_writes_nothing(tmp_path, capsys, hf):
    before = sorted(tmp_path.rglob("*"))
    assert main(words(hf, tmp_path / "native", "--dry-run")) == 0
    told = capsys.readouterr().out
    assert "31 blocks in 3 files" in told and "iter_0000000/__0_2.distcp" in told and "bytes) free" in told
    assert "deepseek-v3 in bfloat16: 2 layers, 1 of them with 4 experts of 8, 2 per token" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_room_is_told_before_anything_is_written_and_where_the_disk_fills_up(
    tmp_path, capsys, hf, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "free_bytes", lambda folder: 1000)
        message = refused(capsys, words(hf, tmp_path / "native"))
    assert "not enough room" in message and "1.0 kB (1000 bytes) are free" in message and "are needed" in message
    monkeypatch.setattr(native, "append_block", full)
    message = refused(capsys, words(hf, tmp_path / "native"))
    assert "the disk is full: 82.1 kB (82128 bytes) are needed in all" in message and "were left" in message


def test_numbers_that_are_not_finite_or_that_the_new_dtype_cannot_hold_are_refused(tmp_path, capsys, hf):
    edit(hf, lambda values: values[small_folders.ATTENTION].fill_(1e5))
    message = refused(capsys, words(hf, tmp_path / "native", "--dtype", "fp16"))
    assert small_folders.ATTENTION in message and "too large for float16" in message
    wrong = torch.tensor([torch.nan, torch.inf, -torch.inf])
    edit(hf, lambda values: values[small_folders.ATTENTION][1, :3].copy_(wrong))
    message = refused(capsys, words(hf, tmp_path / "native"))
    assert f"tensor {small_folders.ATTENTION} holds 3 of 192 numbers that are not finite" in message


def test_every_element_is_covered_once_or_it_is_told():
    def row(start: list[int], shape: list[int], *names: str) -> dict[str, Any]:
        return {"native": {"key": "k", "start": start, "shape": shape}, "hf": [{"name": name} for name in names]}

    two = [row([0, 0], [2, 4], "a"), row([2, 0], [2, 4], "b")]
    certificate.require_coverage(two, ["a", "b"], {"k": (4, 4)}, "here")
    for rows, names, part in (
        (two[:1], ["a"], "8 of 16 elements"),
        ([*two, two[0]], ["a", "b"], "a is used 2 times"),
        ([two[0], row([1, 0], [2, 4], "b")], ["a", "b"], "16 of 16 elements in 2 blocks"),
        (two, ["a", "b", "c"], "c is used 0 times"),
        (two, ["a"], "b is unexpected"),
    ):
        with pytest.raises(ConfigError, match=part):
            certificate.require_coverage(rows, names, {"k": (4, 4)}, "here")


def test_a_step_with_one_wrong_bit_in_one_number_is_not_exported(tmp_path, capsys, hf):
    assert main(words(hf, tmp_path / "native")) == 0
    step, key = tmp_path / "native" / "iter_0000000", "decoder.layers.0.mlp.linear_fc1.weight"
    before = StepReader(step).read(key)
    content = bytearray((step / "__0_1.distcp").read_bytes())
    content[content.find(before.view(torch.uint8).numpy().tobytes())] ^= 1
    (step / "__0_1.distcp").write_bytes(content)
    assert (StepReader(step).read(key) != before).sum() == 1
    message = refused(capsys, words(tmp_path / "native", tmp_path / "x", origin="native", target="hf"))
    assert "is damaged: __0_1.distcp does not hold what was saved" in message


def test_what_fails_verification_is_not_published(tmp_path, capsys, hf, monkeypatch):
    result = mock.Mock(passed=False)
    result.as_dict.side_effect = lambda: {"passed": result.passed, "logit_difference": 3.5}
    result.lines.return_value = ["FAILED"]
    monkeypatch.setattr(parity, "compare", lambda *args, **kwargs: result)
    assert main(words(hf, tmp_path / "native", "--verify")) == 1
    beside = tmp_path / "native.conversion_certificate.json"
    assert sorted(tmp_path.iterdir()) == [hf, beside] and str(beside) in capsys.readouterr().err
    assert json.loads(beside.read_text())["verification"] == {"passed": False, "logit_difference": 3.5}
    result.passed = True
    assert main(words(hf, tmp_path / "native", "--verify", "--certificate", str(tmp_path / "c.json"))) == 0
    kept = json.loads((tmp_path / "native" / "conversion_certificate.json").read_text())
    assert kept["verification"]["passed"] and kept == json.loads((tmp_path / "c.json").read_text())
    assert main(words(hf, tmp_path / "native", "--verify-only")) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """As SIGKILL: no clean-up runs that handles errors."""


def dies(line: list[str], moment: str) -> None:
    """A start that dies in a method of its workspace."""
    with mock.patch.object(Workspace, moment, side_effect=Killed), pytest.raises(Killed):
        main(line)


def convert_and_die(argument: list[str]) -> None:
    """Convert in a process of its own, which is killed when two of three files are complete."""
    record = Workspace.record

    def recorded(self: Workspace, name: str, content: dict[str, Any]) -> None:
        record(self, name, content)
        if name.endswith("__0_1.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    Workspace.record = recorded  # type: ignore[method-assign]
    main(argument)


def test_a_conversion_that_was_killed_goes_on_and_ends_the_same_to_the_byte(rank_parent, tmp_path, capsys, hf):
    whole, save = tmp_path / "whole", tmp_path / "native"
    assert main(words(hf, whole)) == 0
    child = Child("tests.tools.test_convert_refusals:convert_and_die", words(hf, save), str(tmp_path / "log"))
    assert rank_parent.statuses(rank_parent.fork([child]), 600) == [-signal.SIGKILL] and not save.exists()
    first = hidden_folder(save) / "output" / "iter_0000000" / "__0_0.distcp"
    inode, written = first.stat().st_ino, first.stat().st_mtime_ns
    with open(hidden_folder(save) / "journal.jsonl", "ab") as file:
        file.write(b'{"name": "iter_0000000/__0_9')  # as if it had died while it wrote this
    capsys.readouterr()
    assert main(words(hf, save)) == 0
    assert "continuing: 2 of 3 files are complete" in capsys.readouterr().err
    again = (save / "iter_0000000" / "__0_0.distcp").stat()
    assert (again.st_ino, again.st_mtime_ns) == (inode, written)
    assert contents(save) == contents(whole) and not hidden_folder(save).exists()


@pytest.mark.parametrize("moment", ["record", "publish", "discard"])
def test_wherever_it_dies_the_next_start_ends_the_same(tmp_path, capsys, hf, moment):
    whole, save = tmp_path / "whole", tmp_path / "native"
    assert main(words(hf, whole)) == 0
    dies(words(hf, save), moment)
    assert main(words(hf, save)) == 0
    assert contents(save) == contents(whole) and not hidden_folder(save).exists()
    assert "was complete already" in capsys.readouterr().out or moment != "discard"


def test_other_options_or_another_source_start_over(tmp_path, capsys, hf):
    save, whole = tmp_path / "native", tmp_path / "whole"
    dies(words(hf, save), "publish")
    assert main(words(hf, whole, "--dtype", "fp32")) == 0
    capsys.readouterr()
    assert main(words(hf, save, "--dtype", "fp32")) == 0
    assert "continuing" not in capsys.readouterr().err
    assert contents(save) == contents(whole)
    shutil.rmtree(save)
    dies(words(hf, save), "publish")
    edit(hf, lambda values: values[small_folders.ATTENTION].mul_(2))
    assert main(words(hf, save)) == 0
    assert "continuing" not in capsys.readouterr().err


def test_two_at_once_do_not_write_to_one_folder(tmp_path, capsys, hf):
    workspace = Workspace(tmp_path / "native", {"another": 1})
    with workspace.open():
        assert "another process is converting to it" in refused(capsys, words(hf, tmp_path / "native"))
    assert manifest.structure_defect(workspace.hidden) is not None  # and what is being written is left alone


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, capsys, hf, monkeypatch):
    read = TensorReader.read_hashed

    def changing(self: Any, name: str, dtype: Any = None) -> Any:
        if name == small_folders.ATTENTION:
            os.utime(hf / SHARD, ns=(1, 1))
        return read(self, name, dtype)

    monkeypatch.setattr(TensorReader, "read_hashed", changing)
    assert "changed since it was opened" in refused(capsys, words(hf, tmp_path / "native"))


def test_a_small_file_that_is_not_what_the_manifest_knows_is_not_copied(tmp_path):
    source = tmp_path / "tokenizer.json"
    known = write_bytes(source, b"{}")
    assert copy_file(source, tmp_path / "copy", known) == known and (tmp_path / "copy").read_bytes() == b"{}"
    source.write_bytes(b"[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: changed while it was read"):
        copy_file(source, tmp_path / "another", known)
