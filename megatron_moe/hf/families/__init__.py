"""The families of models that are converted, a file for each, and those that are refused by name. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.family import Family

_FILES = """
    deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa
    mixtral
    qwen2_moe qwen3_moe
    glm4_moe glm4_moe_lite
    dots1 solar_open
    qwen3_vl_moe kimi_vl kimi_k25
    ernie4_5_moe hunyuan_v1_moe
    granitemoe
    olmoe flex_olmo
    minimax_m2
    bailing_moe_v2
    llama qwen2 qwen3 mistral olmo2
    gpt_oss
""".split()
"""In this order a model that was trained here is offered to them, and the first whose format describes it is taken."""
FAMILIES: dict[str, Family] = {
    family.name: family for family in (import_module(f"{__name__}.{name}").FAMILY for name in _FILES)
}

REFUSED: dict[str, str] = {}
for _reason, _kinds in {
    "its layers are others than those of the dense models here": (
        "gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox olmo phi phi3"
    ),
    "it is a model of several modalities, and the text model is not converted alone": ("deepseek_vl_v2 glm4v_moe"),
    "the first DeepSeek-MoE has no latent attention and its own format": "deepseek",
    "most of its attention is a gated delta rule": "qwen3_next qwen3_5_moe",
    "most of its attention is a linear attention": "kimi_linear minimax",
    "its experts weigh their input, and its attention is cut into chunks": "llama4 llama4_text",
    "it clips queries, keys and values and normalises by LayerNorm": "dbrx",
    "it chooses by sparsemixer, and its norms, attention and output layer have biases": "phimoe",
    "most of its layers are state-space models": "jamba granitemoehybrid",
}.items():
    REFUSED |= dict.fromkeys(_kinds.split(), _reason)


def family_of(config: dict[str, Any], where: str) -> Family:
    """Return the family of a config.json.

    Args:
        where: the folder, as messages name it.

    Raises:
        ConfigError: the family is not supported, or `model_type` and `architectures` contradict each other.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    supported = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    if not isinstance(model_type, str):
        raise ConfigError(
            f"{where}: config.json: model_type {model_type!r}: has to name the family; these are converted: {supported}"
        )
    for family in FAMILIES.values():
        if model_type in family.model_types:
            if architectures not in (None, [family.architecture], *([name] for name in family.classes)):
                raise ConfigError(
                    f"{where}: config.json: architectures {architectures!r} with model_type {model_type!r}: a language "
                    f'model of this type is ["{family.architecture}"]; other classes are not converted'
                )
            return family
    reason = REFUSED.get(model_type, "it is not one of the families checked here")
    raise ConfigError(
        f"{where}: config.json: model_type {model_type!r} is not converted: {reason}; these are: {supported}"
    )
