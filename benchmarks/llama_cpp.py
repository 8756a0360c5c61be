"""Greedy tokens of llama.cpp from exported models against those of transformers.

llama.cpp and its file format are in no lock file: install both into a folder, and run from the repository's root

    pip install --target build/llama_cpp --no-deps gguf==0.19.0 xllamacpp==2026.10.11549
    PYTHONPATH=.:build/llama_cpp python -m benchmarks.llama_cpp

For each case and seed, a random model of transformers is converted to a step and back to a folder, and the folder is
written as GGUF in fp32 (the names are llama.cpp's, `gguf.MODEL_TENSORS`). llama.cpp then continues a prompt token by
token, and transformers computes the logits of the same tokens from the exported folder. Told are the tokens that
differ and the largest difference of the chosen tokens' log-probabilities. Any differing token ends in status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

try:
    import gguf
    import xllamacpp
except ImportError as missing:
    raise SystemExit(f"{missing}: the docstring of benchmarks/llama_cpp.py says how to install it") from missing

from megatron_moe_tools.convert import cli as convert
from tests.helpers import tiny_models

# llama.cpp takes a DeepSeek-V2 of other than 26 or 27 layers to have queries of a low rank
CASES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "qwen3-moe-tied": {},
    "mixtral": {},
    "deepseek-v2": {"q_lora_rank": 24},
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "deepseek_v2": "deepseek2"}
PROMPT = [3, 17, 99, 4, 56, 120]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def renamed(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder under llama.cpp's names, in the shapes that it reads."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    heads = config["num_attention_heads"]
    for name, tensor in tensors.items():
        within, block = name.removesuffix(".weight"), ""
        if name.startswith("model.layers."):
            _, _, layer, within = within.split(".", 3)
            block = f"blk.{layer}."
        if ".experts." in within:
            _, _, tail = within.partition(".experts.")
            number, matrix = tail.split(".")
            experts.setdefault(f"{block}{EXPERTS[matrix]}.weight", {})[int(number)] = tensor
        elif within == "self_attn.kv_b_proj":
            # its attention multiplies by the part of the keys as it is, and by the part of the values
            rows = tensor.view(heads, -1, config["kv_lora_rank"])
            keys, values = rows.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[f"{block}attn_k_b.weight"] = keys.transpose(1, 2)
            found[f"{block}attn_v_b.weight"] = values
        else:
            if config["model_type"] == "mixtral" and within in ("self_attn.q_proj", "self_attn.k_proj"):
                # it rotates neighbours here, and transformers the two halves of a head
                count = heads if "q_proj" in within else config["num_key_value_heads"]
                tensor = tensor.view(count, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
            found[f"{block}{NAMES[within]}.weight"] = tensor
    for name, by_number in experts.items():
        found[name] = torch.stack([by_number[number] for number in range(len(by_number))])
    return found


def write_gguf(folder: Path, file: Path) -> None:
    """Write an exported folder in fp32 as llama.cpp reads it, with a vocabulary of made-up words."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor for part in folder.glob("*.safetensors") for name, tensor in load_file(part).items()}
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_expert_count(config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "deepseek_v2":
        add_latent_attention(writer, config)
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    words = ["<unk>", "<s>", "</s>", *(f"w{token}" for token in range(3, config["vocab_size"]))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3, *[1] * (len(words) - 3)])
    for name, tensor in renamed(config, tensors).items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_latent_attention(writer: Any, config: dict[str, Any]) -> None:
    """Write what llama.cpp knows about DeepSeek-V2: one head of keys and values, the latent with the rotated part."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def continued(file: Path, tokens: int) -> tuple[list[int], list[float]]:
    """Return the tokens by which llama.cpp continues the prompt greedily, and their log-probabilities."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_gpu_layers, params.warmup = 256, 0, False
    params.verbosity = 1
    params.cpuparams.n_threads = 2
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    chosen: list[int] = []
    probabilities: list[float] = []
    for _ in range(tokens):
        # one at a time: llama.cpp stops where its vocabulary ends a text, and a random model has no ends
        asked = {"prompt": PROMPT + chosen, "max_tokens": 1, "temperature": 0.0, "logprobs": 1, "seed": 1}
        answer = server.handle_completions(asked)
        first = answer["choices"][0]["logprobs"]["content"][0]
        chosen.append(first["id"])
        probabilities.append(first["logprob"])
    return chosen, probabilities


def compared(case: str, seed: int, tokens: int, folder: Path) -> tuple[int, float]:
    """Return how many greedy tokens differ, and the largest difference of a chosen token's log-probability."""
    name, settings = tiny_models.CASES[case]
    with contextlib.ExitStack() as stack:
        tiny_models.CASES[case] = (name, {**settings, **CASES[case]})
        stack.callback(tiny_models.CASES.__setitem__, case, (name, settings))
        tiny_models.make(case, seed, folder / "source")
    for origin, target, load, save in (("hf", "native", "source", "step"), ("native", "hf", "step", "exported")):
        command = ["--from", origin, "--to", target, "--load", str(folder / load), "--save", str(folder / save)]
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main(command) == 0
    write_gguf(folder / "exported", folder / "model.gguf")
    chosen, probabilities = continued(folder / "model.gguf", tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + chosen])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    differing = (logits.argmax(-1) != torch.tensor(chosen)).sum()
    apart = expected[range(tokens), chosen] - torch.tensor(probabilities)
    return int(differing), float(apart.abs().max())


def main() -> int:
    """Print a line for each case and seed; return 1 if a token differs."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--seeds", type=int, default=4)
    p.add_argument("--tokens", type=int, default=32)
    words = p.parse_args()
    wrong = 0
    for case in words.cases:
        for seed in range(words.seeds):
            with tempfile.TemporaryDirectory() as folder:
                differing, apart = compared(case, seed, words.tokens, Path(folder))
            wrong += differing
            print(f"{case} seed {seed}: {differing} of {words.tokens} tokens differ, log-probabilities by {apart:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
