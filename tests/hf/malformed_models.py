"""Ways in which a folder's model is wrong: its configuration, its tensors, what is stored in fp8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.hf.malformed import CASES, case, change_index, change_json
from tests.hf.small_folders import ATTENTION, BIAS, GATE, INDEX, SHARDS

__all__ = ["CASES"]

SECOND = SHARDS[1]


def _config(name: str, key: str, value: Any, *named: str, fp8: bool = False, opens: bool = True) -> None:
    """A case that is one key of config.json; the key is named."""
    case(name, *(named or (key,)), opens=opens, fp8=fp8)(
        lambda folder: change_json(folder / "config.json", {key: value})
    )


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace or remove a tensor, in its file; the index follows."""
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / file)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, folder / file, {"format": "pt"})
    change_index(folder, {name: ... if changed is None else file})


_config("an unsupported family", "model_type", "gpt_oss", "gpt_oss")
_config("a family nobody knows", "model_type", "new_moe", "new_moe")
_config("no family", "model_type", ...)
_config("a class of another family", "architectures", ["MixtralForCausalLM"], "architectures")
_config("more layers than tensors", "num_hidden_layers", 3, "model.layers.2.input_layernorm.weight")
_config("fewer layers than tensors", "num_hidden_layers", 1, "first_k_dense_replace")
_config("another hidden size", "hidden_size", 32, "model.embed_tokens.weight")
_config("another vocabulary", "vocab_size", 34, "model.embed_tokens.weight")
_config("more experts than tensors", "n_routed_experts", 8, "experts.4.gate_proj.weight")
_config("a width that is not the experts'", "moe_intermediate_size", 4, "experts.0.gate_proj.weight")
_config("tied and untied", "tie_word_embeddings", True, "lm_head.weight")
_config("a negative number of layers", "num_hidden_layers", -1)
_config("a number of experts that is a string", "n_routed_experts", "4")
_config("layers without end", "num_hidden_layers", 10**9)
_config("experts without end", "n_routed_experts", 10**9)
_config("a vocabulary without end", "vocab_size", 10**15)
_config("a hidden size beyond 64 bits", "hidden_size", 10**30)
_config("multi-token prediction without end", "num_nextn_predict_layers", 10**9)
_config("dense layers without end", "first_k_dense_replace", 10**12)
_config("more experts chosen than there are", "num_experts_per_tok", 5)
_config("an epsilon that is a string", "rms_norm_eps", "1e-6")
_config("a vocabulary that is a truth", "vocab_size", True)
_config("a rotary scaling that is a list", "rope_scaling", [4.0])
_config("an unknown rotary scaling", "rope_scaling", {"type": "magic", "factor": 4.0}, "rope_scaling")
_config("groups that do not divide the experts", "n_group", 3)
_config("another activation", "hidden_act", "gelu")
_config("an unknown way to choose", "topk_method", "magic")
_config("another quantisation", "quantization_config", {"quant_method": "gptq", "bits": 4}, "quant_method")
_config("a quantisation that is a list", "quantization_config", [1], opens=False)


# ---- tensors

case("a tensor missing", ATTENTION, opens=True)(lambda folder: change_tensor(folder, ATTENTION, lambda tensor: None))
case("an expert missing", "experts.3.up_proj.weight", opens=True)(
    lambda folder: change_tensor(folder, "model.layers.1.mlp.experts.3.up_proj.weight", lambda tensor: None)
)
case("a tensor transposed", ATTENTION, "[12, 16]", opens=True)(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor.T.contiguous())
)
case("a tensor in integers", ATTENTION, "int32")(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor.int())
)
case("a tensor in fp64", ATTENTION, "float64")(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor.double())
)
case("a tensor in the other fp8", ATTENTION, "float8_e5m2")(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor.to(torch.float8_e5m2))
)
case("a tensor in another dtype", ATTENTION, "float16", opens=True)(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor.half())
)
case("a tensor of no size", ATTENTION, opens=True)(
    lambda folder: change_tensor(folder, ATTENTION, lambda tensor: tensor[:0])
)


