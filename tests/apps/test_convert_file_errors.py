"""Conversion errors planted where files are read and written: the certificate notices, or the comparison does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe.apps.convert import to_hf, to_native
from megatron_moe.apps.convert.convert import ConversionOptions, convert
from megatron_moe.apps.convert.parity import compare
from megatron_moe.apps.convert.to_hf import ToHF
from megatron_moe.apps.convert.to_native import DataFile, ToNative
from megatron_moe.apps.convert.workspace import Workspace
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.source import locate
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.transforms import Copy, ExpertDown, ExpertGateUp, GateThenUp, QueryKeyValue, Vocabulary
from tests.apps.planting import EXPERTS, LOGITS, replaced
from tests.helpers import tiny_models

EITHER = f"{EXPERTS}|{LOGITS}"
READS, GIVES, BACK = "it reads otherwise than", "gives another one", "it is made back into another"


class Plant(NamedTuple):
    """An error. reason: what is said about it, as a regular expression."""

    name: str
    case: str
    breaks: Callable[[pytest.MonkeyPatch], None]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, {self.case}".replace(" ", "-")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """case -> a folder with `hf` and, converted from it, `native`; made once."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            tiny_models.make(case, 5, made[case] / "hf")
            imported(made[case] / "hf", made[case] / "native")
        return made[case]

    return folder


def imported(hf: Path, target: Path) -> dict[str, Any]:
    return converted(ToNative(HFFolder.open(hf), ConversionOptions()), target)


def exported(native: Path, target: Path) -> dict[str, Any]:
    return converted(ToHF(locate(native), ConversionOptions()), target)


def converted(conversion: Any, target: Path) -> dict[str, Any]:
    workspace = Workspace(target, conversion.identity())
    with workspace.open():
        try:
            content = convert(conversion, workspace)
        except BaseException:
            workspace.discard()
            raise
        workspace.publish()
    return content


# ---- to native, told by the certificate


