"""Weights stored in fp8 with a scale for each block, against a reference that takes one number at a time."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.tensors import TensorReader, to_bytes


def quantised(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values over the whole range of fp8, subnormals and signed zeros too, and scales of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.int32)
    codes[codes % 128 == 127] = 128  # not the two NaNs
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.exp(3 * torch.randn(grid, generator=generator))
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scales


def e4m3(code: int) -> float:
    """A byte as a number: sign, 4 bits of exponent biased by 7, 3 bits of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def slowly(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Number by number, each rounded to fp32 once: the product of 4 and 24 bits of mantissa fits into fp64."""
    codes, factors = values.view(torch.uint8).tolist(), scales.double().tolist()
    result = [
        [e4m3(code) * factors[row // block[0]][column // block[1]] for column, code in enumerate(line)]
        for row, line in enumerate(codes)
    ]
    return torch.tensor(result, dtype=torch.float64).float()


def opened(path: Path, tensors: dict[str, torch.Tensor], quantization: dict | None) -> HFFolder:
    path.mkdir(exist_ok=True)
    config = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return HFFolder.open(path)


SIZES = [(1, 1, 128, 128), (128, 128, 128, 128), (129, 127, 128, 128), (130, 300, 128, 128), (5, 257, 128, 128)]
SIZES += [(256, 64, 128, 128), (7, 9, 4, 2), (9, 7, 2, 4), (8, 8, 1, 8), (3, 5, 64, 64)]


@pytest.mark.parametrize("rows, columns, high, wide", SIZES)
def test_a_block_has_its_scale_at_the_edges_too(tmp_path, rows, columns, high, wide):
    values, scales = quantised(rows, columns, (high, wide))
    settings = {"quant_method": "fp8", "weight_block_size": [high, wide]}
    folder = opened(tmp_path, {"w": values, "w_scale_inv": scales}, settings)
    expected = slowly(values, scales, (high, wide))
    with TensorReader(folder) as reader:
        assert reader.names() == ["w"] and reader.sources("w") == ("w", "w_scale_inv")
        assert reader.dtype("w") == torch.bfloat16 and folder.notes == []
        wide_result, digests = reader.read_hashed("w", torch.float32)
        assert wide_result.dtype == torch.float32 and torch.equal(wide_result, expected)
        rounded = reader.read("w")
        assert rounded.dtype == torch.bfloat16 and bytes(to_bytes(rounded)) == bytes(to_bytes(expected.bfloat16()))
    assert digests == {
        name: hashlib.sha256(bytes(to_bytes(t))).hexdigest() for name, t in (("w", values), ("w_scale_inv", scales))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_scales_are_widened_and_blocks_are_128_wide_where_the_configuration_says_nothing(tmp_path, dtype):
    values, scales = quantised(130, 20, (128, 128))
    folder = opened(tmp_path, {"w": values, "w_scale_inv": scales.to(dtype)}, None)
    assert len(folder.notes) == 1 and "128 x 128" in folder.notes[0]
    with TensorReader(folder) as reader:
        assert torch.equal(reader.read("w", torch.float32), slowly(values, scales.to(dtype), (128, 128)))


def test_a_block_of_zeros_may_have_the_scale_zero(tmp_path):
    values, scales = quantised(130, 20, (128, 128))
    scales[1, 0] = 0.0
    values.view(torch.uint8)[128:] = 0
    with TensorReader(opened(tmp_path, {"w": values, "w_scale_inv": scales}, None)) as reader:
        assert not reader.read("w")[128:].any() and reader.read("w")[:128].any()
