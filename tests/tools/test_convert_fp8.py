"""--dtype fp8: what is rounded, to what, how much, and that importing gives exactly the rounded numbers."""

import json

import pytest
import torch

from megatron_moe.hf.mapping import MappedBlock
from megatron_moe.hf.transforms import Copy
from megatron_moe_tools.convert.hugging_face import rounded, uneven_blocks
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, held

FP8 = torch.float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
          "gate_proj", "up_proj", "down_proj")  # fmt: skip


def slowly(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight, block by block."""
    result = torch.empty(weight.shape)
    for top in range(0, weight.shape[0], 128):
        for left in range(0, weight.shape[1], 128):
            block = weight[top : top + 128, left : left + 128].float()
            scale = block.abs().max() / 448
            numbers = (block / scale).to(FP8).float() if scale > 0 else block
            result[top : top + 128, left : left + 128] = numbers * scale
    return result


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((130, 257), torch.float32), ((1, 3), torch.float32), ((300, 128), torch.bfloat16)], ids=str
)
def test_each_number_is_off_by_half_a_step_of_its_blocks_scale_at_most(shape, dtype):
    weight = (drawn(*shape) * torch.logspace(-6, 2, shape[1])).to(dtype)
    found = rounded(weight)
    assert (found.numbers.dtype, found.numbers.shape) == (FP8, weight.shape)
    assert (found.scales.dtype, found.scales.shape) == (torch.float32, tuple(-(-size // 128) for size in shape))
    scales = found.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    back = found.numbers.float() * scales
    assert torch.equal(found.values, back.bfloat16()) and torch.equal(back, slowly(weight))
    # e4m3 has 3 bits after the leading one; from 2^-6 down its steps are 2^-9.
    half_step = torch.maximum(weight.float().abs() / 16, scales * 2.0**-10)
    error = (back - weight.float()).abs()
    assert bool((error <= half_step * (1 + 1e-5)).all())
    assert found.error["largest"] == pytest.approx(float(error.max()))
    assert found.error["relative_rms"] == pytest.approx(float(error.norm() / weight.float().norm()), rel=1e-5)
    if dtype == torch.bfloat16:  # the largest number of each block comes back as it is
        for rows, again in zip(weight.split(128), found.values.split(128)):
            assert torch.equal(rows.abs().max(), again.abs().max())


def test_blocks_of_zeros_stay_zeros_and_tiny_ones_keep_their_numbers():
    weight = drawn(256, 256)
    weight[:128, :128] = 0
    weight[128:, 128:] *= 1e-30
    found = rounded(weight)
    assert not found.values[:128, :128].any() and bool((found.scales > 0).all())
    assert torch.equal(found.values[128:, 128:], slowly(weight)[128:, 128:].bfloat16())
    zeros = rounded(torch.zeros(3, 5))
    assert not zeros.values.any() and zeros.error["relative_rms"] == 0.0


def test_weights_that_end_within_a_block_are_named():
    """transformers reads their scales as those of other blocks."""
    for shape, is_named in (((128, 64), False), ((256, 384), False), ((192, 64), True), ((8, 200), True)):
        pieces = [MappedBlock(key, (0, 0), ("w",), Copy(shape)) for key in ("a.linear_proj.weight", "a.router.weight")]
        assert bool(uneven_blocks(pieces)) is is_named and not uneven_blocks(pieces[1:]), shape


@pytest.mark.parametrize("case", ["deepseek-v3", "qwen2-moe"])
def test_an_export_in_fp8_is_imported_as_exactly_the_rounded_numbers(tmp_path, case):
    hf = tmp_path / "hf"
    tiny_models.make(case, 4, hf)
    if case == "deepseek-v3":
        tiny_models.add_prediction_layers(hf, 5)
    convert("hf", "native", hf, tmp_path / "native")
    flags = ["--dtype", "fp8", "--max-shard-size", "100KB"]
    certificate = convert("native", "hf", tmp_path / "native", tmp_path / "fp8", *flags)
    was, now = held(hf), held(tmp_path / "fp8")
    linear = {name for name in was if name.split(".")[-2] in LINEAR and name.endswith("weight")}
    assert now.keys() == was.keys() | {f"{name}_scale_inv" for name in linear} and len(linear) > 50
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == now.keys()
    for name, value in was.items():
        if name in linear:
            assert now[name].dtype == FP8 and now[f"{name}_scale_inv"].shape == (1, 1)
        else:  # embeddings, norms, gates, the output layer, the merging of multi-token prediction
            assert torch.equal(now[name], value if name.endswith("correction_bias") else value.bfloat16()), name
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())
    about = said["quantization_config"]
    assert (about["quant_method"], about["fmt"], about["activation_scheme"]) == ("fp8", "e4m3", "dynamic")
    assert about["weight_block_size"] == [128, 128] and said["dtype"] == "bfloat16"
    kept = set(about.get("modules_to_not_convert", ()))
    gates = {"lm_head", *(f"model.layers.{i}.mlp.{gate}" for i in (0, 1, 3) for gate in ("gate", "shared_expert_gate"))}
    assert kept == (gates if case == "qwen2-moe" else set())

    assert certificate["rounding"]["weights"] == len(linear) and 0.02 < certificate["rounding"]["relative_rms"] < 0.04
    assert {row["cast"] for row in certificate["tensors"]} == {
        "float32 -> float8_e4m3fn", "float32 -> bfloat16", *([None] if case == "deepseek-v3" else [])
    }  # fmt: skip

    convert("hf", "native", tmp_path / "fp8", tmp_path / "again", "--dtype", "fp32")
    convert("native", "hf", tmp_path / "again", tmp_path / "back")
    back = held(tmp_path / "back")
    assert back.keys() == was.keys()
    for name in linear:
        assert torch.equal(back[name], slowly(was[name])), name
    entries = {entry["name"]: entry for row in certificate["tensors"] for entry in row["hf"]}
    assert {name for name, entry in entries.items() if "rounding" in entry} == linear