def written(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Blocks changed between the certificate's row and the file."""
    original = DataFile.add

    def add(self: DataFile, name: str, start: Any, block: Tensor) -> None:
        original(self, name, start, change(block.clone()) if re.search(key, name) else block)

    return replaced(DataFile, "add", add)


def read(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Tensors changed behind the hash of what was read."""
    original = TensorReader.read_hashed

    def read_hashed(self: TensorReader, key: str, *rest: Any) -> Any:
        tensor, digests = original(self, key, *rest)
        return (change(tensor.clone()) if re.search(name, key) else tensor), digests

    return replaced(TensorReader, "read_hashed", read_hashed)


def units(edit: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """The last file's blocks, others than planned."""
    original = ToNative._planned

    def planned(self: ToNative) -> list[Any]:
        *rest, last = original(self)
        return [*rest, dataclasses.replace(last, content=tuple(edit(list(last.content))))]

    return replaced(ToNative, "_planned", planned)


def last_bit(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(torch.inf))
    return tensor


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def first_nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[0] = torch.nan
    return tensor


def next_expert(patch: pytest.MonkeyPatch) -> None:
    original = DataFile.add

    def add(self: DataFile, key: str, start: Any, block: Tensor) -> None:
        moved = ((start[0] + 1) % 16, *start[1:]) if key.endswith("experts.weight2") else start
        original(self, key, moved, block)

    patch.setattr(DataFile, "add", add)


def other_tensor(patch: pytest.MonkeyPatch) -> None:
    original = DataFile.add
    swap = {"k_layernorm": "q_layernorm", "q_layernorm": "k_layernorm"}

    def add(self: DataFile, key: str, start: Any, block: Tensor) -> None:
        original(self, re.sub("[kq]_layernorm", lambda m: swap[m[0]], key), start, block)

    patch.setattr(DataFile, "add", add)


def cut_file(patch: pytest.MonkeyPatch) -> None:
    original = ToNative.finish

    def finish(self: ToNative, output: Path, records: list[Any]) -> Any:
        files = original(self, output, records)
        victim = output / records[1]["name"]
        os.truncate(victim, victim.stat().st_size - 2000)
        return files

    patch.setattr(ToNative, "finish", finish)


def forgetful_index(patch: pytest.MonkeyPatch) -> None:
    original = to_native.write_index

    def write_index(step: Path, tensors: Any, *rest: Any) -> Any:
        return original(step, {k: v for k, v in tensors.items() if not k.endswith("final_layernorm.weight")}, *rest)

    patch.setattr(to_native, "write_index", write_index)


def one_way(transform: type, function: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return replaced(transform, "to_native", function)


def rolled_rows(transform: type) -> Callable[[pytest.MonkeyPatch], None]:
    original = transform.to_native  # type: ignore[attr-defined]
    return one_way(transform, lambda self, tensors: original(self, tensors).roll(1, -1))


IMPORT = [
    Plant("one bit of a block written otherwise", "deepseek-v3", written("layers.2.*kv_up_proj", last_bit), READS),
    Plant("a block rounded while it is written", "mixtral", written("linear_qkv", rounded), READS),
    Plant("a NaN written", "qwen3-moe", written("layers.1.*weight1", first_nan), READS),
    Plant("zeros written", "glm4-moe", written("layers.3.*weight2", torch.zeros_like), READS),
    Plant("the router's bias rounded while it is written", "deepseek-v3", written("expert_bias", rounded), READS),
    Plant("blocks in the next expert's place", "deepseek-v3", next_expert, READS),
    Plant("blocks in another tensor's place", "qwen3-moe", other_tensor, READS),
    Plant("a file cut after it was written", "mixtral", cut_file, "refused: decoder.* is damaged"),
    Plant("a tensor left out of the index", "qwen2-moe", forgetful_index, "its tensors are not those"),
    Plant("one bit changed behind the reader", "deepseek-v2", read("o_proj", last_bit), GIVES),
    Plant("the router's bias rounded behind the reader", "deepseek-v3", read("correction_bias", rounded), GIVES),
    Plant("a NaN in the source", "moonlight", read("embed_tokens", first_nan), "embed_tokens.*not finite"),
    Plant("the last blocks left out", "mixtral", units(lambda blocks: blocks[:-1]), r"w2.* is used 0 times"),
    Plant("a block written twice", "qwen3-moe", units(lambda blocks: [*blocks, blocks[-1]]), "is used 2 times"),
    *(
        Plant(f"{transform.__name__} right in one direction only", case, rolled_rows(transform), GIVES)
        for transform, case in (
            (Copy, "deepseek-v2"),
            (GateThenUp, "deepseek-v3"),
            (ExpertGateUp, "mixtral"),
            (ExpertDown, "qwen3-moe"),
            (QueryKeyValue, "glm4-moe"),
            (Vocabulary, "qwen2-moe"),
        )
    ),
]


@pytest.mark.parametrize("plant", IMPORT, ids=str)
def test_the_certificate_notices_an_error_in_what_is_written(
    plant: Plant, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = folders(plant.case) / "hf"
    plant.breaks(monkeypatch)
    with pytest.raises(ConfigError) as error:
        imported(hf, tmp_path / "native")
    assert re.search(plant.reason, str(error.value)), error.value
    assert not (tmp_path / "native").exists()


# ---- to Hugging Face, told by the certificate


def back(transform: type, change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A transform that is wrong on the way out only."""
    original = transform.to_hf  # type: ignore[attr-defined]
    return replaced(transform, "to_hf", lambda self, block: change(original(self, block)))


def out(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Tensors changed while they are written."""
    original = to_hf.write_tensor

    def write_tensor(file: Any, key: str, tensor: Tensor) -> str:
        return original(file, key, change(tensor.clone()) if re.search(name, key) else tensor)

    return replaced(to_hf, "write_tensor", write_tensor)


def uncut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vocabulary, "to_hf", lambda self, block: [block])


def without_last_tensor(patch: pytest.MonkeyPatch) -> None:
    original = ToHF._planned

    def planned(self: ToHF) -> list[Any]:
        (unit,) = original(self)
        return [dataclasses.replace(unit, content=unit.content[:-1])]

    patch.setattr(ToHF, "_planned", planned)


def next_row(parts: list[Tensor]) -> list[Tensor]:
    return [part.roll(1, 0) for part in parts]


def narrow_bias(patch: pytest.MonkeyPatch) -> None:
    original = ToHF._dtype
    patch.setattr(ToHF, "_dtype", lambda self, piece: torch.bfloat16 if piece.fp32 else original(self, piece))


EXPORT = [
    Plant("the router's bias as bfloat16", "deepseek-v3", narrow_bias, "is not float32, which it always is"),
    Plant("the padded vocabulary written", "deepseek-v3", uncut, r"\[256, 64\].* not .*\(131, 64\)"),
    Plant("the vocabulary shifted", "mixtral", back(Vocabulary, next_row), BACK),
    Plant("gate and up swapped", "deepseek-v3", back(GateThenUp, lambda parts: parts[::-1]), BACK),
    Plant("gate and up of experts swapped", "glm4-moe", back(ExpertGateUp, lambda parts: parts[::-1]), BACK),
    Plant("rows of an expert's down projection shifted", "qwen2-moe", back(ExpertDown, next_row), BACK),
    Plant("keys and values swapped", "qwen3-moe", back(QueryKeyValue, lambda parts: [parts[0], *parts[:0:-1]]), BACK),
    Plant("one bit changed", "qwen3-moe", out("layers.2.*o_proj", last_bit), BACK),
    Plant("weights rounded", "mixtral", out("w1", rounded), BACK),
    Plant("the router's bias rounded", "deepseek-v3", out("correction_bias", rounded), BACK),
    Plant("a NaN", "glm4-moe", out("q_proj.weight", first_nan), BACK),
    Plant("a tensor left out", "mixtral", without_last_tensor, r"experts\.7\.w2\.weight is used 0 times"),
]


@pytest.mark.parametrize("plant", EXPORT, ids=str)
def test_the_certificate_notices_an_error_in_what_is_exported(
    plant: Plant, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = folders(plant.case) / "native"
    plant.breaks(monkeypatch)
    with pytest.raises((ConfigError, ValueError)) as error:
        exported(native, tmp_path / "hf")
    assert re.search(plant.reason, str(error.value)), error.value
    assert not (tmp_path / "hf").exists()


# ---- to Hugging Face, wrong in both directions or in the configuration: told by the comparison


def renamed(change: Callable[[str], str]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = to_hf.mapping

        def broken(*arguments: Any) -> Any:
            table = original(*arguments)
            pieces = [dataclasses.replace(one, hf=tuple(change(name) for name in one.hf)) for one in table.pieces]
            return dataclasses.replace(table, pieces=tuple(pieces))

        patch.setattr(to_hf, "mapping", broken)

    return plant


def configured(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    original = ToHF._config
    return replaced(ToHF, "_config", lambda self: json.dumps({**json.loads(original(self)), **changes}).encode())


def exchanged(one: str, other: str) -> Callable[[pytest.MonkeyPatch], None]:
    return renamed(lambda name: re.sub(f"{one}|{other}", lambda m: other if m[0] == one else one, name))


COMPARED = [
    Plant("w1 and w3 swapped", "mixtral", exchanged("w1", "w3"), EITHER),
    Plant("norms of queries and keys swapped", "qwen3-moe", exchanged("q_norm", "k_norm"), EITHER),
    Plant("two layers swapped", "glm4-moe", exchanged(r"layers.1.", r"layers.2."), EITHER),
    Plant("another epsilon in config.json", "mixtral", configured(rms_norm_eps=1e-2), EITHER),
    Plant(
        "another rotary base in config.json",
        "qwen3-moe",
        configured(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        EITHER,
    ),
    Plant("no scaling factor in config.json", "glm4-moe", configured(routed_scaling_factor=1.0), "weights of the same"),
    Plant("another number of groups in config.json", "deepseek-v3", configured(n_group=2, topk_group=1), EXPERTS),
]


@pytest.mark.parametrize("plant", COMPARED, ids=str)
def test_the_comparison_notices_an_exported_model_that_computes_something_else(
    plant: Plant, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = folders(plant.case) / "native"
    with monkeypatch.context() as patch:
        plant.breaks(patch)
        exported(native, tmp_path / "hf")
    result = compare(tmp_path / "hf", native, length=32)
    assert not result.passed
    assert re.search(plant.reason, "\n".join(result.failures)), result.failures


@pytest.mark.parametrize("case", ["deepseek-v3", "qwen3-moe-tied"])
def test_without_an_error_an_exported_model_passes(folders: Any, tmp_path: Path, case: str) -> None:
    exported(folders(case) / "native", tmp_path / "hf")
    assert (
        load_file(tmp_path / "hf" / "model.safetensors").keys()
        == load_file(folders(case) / "hf" / "model.safetensors").keys()
    )
    result = compare(tmp_path / "hf", folders(case) / "native", length=32)
    assert result.passed, result.failures


# ---- weights in fp8

BLOCK = 16


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose products are in fp8 with scales of 16 x 16 blocks, whose edges are no multiples of 16."""
    folder = tmp_path_factory.mktemp("fp8") / "hf"
    tiny_models.make("deepseek-v3", 5, folder, torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            tensor = tensor.float()
            rows, columns = (torch.arange(size) // BLOCK for size in tensor.shape)
            scale = torch.empty(int(rows[-1]) + 1, int(columns[-1]) + 1)
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    scale[row, column] = tensor[rows == row][:, columns == column].abs().max() / 448
            tensors[name] = (tensor / scale[rows][:, columns]).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def scaled(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Scales changed before they are applied."""
    original = TensorReader._stored

    def stored(self: TensorReader, name: str, digests: Any) -> Tensor:
        tensor = original(self, name, digests)
        return change(tensor) if name.endswith("_scale_inv") else tensor

    return replaced(TensorReader, "_stored", stored)


def transposed_grid(scale: Tensor) -> Tensor:
    return scale.flatten().view(scale.shape[::-1]).t().contiguous()


SCALED = [
    Plant("scales left out", "fp8", scaled(torch.ones_like), EITHER),
    Plant("scales divided by", "fp8", scaled(torch.reciprocal), EITHER),
    Plant("scales by columns", "fp8", scaled(transposed_grid), EITHER),
    Plant("scales of the next row of blocks", "fp8", scaled(lambda scale: scale.roll(1, 0)), EITHER),
    Plant("scales of the next column of blocks", "fp8", scaled(lambda scale: scale.roll(1, 1)), EITHER),
    Plant("one scale for all blocks", "fp8", scaled(lambda scale: scale[:1, :1].expand_as(scale)), EITHER),
    Plant("scales rounded to bfloat16", "fp8", scaled(rounded), EITHER),
]


@pytest.mark.parametrize("plant", SCALED, ids=str)
def test_the_comparison_notices_scales_that_are_applied_wrongly(
    plant: Plant, fp8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.breaks(monkeypatch)
    result = compare(fp8, fp8, length=32)
    assert not result.passed
    assert re.search(plant.reason, "\n".join(result.failures)), result.failures


def test_without_an_error_weights_in_fp8_are_transformers_own(fp8: Path) -> None:
    result = compare(fp8, fp8, length=32)
    assert result.passed, result.failures


def test_every_planted_error_is_another_one() -> None:
    planted = [str(plant) for plant in (*IMPORT, *EXPORT, *COMPARED, *SCALED)]
    assert len(set(planted)) == len(planted) >= 40
