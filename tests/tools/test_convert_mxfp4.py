"""MXFP4: what --dtype mxfp4 rounds; transformers reads the same numbers; reading and writing keep them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.convert.hugging_face import packed
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, held, words

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def slowly(value: float, scale: float) -> float:
    """The nearest number times the scale; of two as near the one with the even code."""
    nearest = min(enumerate(MAGNITUDES), key=lambda one: (abs(one[1] - abs(value) / scale), one[0] % 2))[1]
    return (nearest if value >= 0 else -nearest) * scale


def test_each_number_is_rounded_to_the_nearest_of_its_block():
    weight = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0))
    weight[0, :32, 0] = 0
    weight[1, 32:, 2] *= 1e-30
    weight[1, :32, 3] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)  # in the middle
    found = packed(weight)
    assert (found.numbers.shape, found.scales.shape) == ((2, 6, 2, 16), (2, 6, 2))
    scales = 2.0 ** (found.scales.double() - 127)
    for e, k, n in ((e, k, n) for e in range(2) for k in range(64) for n in range(6)):
        assert float(found.values[e, k, n]) == slowly(float(weight[e, k, n]), float(scales[e, n, k // 32]))
    assert torch.equal(convert_moe_packed_tensors(found.numbers, found.scales, dtype=torch.bfloat16), found.values)
    assert torch.equal(packed(found.values).values, found.values)
    difference = found.values.double() - weight.double()
    assert found.error["relative_rms"] == pytest.approx(float(difference.norm() / weight.double().norm()), rel=1e-4)


def test_a_model_in_mxfp4_is_read_as_transformers_reads_it_and_comes_back_with_the_same_numbers(tmp_path, capsys):
    hf, native, fp4 = (tmp_path / name for name in ("hf", "native", "fp4"))
    tiny_models.make("gpt-oss", 4, hf, torch.bfloat16)
    convert("hf", "native", hf, native)
    certificate = convert("native", "hf", native, fp4, "--dtype", "mxfp4", "--max-shard-size", "100KB")
    was, now = held(hf), held(fp4)
    weights = {name for name in was if name.endswith(("gate_up_proj", "down_proj"))}
    assert now.keys() == was.keys() - weights | {f"{name}_{part}" for name in weights for part in ("blocks", "scales")}
    assert all(torch.equal(now[name], was[name]) for name in was.keys() - weights)
    said = json.loads((fp4 / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "mxfp4" and "lm_head" in said["modules_to_not_convert"]
    rounding = certificate["rounding"]
    assert rounding["weights"] == len(weights) == 8 and rounding["block"] == [32]
    assert 0.08 < rounding["relative_rms"] < 0.15
    # the logits of both sides, transformers' weights scaled by lines of their own
    convert("hf", "native", fp4, tmp_path / "again", "--verify")
    convert("native", "hf", tmp_path / "again", tmp_path / "back")
    back = held(tmp_path / "back")
    assert back.keys() == was.keys()
    for name in weights:
        theirs = convert_moe_packed_tensors(now[f"{name}_blocks"], now[f"{name}_scales"], dtype=torch.bfloat16)
        assert torch.equal(back[name], theirs) and torch.equal(theirs, packed(was[name]).values), name
    again = tmp_path / "fp4 again"
    convert("native", "hf", tmp_path / "again", again, "--dtype", "mxfp4")
    for name in weights:
        blocks, scales = (held(again)[f"{name}_{part}"] for part in ("blocks", "scales"))
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16), back[name]), name

    (fp4 / "conversion_certificate.json").unlink()
    file = next(fp4.glob("model-00001*"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][0, 0, 0] = 255
    save_file(tensors, file, {"format": "pt"})
    assert main(words("hf", "native", fp4, tmp_path / "damaged")) == 2 and not (tmp_path / "damaged").exists()
    assert f"{name!r} holds 255, which is no number" in capsys.readouterr().err


def test_formats_belong_to_families(tmp_path, capsys):
    for case, dtype in (("gpt-oss", "fp8"), ("mixtral", "mxfp4")):
        hf, native = tmp_path / case, tmp_path / f"{case} native"
        tiny_models.make(case, 4, hf)
        convert("hf", "native", hf, native)
        assert main(words("native", "hf", native, tmp_path / "out", "--dtype", dtype)) == 2
        assert f"--dtype {dtype}: {case} is not published in it" in capsys.readouterr().err
