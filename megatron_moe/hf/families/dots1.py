"""dots.llm1 (arXiv 2506.05767)."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return dots.llm1's settings: Qwen3's attention, DeepSeek-V3's router and experts."""
    keys.only("attention_bias", (False,), "it means a bias of the output projection too, which has none here")
    parts.no_window(keys, switched=True)
    # transformers makes a window of the layers from max_window_layers on, which has its own default
    layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    whole = keys.integer("max_window_layers", default=62)
    if keys.raw("layer_types") is None and keys.has("sliding_window") and whole < layers:
        raise keys.refusal("sliding_window", "attention is over the whole sequence here; null works")
    keys = keys.with_defaults(n_group=1, topk_group=1)
    flat = {**parts.attention(keys), **parts.routed_and_shared(keys, "num_local_experts")}
    # "noaux_tc", DeepSeek's name of the choice, stands for the score in published files
    routed = parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"], "noaux_tc")
    return {**flat, **routed, "qk_layernorm": True}


def write(run: Run) -> dict[str, Any]:
    """Return dots.llm1's own keys of config.json."""
    return {
        **parts.attention_keys(run),
        **parts.routed_and_shared_keys(run),
        "attention_bias": False,
        "scoring_func": "noaux_tc",
        "max_window_layers": run.model.num_layers,
    }


FAMILY = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    model_types=("dots1",),
    read=read,
    write=write,
    models="dots.llm1",
    reads="groups, any `head_dim`, `layer_types` of full attention",
    refuses="`attention_bias`, sliding windows",
    served_untied=True,
)