@case("a tensor nobody knows", "model.layers.1.mlp.experts.4.gate_proj.weight", opens=True)
def _(folder: Path) -> None:
    name = "model.layers.1.mlp.experts.4.gate_proj.weight"
    save_file({**load_file(folder / SECOND), name: torch.ones(8, 16).bfloat16()}, folder / SECOND)
    change_index(folder, {name: SECOND})


@case("a layer beyond the last", "num_nextn_predict_layers", "beyond num_hidden_layers", opens=True)
def _(folder: Path) -> None:
    save_file({**load_file(folder / SECOND), "model.layers.2.enorm.weight": torch.ones(16).bfloat16()}, folder / SECOND)
    change_index(folder, {"model.layers.2.enorm.weight": SECOND})


@case("multi-token prediction in part", "model.layers.2.hnorm.weight", "missing", opens=True)
def _(folder: Path) -> None:
    CASES["a layer beyond the last"].damage(folder)
    change_json(folder / "config.json", {"num_nextn_predict_layers": 1})


def _set(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.reshape(-1)[1] = value
        return tensor

    return change


case("NaN in an expert", GATE, opens=True)(lambda folder: change_tensor(folder, GATE, _set(float("nan"))))
case("infinity in an expert", GATE, opens=True)(lambda folder: change_tensor(folder, GATE, _set(float("inf"))))
case("NaN in a router's bias", BIAS, opens=True)(lambda folder: change_tensor(folder, BIAS, _set(float("nan"))))


# ---- fp8

SCALE = f"{GATE}_scale_inv"
case("fp8 without its scales", SCALE, fp8=True)(lambda folder: change_tensor(folder, SCALE, lambda tensor: None))
case("scales of another shape", SCALE, "[1, 2]", fp8=True)(
    lambda folder: change_tensor(folder, SCALE, lambda tensor: torch.ones(2, 2))
)
case("one scale for a whole tensor", SCALE, fp8=True)(
    lambda folder: change_tensor(folder, SCALE, lambda tensor: torch.tensor(1.0))
)
case("scales in integers", SCALE, "int32", fp8=True)(
    lambda folder: change_tensor(folder, SCALE, lambda tensor: tensor.int())
)
case("scales of nothing", SCALE, GATE, fp8=True)(lambda folder: change_tensor(folder, GATE, lambda tensor: None))
case("scales of a tensor that is not in fp8", SCALE, "bfloat16", fp8=True)(
    lambda folder: change_tensor(folder, GATE, lambda tensor: tensor.bfloat16())
)


@case("a vector in fp8", "model.layers.1.input_layernorm.weight", "no matrix", fp8=True)
def _(folder: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    change_tensor(folder, name, lambda tensor: tensor.to(torch.float8_e4m3fn))
    tensors = load_file(folder / SECOND)
    save_file({**tensors, f"{name}_scale_inv": torch.ones(2)}, folder / SECOND)
    change_index(folder, {f"{name}_scale_inv": SECOND})


case("a scale that is not a number", SCALE, "nan", opens=True, fp8=True)(
    lambda folder: change_tensor(folder, SCALE, _set(float("nan")))
)
case("a scale that is negative", SCALE, "-1.0", opens=True, fp8=True)(
    lambda folder: change_tensor(folder, SCALE, _set(-1.0))
)
case("fp8 that is not a number", GATE, opens=True, fp8=True)(
    lambda folder: change_tensor(folder, GATE, _set(float("nan")))
)
_BLOCKS: dict[str, Any] = {"a block of no rows": [0, 8], "a block of one size": [8], "no block": None, "a name": "8x8"}
for _name, _size in _BLOCKS.items():
    _config(
        f"fp8 with {_name}",
        "quantization_config",
        {"quant_method": "fp8", "weight_block_size": _size},
        "weight_block_size",
        fp8=True,
        opens=False,
    )
_config(
    "fp8 with blocks that the scales do not have",
    "quantization_config",
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "_scale_inv",
    fp8=True,
    opens=False,
)
