"""A sound folder of Hugging Face's form, as small as DeepSeek-V3 can be, made without transformers; and raw files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCABULARY, EXPERTS, WIDTH, DENSE_WIDTH = 16, 33, 4, 8, 24
HEADS, LATENT, NOPE, ROPE, VALUE = 2, 8, 8, 4, 6
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "intermediate_size": DENSE_WIDTH, "moe_intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
ATTENTION = "model.layers.1.self_attn.o_proj.weight"
# Python that makes a file where it is run or imported.
MODELING = "from pathlib import Path\nPath({sentinel!r}).touch()\nclass DeepseekV3ForCausalLM: pass\n"


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model by Hugging Face's name."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    for layer in range(2):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (HIDDEN,)
        yield f"{at}post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}self_attn.q_proj.weight", (HEADS * (NOPE + ROPE), HIDDEN)
        yield f"{at}self_attn.kv_a_proj_with_mqa.weight", (LATENT + ROPE, HIDDEN)
        yield f"{at}self_attn.kv_a_layernorm.weight", (LATENT,)
        yield f"{at}self_attn.kv_b_proj.weight", (HEADS * (NOPE + VALUE), LATENT)
        yield f"{at}self_attn.o_proj.weight", (HIDDEN, HEADS * VALUE)
        mlps = {"": DENSE_WIDTH} if layer == 0 else {"shared_experts.": WIDTH}
        if layer == 1:
            yield f"{at}mlp.gate.weight", (EXPERTS, HIDDEN)
            yield f"{at}mlp.gate.e_score_correction_bias", (EXPERTS,)
            mlps |= {f"experts.{expert}.": WIDTH for expert in range(EXPERTS)}
        for name, width in mlps.items():
            yield f"{at}mlp.{name}gate_proj.weight", (width, HIDDEN)
            yield f"{at}mlp.{name}up_proj.weight", (width, HIDDEN)
            yield f"{at}mlp.{name}down_proj.weight", (HIDDEN, width)


def weights(fp8: bool = False) -> dict[str, torch.Tensor]:
    """Random weights in bf16, the router's bias in fp32; with fp8 the matrices of layers in blocks of 8 x 8."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes():
        tensor = torch.randn(shape, generator=generator)
        if fp8 and len(shape) == 2 and ".layers." in name and ".gate." not in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            scales = torch.rand((-(-shape[0] // 8), -(-shape[1] // 8)), generator=generator)
            tensors[f"{name}_scale_inv"] = 0.5 + scales
        else:
            tensors[name] = tensor if name == BIAS else tensor.bfloat16()
    return tensors


def sound(folder: Path, sentinel: Path, fp8: bool = False) -> Path:
    """Write a folder that converts: two shards, a tokenizer, code that would make `sentinel` if it were run."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(fp8)
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(SHARDS, halves):
        save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
    places = {name: file for file, half in zip(SHARDS, halves) for name in half}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    config = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
    write_json(folder / "tokenizer_config.json", {"model_max_length": 64})
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    code = MODELING.format(sentinel=str(sentinel))
    for name in ("modeling_deepseek.py", "configuration_deepseek.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(code)
    (folder / "README.md").write_text("# A model\n")
    (folder / "LICENSE-MODEL").write_text("free\n")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a file of safetensors and its numbers."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(path: Path, header: dict[str, Any] | bytes, numbers: bytes, length: int | None = None) -> None:
    """A file of safetensors as one says, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + numbers)
