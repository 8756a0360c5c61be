"""megatron-moe convert: what goes in comes out to the bit, and the certificate says what was done."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.convert.cli import main, run
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, held, unequal, words
from tests.helpers.rows import rows
from tests.helpers.trained_steps import tensors
from tests.hf import small_folders

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def there_and_back(hf: Path, *flags: str) -> tuple[dict[str, Any], Path]:
    """hf -> native -> hf, beside it; the first certificate and the last folder."""
    content = convert("hf", "native", hf, hf.parent / "native", *flags)
    convert("native", "hf", hf.parent / "native", hf.parent / "back", "--max-shard-size", "100KB")
    return content, hf.parent / "back"


def made(case: str, folder: Path, change: Any = dict) -> Path:
    """A model of `tiny_models` with changed tensors, in one file."""
    tiny_models.make(case, 1, folder / "hf")
    values = load_file(folder / "hf" / "model.safetensors")
    save_file(change(values), folder / "hf" / "model.safetensors", {"format": "pt"})
    return folder / "hf"


CASES = ["deepseek-v2-grouped", "deepseek-v3", "mixtral", "qwen2-moe", "qwen3-moe-tied"]


@pytest.mark.parametrize("case", rows(CASES, test=["deepseek-v3", "qwen2-moe"]))
def test_there_and_back_nothing_changes(tmp_path, case):
    hf = tmp_path / "hf"
    tiny_models.make(case, 3, hf, torch.bfloat16)
    (hf / "tokenizer.json").write_text('{"a": 1}')
    (hf / "modeling_own.py").write_text("raise SystemExit(3)")
    certificate, back = there_and_back(hf)
    assert unequal(held(hf), held(back)) == []
    for name in ("config.json", "generation_config.json", "tokenizer.json", "modeling_own.py"):
        assert (hf / name).read_bytes() == (back / name).read_bytes()
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 3
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == held(hf).keys()
    table = certificate["tensors"]
    assert sorted(entry["name"] for row in table for entry in row["hf"]) == sorted(held(hf))
    assert certificate["warnings"] == [] and {row["cast"] for row in table} == {None}
    step = tensors(tmp_path / "native" / "iter_0000000")
    dtypes = {value.dtype for key, value in step.items() if "expert_bias" not in key}
    assert dtypes == {torch.bfloat16} and certificate["dtype"] == "bfloat16"
    for entry in certificate["source"]["files"].values():
        assert len(entry["sha256"]) == 64


def published_as_kimi_vl(folder: Path) -> None:
    """Give a folder of Kimi-K2.5 the names of Kimi-VL's, which transformers does not have."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_vl", "architectures": ["KimiVLForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    values = {name.replace("mm_projector", "multi_modal_projector"): value for name, value in held(folder).items()}
    save_file(values, folder / "model.safetensors", {"format": "pt"})


CARRIED = [("glm-moe-dsa", "deepseek-v3"), ("qwen3-vl-moe", "qwen3-moe"), ("kimi-k25", "deepseek-v3")]


