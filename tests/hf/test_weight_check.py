"""What no honest folder holds is refused by tensor and file: zeros of a broken download, one expert twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.hf.weight_check import _runs_of_zeros
from megatron_moe_tools.convert.cli import main
from tests.helpers.conversions import convert, words
from tests.helpers.tiny_models import make
from tests.hf import imported_cases, small_folders

GATE, BIAS, NORM, TABLE = small_folders.GATE, small_folders.BIAS, "model.norm.weight", "lm_head.weight"
ATTENTION, TWIN = small_folders.ATTENTION, GATE.replace("experts.2", "experts.0")


@pytest.fixture
def hf(tmp_path):
    return small_folders.sound(tmp_path / "hf", tmp_path / "sentinel")


def edited(hf: Path, change: Any) -> Path:
    for file in small_folders.SHARDS:
        values = load_file(hf / file)
        change({name: value.view(-1) for name, value in values.items()})
        save_file(values, hf / file, {"format": "pt"})
    return hf


def zeros(name: str, first: int | None = None, end: int | None = None) -> Any:
    return lambda values: values[name][first:end].zero_() if name in values else None


def the_expert_again(values: dict[str, torch.Tensor]) -> None:
    if GATE in values:
        values[GATE].copy_(values[TWIN])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (zeros(GATE), f"{GATE} holds 128 zeros in a row from element 0 of 128 on"),
        (zeros(ATTENTION, 24, 48), f"{ATTENTION} holds 24 zeros in a row from element 24 of 192 on"),
        (zeros(TABLE, 32, 64), f"{TABLE} holds 32 zeros in a row from element 32 of 528 on"),
        (zeros(TABLE, 500), f"{TABLE} holds 28 zeros in a row from element 500 of 528 on"),
        (zeros(NORM, 12), f"{NORM} holds 4 zeros in a row from element 12 of 16 on"),
        (the_expert_again, f"{GATE} equals {TWIN}"),
    ],
)
def test_damage_is_refused_by_tensor_and_file_until_it_is_allowed(tmp_path, capsys, hf, change, says):
    line = words("hf", "native", edited(hf, change), tmp_path / "native")
    assert main(line) == 2
    message = capsys.readouterr().err
    assert f".safetensors: tensor {says}" in message and "--allow-suspicious-weights" in message
    assert main([*line, "--allow-suspicious-weights"]) == 0
    kept = json.loads((tmp_path / "native" / "iter_0000000" / "state.json").read_text())
    assert len(kept["precision_warnings"]) == 1 and says in kept["precision_warnings"][0]


def test_what_honest_folders_have_is_taken(tmp_path, hf):
    def change(values: dict[str, torch.Tensor]) -> None:
        zeros(BIAS)(values)
        zeros(ATTENTION, 36, 48)(values)  # a unit that died
        zeros(TABLE, 16, 32)(values)  # a padding token
        zeros(TABLE, 16 * 28)(values)  # rows of no token

    convert("hf", "native", edited(hf, change), tmp_path / "native")


def test_every_run_of_zeros_that_is_long_enough_is_found():
    for first in range(12):
        for count in range(4, 20):
            flat = torch.ones(40)
            flat[first : first + count] = 0
            assert list(_runs_of_zeros(flat, 4)) == [(first, count)]


def test_a_folder_is_what_its_certificate_lists(tmp_path, capsys, hf):
    convert("hf", "native", hf, tmp_path / "native")
    convert("native", "hf", tmp_path / "native", tmp_path / "back")
    convert("hf", "native", tmp_path / "back", tmp_path / "again")
    file = tmp_path / "back" / "model.safetensors"
    values = load_file(file)
    values[ATTENTION] += 1
    save_file(values, file, {"format": "pt"})
    assert main(words("hf", "native", tmp_path / "back", tmp_path / "other")) == 2
    says = f"{file}: tensor {ATTENTION} is not what conversion_certificate.json"
    assert says in capsys.readouterr().err
    (tmp_path / "back" / "conversion_certificate.json").write_text('{"tensors": [3]}')
    assert main(words("hf", "native", tmp_path / "back", tmp_path / "other")) == 2
    assert "is no certificate of a conversion" in capsys.readouterr().err


def test_ranks_refuse_together_what_none_of_them_sees_alone(gloo, tmp_path):
    make("qwen3-moe", 4, tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "native")
    convert("native", "hf", tmp_path / "native", tmp_path / "back")
    file, name = tmp_path / "back" / "model.safetensors", "model.layers.1.mlp.experts.{}.up_proj.weight"
    values = load_file(file)
    values[name.format(7)].copy_(values[name.format(0)])
    save_file(values, file, {"format": "pt"})

    def said(**flags: bool) -> str:
        layout = {"expert_model_parallel_size": 2, **flags}
        first, second = gloo.run(2, imported_cases.refused, folder=str(file.parent), layout=layout)
        assert first == second
        return first

    assert f"{name.format(7)} is not what conversion_certificate.json" in said()
    (file.parent / "conversion_certificate.json").unlink()
    assert f"{name.format(7)} equals {name.format(0)}" in said()
    assert said(allow_suspicious_weights=True) == ""
