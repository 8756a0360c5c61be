"""Errors planted where files are read and written: the certificate notices them, or the comparison does."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.transforms import ExpertGateUp, GateThenUp, Vocabulary
from megatron_moe_tools.convert import hugging_face, native
from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.convert.hugging_face import HuggingFaceSink as ToHF
from megatron_moe_tools.convert.native import NativeSink
from megatron_moe_tools.convert.parity import compare
from tests.helpers.conversions import words
from tests.hf import small_folders

Break = Callable[[pytest.MonkeyPatch], None]
READS, GIVES, BACK = "it reads otherwise than", "gives another one", "it is made back into another"
COMPUTED = "tokens go to other experts|logits differ by"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def convert(origin: str, target: str, load: Path, save: Path) -> int:
    return main(words(origin, target, load, save))


@pytest.fixture(scope="module")
def small(folder):
    """A folder with `hf` and, converted from it, `native`."""
    small_folders.sound(folder / "hf", folder / "sentinel")
    assert convert("hf", "native", folder / "hf", folder / "native") == 0
    return folder


def replaced(owner: Any, name: str, value: Any) -> Break:
    return lambda patch: patch.setattr(owner, name, value)


def returning(owner: Any, name: str, change: Callable[[Any], Any]) -> Break:
    """What a method returns, changed."""
    original = getattr(owner, name)
    return replaced(owner, name, lambda *given: change(original(*given)))


def given(owner: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Break:
    """What a function is given, changed."""
    original = getattr(owner, name)
    return replaced(owner, name, lambda *given: original(*change(*given)))


def last_bit(tensor: Tensor) -> Tensor:
    flat = tensor.clone().view(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(torch.inf, dtype=tensor.dtype))
    return flat.view_as(tensor)


def without_last(units: list[Any]) -> list[Any]:
    *rest, last = units
    return [*rest, dataclasses.replace(last, content=last.content[:-1])]


# Blocks changed or moved between the certificate's row and the file.
def one_bit(file: Any, key: str, start: Any, block: Tensor) -> tuple[Any, ...]:
    return file, key, start, last_bit(block) if key.endswith("final_layernorm.weight") else block


def next_expert(file: Any, key: str, start: Any, block: Tensor) -> tuple[Any, ...]:
    return file, key, ((start[0] + 1) % 4, *start[1:]) if key.endswith("experts.weight2") else start, block


def read_otherwise(patch: pytest.MonkeyPatch) -> None:
    """A bit changed behind the hash of what was read."""
    original = TensorReader.read_hashed

    def read_hashed(self: TensorReader, key: str, *rest: Any) -> Any:
        tensor, digests = original(self, key, *rest)
        return (last_bit(tensor) if "o_proj" in key else tensor), digests

    patch.setattr(TensorReader, "read_hashed", read_hashed)


def cut_file(patch: pytest.MonkeyPatch) -> None:
    original = NativeSink.finish

    def finish(self: NativeSink, output: Path, records: list[Any], inputs: Any) -> Any:
        files = original(self, output, records, inputs)
        victim = output / records[1]["name"]
        os.truncate(victim, victim.stat().st_size - 2000)
        return files

    patch.setattr(NativeSink, "finish", finish)


def without_norm(step: Path, tensors: Any, *rest: Any) -> tuple[Any, ...]:
    return step, {key: v for key, v in tensors.items() if not key.endswith("final_layernorm.weight")}, *rest


def other_projection(file: Any, key: str, tensor: Tensor) -> tuple[Any, ...]:
    return file, key, last_bit(tensor) if "o_proj" in key else tensor


def narrow_bias(patch: pytest.MonkeyPatch) -> None:
    original = ToHF._dtype
    patch.setattr(ToHF, "_dtype", lambda self, piece: torch.bfloat16 if piece.fp32 else original(self, piece))


IMPORT: dict[str, tuple[Break, str]] = {
    "one bit of a block written otherwise": (given(native, "append_block", one_bit), READS),
    "blocks in the next expert's place": (given(native, "append_block", next_expert), READS),
    "a file cut after it was written": (cut_file, "refused: decoder.* is damaged"),
    "a tensor left out of the index": (given(native, "write_index", without_norm), "its tensors are not those"),
    "one bit changed behind the reader": (read_otherwise, GIVES),
    "the last block left out": (returning(NativeSink, "planned", without_last), r"down_proj.* is used 0 times"),
    "a transform right in one direction only": (
        returning(GateThenUp, "to_native", lambda both: both.roll(1, -1)),
        GIVES,
    ),
}
EXPORT: dict[str, tuple[Break, str]] = {
    "the router's bias as bfloat16": (narrow_bias, "is not float32, which it always is"),
    "the padded vocabulary written": (
        replaced(Vocabulary, "to_hf", lambda self, block: [block]), r"\[128, 16\].* not .*\(33, 16\)",
    ),
    "gate and up of experts swapped": (returning(ExpertGateUp, "to_hf", lambda both: both[::-1]), BACK),
    "one bit changed": (given(hugging_face, "write_tensor", other_projection), BACK),
    "a tensor left out": (returning(ToHF, "planned", without_last), r"experts\.3\.down_proj\.weight is used 0 times"),
}  # fmt: skip
WAYS = [*(("hf", "native", name) for name in IMPORT), *(("native", "hf", name) for name in EXPORT)]


@pytest.mark.parametrize(("origin", "target", "error"), WAYS)
def test_the_certificate_notices_an_error_in_what_is_written(
    origin, target, error, small, tmp_path, monkeypatch, capsys
):
    breaks, reason = (IMPORT if target == "native" else EXPORT)[error]
    breaks(monkeypatch)
    try:
        assert convert(origin, target, small / origin, tmp_path / target) == 2
        message = capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
    except ValueError as raised:
        message = str(raised)
    assert re.search(reason, message), message
    assert not (tmp_path / target).exists()


# What is wrong in fp8 the comparison tells.

SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda scale: scale,
    "of the next row of blocks": lambda scale: scale.roll(1, 0),
    "rounded to bfloat16": lambda scale: scale.bfloat16().float(),
}


@pytest.mark.parametrize("change", SCALED)
def test_the_comparison_notices_scales_that_are_applied_wrongly(change, tmp_path, monkeypatch):
    fp8, original = small_folders.sound(tmp_path / "hf", tmp_path / "sentinel", fp8=True), TensorReader._stored

    def stored(self: TensorReader, name: str, digests: Any) -> Tensor:
        tensor = original(self, name, digests)
        return SCALED[change](tensor) if name.endswith("_scale_inv") else tensor

    monkeypatch.setattr(TensorReader, "_stored", stored)
    result = compare(fp8, fp8, length=32)
    assert result.passed == (change == "none"), result.failures
    assert change == "none" or re.search(COMPUTED, "\n".join(result.failures))