@pytest.mark.parametrize(("case", "without"), rows([*CARRIED, ("kimi-vl", "deepseek-v3")], test=CARRIED[:2]))
def test_what_models_here_do_not_have_comes_from_the_folder_that_was_imported(tmp_path, case, without):
    hf, native, other = tmp_path / "hf", tmp_path / "native", tmp_path / "other"
    for seed, folder in ((3, hf), (4, other)):
        tiny_models.make(case.replace("kimi-vl", "kimi-k25"), seed, folder, torch.bfloat16)
        if case == "kimi-vl":
            published_as_kimi_vl(folder)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    certificate = convert("hf", "native", hf, native)
    mapped = {entry["name"] for row in certificate["tensors"] for entry in row["hf"]}
    carried = sorted(held(hf).keys() - mapped)
    assert certificate["carried"] == len(carried) > 10 and certificate["ignored"] == carried
    assert any(note.startswith(f"{len(carried)} tensors") and "--carry-from" in note for note in certificate["notes"])
    back = convert("native", "hf", native, tmp_path / "back", "--carry-from", str(hf), "--max-shard-size", "100KB")
    assert unequal(held(hf), held(tmp_path / "back")) == [] and back["carried"].keys() == set(carried)
    assert (hf / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == held(hf).keys()
    for flags, says in (
        ((), f"{len(carried)} tensors .*--carry-from DIR.*--family {without}"),
        (("--carry-from", str(other)), "is not the folder that"),
        (("--carry-from", str(hf), "--dtype", "fp8"), "--dtype fp8"),
        (("--carry-from", str(hf), "--family", without), f"has all tensors of a {without}"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(words("native", "hf", native, tmp_path / "refused", *flags))
    # Without them it is a model of text, and the same one.
    convert("native", "hf", native, tmp_path / "text", "--family", without)
    convert("hf", "native", tmp_path / "text", tmp_path / "again")
    assert unequal(*(tensors(path / "iter_0000000") for path in (native, tmp_path / "again"))) == []


def test_the_certificate_names_both_sides_with_their_hashes(tmp_path):
    hf = small_folders.sound(tmp_path / "hf", tmp_path / "sentinel")
    certificate = convert("hf", "native", hf, tmp_path / "native")
    values, step = held(hf), tensors(tmp_path / "native" / "iter_0000000")

    def digest(value: torch.Tensor) -> str:
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    for row in certificate["tensors"]:
        native = row["native"]
        box = tuple(slice(first, first + count) for first, count in zip(native["start"], native["shape"]))
        value = step[native["key"]][box]
        assert native["sha256"] == digest(value) and str(value.dtype) == f"torch.{native['dtype']}"
        for entry in row["hf"]:
            assert entry["sha256"] == digest(values[entry["name"]])
            assert entry["shape"] == list(values[entry["name"]].shape)
    for side, root in (("source", hf), ("output", tmp_path / "native")):
        for name, entry in certificate[side]["files"].items():
            data = (root / name).read_bytes()
            assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    written = {path.relative_to(tmp_path / "native").as_posix() for path in (tmp_path / "native").rglob("*")}
    files = certificate["output"]["files"].keys() | {"conversion_certificate.json"}
    assert (hf / "model.safetensors.index.json").exists()
    assert certificate["source"]["files"].keys() == {path.name for path in hf.iterdir()}
    assert {name for name in written if (tmp_path / "native" / name).is_file()} == files


def test_the_bias_stays_fp32_whatever_the_dtype(tmp_path):
    hf = made("deepseek-v3", tmp_path)
    certificate = convert("hf", "native", hf, tmp_path / "native", "--dtype", "bf16")
    step = tensors(tmp_path / "native" / "iter_0000000")
    was, bias = held(hf), step["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32 and torch.equal(bias, was[BIAS])
    assert step["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16
    assert {row["cast"] for row in certificate["tensors"]} == {"float32 -> bfloat16", None}
    convert("native", "hf", tmp_path / "native", tmp_path / "back", "--dtype", "fp16")
    back = held(tmp_path / "back")
    assert torch.equal(back[BIAS], was[BIAS]) and back[BIAS].dtype == torch.float32
    assert {value.dtype for name, value in back.items() if "bias" not in name} == {torch.float16}
    assert torch.equal(back["lm_head.weight"], was["lm_head.weight"].bfloat16().half())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


def test_a_bias_that_was_rounded_before_is_a_loud_warning_on_record(tmp_path, capsys):
    hf = made("deepseek-v3", tmp_path, lambda values: {**values, BIAS: values[BIAS].bfloat16()})
    certificate, back = there_and_back(hf)
    assert capsys.readouterr().err.count(f"PRECISION WARNING: {BIAS} is bfloat16") == 1
    assert certificate["warnings"][0].startswith("PRECISION WARNING") and len(certificate["warnings"]) == 1
    state = json.loads((tmp_path / "native" / "iter_0000000" / "state.json").read_text())
    assert state["precision_warnings"] == certificate["warnings"]
    assert torch.equal(held(back)[BIAS], held(hf)[BIAS].float())


def test_fp32_beside_half_precision_goes_there_and_back_and_two_halves_are_refused(tmp_path, capsys):
    """As --keep-fp32 exports them, and folders with norms and gates in fp32."""

    def kept(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wide = ("norm.weight", "mlp.gate.weight", "correction_bias", "1.self_attn.o_proj.weight", "embed_tokens.weight")
        return {name: value if name.endswith(wide) else value.bfloat16() for name, value in values.items()}

    hf = made("deepseek-v3", tmp_path, kept)
    _, back = there_and_back(hf, "--verify")
    assert unequal(held(hf), held(back)) == []
    config = json.loads((tmp_path / "native" / "iter_0000000" / "config.json").read_text())
    wide = ["embedding", "norms", "router", "decoder.layers.1.self_attention.linear_proj"]
    assert config["bf16"] and sorted(config["keep_fp32"]) == sorted(wide)
    gate = "model.layers.2.mlp.gate.weight"
    save_file({**held(hf), gate: held(hf)[gate].half()}, hf / "model.safetensors", {"format": "pt"})
    line = words("hf", "native", hf, tmp_path / "half")
    assert main(line) == 2
    message = capsys.readouterr().err
    assert gate in message and "--dtype {bf16,fp16,fp32}" in message and not (tmp_path / "half").exists()
    assert main([*line, "--dtype", "fp32"]) == 0


def test_fp8_becomes_bf16_and_its_scales_are_used_up(tmp_path):
    hf = small_folders.sound(tmp_path / "hf", tmp_path / "sentinel", fp8=True)
    certificate, back = there_and_back(hf)
    was, now = held(hf), held(back)
    scaled = {name.removesuffix("_scale_inv") for name in was if name.endswith("_scale_inv")}
    assert scaled and now.keys() == {name for name in was if not name.endswith("_scale_inv")}
    for name in scaled:
        block = was[f"{name}_scale_inv"].float().repeat_interleave(8, 0).repeat_interleave(8, 1)
        rows, columns = was[name].shape
        assert torch.equal(now[name], (was[name].float() * block[:rows, :columns]).bfloat16())
    entries = [entry for row in certificate["tensors"] for entry in row["hf"] if entry["name"] in scaled]
    assert {entry["scale"]["name"].removesuffix("_scale_inv") for entry in entries} == scaled
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    note = json.loads((back / "conversion_certificate.json").read_text())["notes"]
    assert any("quantization_config is left out" in line for line in note)


def test_layers_of_multi_token_prediction_come_back_with_their_copies_or_are_dropped_both_ways(tmp_path):
    hf = tmp_path / "hf"
    tiny_models.make("deepseek-v3", 2, hf)
    without = held(hf)
    tiny_models.add_prediction_layers(hf, 2)
    certificate = convert("hf", "native", hf, tmp_path / "whole")
    copies = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    assert certificate["copies"].keys() == copies & held(hf).keys() != set()
    convert("native", "hf", tmp_path / "whole", tmp_path / "all")
    assert unequal(held(hf), held(tmp_path / "all")) == []
    convert("native", "hf", tmp_path / "whole", tmp_path / "cut", "--drop-mtp")
    assert unequal(without, held(tmp_path / "cut")) == []

    certificate, back = there_and_back(hf, "--drop-mtp")
    assert unequal(without, held(back)) == []
    assert set(certificate["dropped"]) == held(hf).keys() - without.keys()
    assert not json.loads((back / "config.json").read_text()).get("num_nextn_predict_layers")


def test_a_tied_output_layer_that_a_folder_holds_all_the_same_is_kept(tmp_path):
    table = "model.embed_tokens.weight"
    hf = made("qwen3-moe-tied", tmp_path, lambda values: {**values, "lm_head.weight": values[table].clone()})
    _, back = there_and_back(hf)
    assert unequal(held(hf), held(back)) == []


def test_frequencies_that_follow_from_the_configuration_are_left_out_and_noted(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    hf = made("mixtral", tmp_path, lambda values: {**values, name: torch.ones(8)})
    certificate, back = there_and_back(hf)
    assert certificate["ignored"] == [name] and unequal(held(hf), held(back)) == [name]


OTHERWISE = {
    "granitemoe": "--residual-multiplier 0.4",
    "hunyuan-v1-moe": "--qk-layernorm-after-rotation",
    "ernie4-5-moe": "--moe-router-enable-expert-bias",
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_model_that_megatron_computes_otherwise_is_not_written_for_it(tmp_path, capsys, case):
    tiny_models.make(case, 1, tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "native")
    assert main(words("native", "megatron", tmp_path / "native", tmp_path / "x")) == 2
    assert OTHERWISE[case] in capsys.readouterr().err and not (tmp_path / "x").exists()
