"""Small models of every family with random weights, made and saved by transformers itself.

They are made to catch what a careless conversion gets away with: norms far from one, biases that are not zero, fewer
key/value groups than heads but more than one, a vocabulary of an odd size, router biases whose bfloat16 would choose
other experts, an epsilon that is not the latent norms', groups of experts that "max" and "top2" rank differently.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers import ling

VOCABULARY = 131

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_SHARED, "moe_intermediate_size": 24, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GROUPED_QUERY: dict[str, Any] = {**_SHARED, "num_key_value_heads": 2}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_MILLION: dict[str, Any] = {**_PLAIN, "rope_theta": 1e6}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_STRETCHED: dict[str, Any] = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
_DEEPSEEK_V3: dict[str, Any] = {
    **_LATENT, "q_lora_rank": 24, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
}  # fmt: skip
_DEEPSEEK_V3_PLAIN = {key: value for key, value in _DEEPSEEK_V3.items() if key != "num_mtp_layers"}
_SELECTING: dict[str, Any] = {
    **_DEEPSEEK_V3_PLAIN,
    "index_topk": 16,
    "index_head_dim": 24,
    "index_n_heads": 3,
}
_BIASED: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    **_GROUPED_QUERY, "num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "qkv_bias": True,
}  # fmt: skip
_QWEN3: dict[str, Any] = {**_GROUPED_QUERY, "moe_intermediate_size": 24, "num_experts": 8, "norm_topk_prob": True}
_ERNIE: dict[str, Any] = {
    **_GROUPED_QUERY, "moe_num_experts": 8, "moe_intermediate_size": 24, "rms_norm_eps": 1e-5,
    "rope_parameters": _PLAIN,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    **_GROUPED_QUERY, "num_local_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5, "attention_multiplier": 0.17,
    "rope_parameters": _PLAIN,
}  # fmt: skip

ROUTER_BIASES = ("e_score_correction_bias", "gate.expert_bias")
"""How the names of the routers' biases end."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", {
        **_LATENT, "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "topk_method": "greedy", "rope_parameters": _PLAIN,
    }),
    "deepseek-v2-grouped": ("DeepseekV2", {
        **_LATENT, "q_lora_rank": 24, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3, "routed_scaling_factor": 16.0,
        "max_position_embeddings": 2560, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "deepseek-v3": ("DeepseekV3", {
        **_DEEPSEEK_V3, "max_position_embeddings": 2560,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    # Moonlight and Kimi-K2: one group, an epsilon other than that of the latent norms, Moonlight without yarn and
    # without a low rank of the queries
    "moonlight": ("DeepseekV3", {
        **_DEEPSEEK_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
        "rms_norm_eps": 1e-2, "routed_scaling_factor": 2.446, "rope_parameters": {**_PLAIN, "rope_theta": 50000.0},
    }),
    "mixtral": ("Mixtral", {
        **_GROUPED_QUERY, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": _MILLION,
    }),
    "qwen2-moe": ("Qwen2Moe", {
        **_QWEN2, "num_experts_per_tok": 3, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [2],
        "rope_parameters": _MILLION,
    }),
    # every second layer, as Qwen counts: layers 1 and 3
    "qwen2-moe-sparse-step": ("Qwen2Moe", {
        **_QWEN2, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 2,
        "rope_parameters": _PLAIN,
    }),
    "qwen3-moe": ("Qwen3Moe", {**_QWEN3, "head_dim": 24, "num_experts_per_tok": 3, "rope_parameters": _MILLION}),
    "qwen3-moe-tied": ("Qwen3Moe", {
        **_QWEN3, "head_dim": 16, "num_experts_per_tok": 2, "tie_word_embeddings": True, "rope_parameters": _PLAIN,
    }),
    "glm4-moe": ("Glm4Moe", {
        **_GROUPED_QUERY, "moe_intermediate_size": 24, "head_dim": 24, "attention_bias": True, "use_qk_norm": True,
        "rms_norm_eps": 1e-5, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_mtp_layers": 0,
        "rope_parameters": {**_MILLION, "partial_rotary_factor": 0.5},
    }),
    "ernie4-5-moe": ("Ernie4_5_Moe", {
        **_ERNIE, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    }),
    # layers 1 and 3 alone, no shared expert
    "ernie4-5-moe-interval": ("Ernie4_5_Moe", {
        **_ERNIE, "head_dim": 24, "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_start_index": 1,
        "moe_layer_interval": 2, "tie_word_embeddings": True,
    }),
    "hunyuan-v1-moe": ("HunYuanMoEV1", {
        **_GROUPED_QUERY, "head_dim": 24, "num_experts": 8, "moe_topk": 3, "rms_norm_eps": 1e-2,
        "rope_parameters": {**_PLAIN, "rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
    }),
    "granitemoe": ("GraniteMoe", {**_GRANITE, "tie_word_embeddings": True}),
    "glm4-moe-lite": ("Glm4MoeLite", {
        **_DEEPSEEK_V3_PLAIN, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 2,
        "rms_norm_eps": 1e-2, "rope_parameters": _MILLION,
    }),
    # layers that select keys themselves, and one that takes the selection of the layer before
    "deepseek-v32": ("DeepseekV32", {
        **_SELECTING, "max_position_embeddings": 2560,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "glm-moe-dsa": ("GlmMoeDsa", {
        **_SELECTING, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-2, "rope_parameters": _MILLION,
        "indexer_types": ["full", "full", "shared", "full"],
    }),
    "dots1": ("Dots1", {
        **_GROUPED_QUERY, **_BIASED, "head_dim": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "sliding_window": None, "rope_parameters": _PLAIN,
    }),
    "solar-open": ("SolarOpen", {
        **{key: value for key, value in _GROUPED_QUERY.items() if key != "intermediate_size"}, **_BIASED,
        "head_dim": 24, "attention_bias": True, "n_group": 1, "topk_group": 1, "rope_parameters": _MILLION,
    }),
    # Norms over all heads, whose mean differs from each head's
    "olmoe": ("Olmoe", {
        **_GROUPED_QUERY, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False,
        "rms_norm_eps": 1e-2, "rope_parameters": _PLAIN,
    }),
    "flex-olmo": ("FlexOlmo", {
        **_GROUPED_QUERY, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 5, "norm_topk_prob": False,
        "rms_norm_eps": 1e-2, "rope_parameters": {**_PLAIN, "rope_theta": 5e5},
    }),
    "minimax-m2": ("MiniMaxM2", {
        **_GROUPED_QUERY, "intermediate_size": 24, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-2, "rope_parameters": {**_PLAIN, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }),
    "bailing-moe-v2": ("BailingMoeV2", {
        **_GROUPED_QUERY, "moe_intermediate_size": 24, "head_dim": 24, "use_qkv_bias": True, "use_qk_norm": True,
        "use_bias": False, "rms_norm_eps": 1e-5, "num_experts": 16, "num_shared_experts": 2, "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "hidden_act": "silu",
        "rope_parameters": {**_PLAIN, "rope_theta": 6e5, "partial_rotary_factor": 0.5},
    }),
    "olmo2": ("Olmo2", {**_GROUPED_QUERY, "rms_norm_eps": 1e-2, "rope_parameters": {**_PLAIN, "rope_theta": 5e5}}),
    # Dense models, each at frequencies of another kind, stretched within the length of a test
    "llama": ("Llama", {
        **_GROUPED_QUERY, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", **_STRETCHED, "low_freq_factor": 0.1, "high_freq_factor": 1.0},
    }),
    "llama-tied": ("Llama", {
        **_GROUPED_QUERY, "head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    }),
    "qwen2": ("Qwen2", {
        **_GROUPED_QUERY, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn", **_STRETCHED, "beta_fast": 1.0, "beta_slow": 0.05, "truncate": False,
        },
    }),
    "qwen3": ("Qwen3", {
        **_GROUPED_QUERY, "head_dim": 24, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "longrope", **_STRETCHED, "short_factor": [1.0, *[1.5] * 11],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, *[5.0] * 7],
        },
    }),
    "mistral": ("Mistral", {
        **_GROUPED_QUERY, "head_dim": 8, "rms_norm_eps": 1e-5, "sliding_window": None, "rope_parameters": _MILLION,
    }),
    # windows that are shorter than the tests' sequences, in layers of no period, and halves that the limit cuts off
    "gpt-oss": ("GptOss", {
        **_GROUPED_QUERY, "intermediate_size": 32, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
        "swiglu_limit": 0.7, "rms_norm_eps": 1e-5, "rope_parameters": {**YARN, "factor": 8.0, "truncate": False},
    }),
    "qwen3-vl-moe": ("Qwen3VLMoe", {
        "text_config": {
            **{key: value for key, value in _QWEN3.items() if key != "norm_topk_prob"}, "head_dim": 24,
            "num_experts_per_tok": 3,
            "rope_parameters": {**_MILLION, "mrope_section": [4, 4, 4], "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
            "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        "tie_word_embeddings": False,
    }),
    "kimi-k25": ("Kimi_K25", {
        "text_config": {**_DEEPSEEK_V3, "model_type": "deepseek_v3", "rms_norm_eps": 1e-2, "rope_parameters": _MILLION},
        "vision_config": {
            "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 1,
            "hidden_size": 16, "intermediate_size": 16,
        },
        "projection_hidden_size": 16, "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Case -> the class's name before "Config" and "For...", and what the configuration holds."""


def class_of(case: str, kind: str) -> Any:
    """A case's class: transformers', or the one in its place. kind: "Config" or "ForCausalLM", of which some are called
    "ForConditionalGeneration"."""
    names = (CASES[case][0] + kind, CASES[case][0] + "ForConditionalGeneration")
    return next(getattr(module, name) for name in names for module in (ling, transformers) if hasattr(module, name))


def config(case: str, **changes: Any) -> Any:
    """The transformers configuration of a case, with changed settings."""
    # A copy: transformers writes into the dictionaries it is given.
    return class_of(case, "Config")(**copy.deepcopy({**CASES[case][1], **changes}))


def make(case: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of a case with random weights, in eval mode, saved into `folder` as transformers saves it.

    Another dtype leaves the router's biases in fp32, as the released models do. changes: of the case's settings.
    """
    model = class_of(case, "ForCausalLM")(config(case, **changes))
    fill(model, seed)
    if dtype != torch.float32:
        biases = {key: value.clone() for key, value in model.state_dict().items() if key.endswith(ROUTER_BIASES)}
        model.to(dtype)
        model.config.dtype = dtype
        for key, value in biases.items():
            owner, _, attribute = key.rpartition(".")
            getattr(model.get_submodule(owner), attribute).data = value
    model.eval()
    save(model, folder)
    return model


def save(model: Any, folder: Path) -> None:
    """Save a model of transformers, with the names and layouts of published folders.

    Qwen3-VL's experts are [in, out] in these; transformers reads both layouts and writes the one in memory. It reads
    the layers of Kimi-K2.5, and writes them as `blocks`, a name of its vision model.
    """
    model.save_pretrained(folder)
    if not hasattr(model.config, "text_config"):
        return
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensor = tensor.transpose(1, 2).contiguous()
        tensors[name.replace("language_model.model.blocks.", "language_model.model.layers.")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights whose outputs are of size one, norms around one, biases off zero, router biases that bfloat16 rounds."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(4.0 + 0.1 * drawn(parameter))
            elif "norm" in name:
                parameter.copy_(1.0 + 0.25 * drawn(parameter))
            elif name.endswith((".bias", "_bias")):
                parameter.copy_(0.5 * drawn(parameter))
            elif name.endswith(".sinks"):
                parameter.copy_(2.0 * drawn(parameter))
            else:
                parameter.copy_(drawn(parameter) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIASES):
                # Near 4 a bfloat16 steps by 0.03; the scores that the bias is added to spread by about 0.2.
                buffer.copy_(4.0 + 0.1 * drawn(buffer))


def add_prediction_layers(folder: Path, seed: int, depths: int = 1) -> None:
    """Put layers of multi-token prediction behind a saved model's, as DeepSeek-V3 and GLM-4.5 are published with.

    transformers has no such layers to save: they are written as deepseek-ai/DeepSeek-V3's README_WEIGHTS.md names
    them, a whole layer beside what merges two vectors, and copies of both tables.
    """
    generator = torch.Generator().manual_seed(seed)
    said = json.loads((folder / "config.json").read_text())
    layers, hidden = said["num_hidden_layers"], said["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{layers - 1}.")}
    tables = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    dtype = tables[0].dtype

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for depth in range(depths):
        there = f"model.layers.{layers + depth}."
        for name, tensor in last.items():
            spread = drawn(*tensor.shape)
            if tensor.dim() == 1:
                new = tensor + 0.1 * spread
            else:
                new = spread * tensor.shape[-1] ** -0.5
            tensors[there + name.removeprefix(f"model.layers.{layers - 1}.")] = new.to(tensor.dtype)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{there}{norm}.weight"] = (1.0 + 0.25 * drawn(hidden)).to(dtype)
        tensors[f"{there}eh_proj.weight"] = (drawn(hidden, 2 * hidden) * (2 * hidden) ** -0.5).to(dtype)
        tensors[f"{there}embed_tokens.weight"] = tables[0].clone()
        tensors[f"{there}shared_head.head.weight"] = tables[1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**said, "num_nextn_predict_layers": depths}))


def hub_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, in the words that older versions wrote and the hub is full of."""
    hub = copy.deepcopy(config)
    if "text_config" in hub:
        return {**hub, "text_config": hub_spelling(hub["text_config"])}
    rope = hub.pop("rope_parameters")
    hub["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        hub["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    hub["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if "dtype" in hub:
        hub["torch_dtype"] = hub.pop("dtype")
    if hub["model_type"] == "minimax_m2":
        hub["rotary_dim"] = int(hub.pop("partial_rotary_factor") * hub["head_dim"])
    if hub["model_type"] in ("qwen3_moe", "qwen3_vl_moe_text"):
        hub["num_experts"] = hub.pop("num_local_experts")
    if hub["model_type"] == "deepseek_v3":
        hub |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    return hub
