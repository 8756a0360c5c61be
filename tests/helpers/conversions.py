"""The conversion tool called in this process, and what its folders hold."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_moe_tools.convert.cli import main


def words(origin: str, target: str, load: Path | str, save: Path, *flags: str) -> list[str]:
    """The command line of a conversion from one format to another."""
    return ["--from", origin, "--to", target, "--load", str(load), "--save", str(save), *flags]


def convert(origin: str, target: str, load: Path | str, save: Path, *flags: str) -> dict[str, Any]:
    """Run the tool; its certificate."""
    assert main(words(origin, target, load, save, *flags)) == 0
    content: dict[str, Any] = json.loads((save / "conversion_certificate.json").read_text())
    return content


def held(folder: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder."""
    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


def unequal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names whose presence, dtype, shape or bits differ."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or first[name].dtype != second[name].dtype
        or not torch.equal(first[name], second[name])
    )  # fmt: skip
