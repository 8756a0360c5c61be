"""The families of models that are converted: their class and model_type, and the names of their tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run


@dataclass(frozen=True)
class TensorNames:
    """The names of those tensors that families name differently.

    experts: prefix of an expert's matrices, {e} being its number. matrices: names of gate, up and down.
    router: the gate's weight. shared: prefix of the shared expert.
    """

    experts: str = "mlp.experts.{e}."
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate.weight"
    shared: str = "mlp.shared_experts."


DEEPSEEK = TensorNames()
QWEN = TensorNames(shared="mlp.shared_expert.")
MIXTRAL = TensorNames("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight")


@dataclass(frozen=True)
class Family:
    """A family of models that share a configuration format and names of tensors.

    architecture: the class in transformers, `architectures[0]` of config.json. model_types: values of `model_type`;
    the first is written. names: the names of its tensors. served_untied: whether vLLM's class of it reads the output
    layer from the folder even where config.json ties it to the embedding.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    names: TensorNames
    served_untied: bool = False


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("deepseek-v2", "DeepseekV2ForCausalLM", ("deepseek_v2",), DEEPSEEK, served_untied=True),
        # Kimi-K2 has a model_type of its own and DeepSeek-V3's class; Moonlight and R1 have both of DeepSeek-V3.
        Family("deepseek-v3", "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), DEEPSEEK, served_untied=True),
        Family("mixtral", "MixtralForCausalLM", ("mixtral",), MIXTRAL),
        Family("qwen2-moe", "Qwen2MoeForCausalLM", ("qwen2_moe",), QWEN),
        Family("qwen3-moe", "Qwen3MoeForCausalLM", ("qwen3_moe",), QWEN),
        Family("glm4-moe", "Glm4MoeForCausalLM", ("glm4_moe",), DEEPSEEK, served_untied=True),
    )
}

REFUSED: dict[str, str] = {}
for _reason, _kinds in {
    "it is a dense model, and mixtures of experts are converted": (
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox olmo olmo2 phi phi3"
    ),
    "it is a model of several modalities, and the text model is not converted alone": (
        "kimi_k25 kimi_vl deepseek_vl_v2 qwen3_vl_moe glm4v_moe"
    ),
    "the first DeepSeek-MoE has no latent attention and its own format": "deepseek",
    "its attention reads a selection of the keys, which the attention here does not": "deepseek_v32 glm_moe_dsa",
    "it is GLM with latent attention, which is not one of the combinations checked here": "glm4_moe_lite",
    "it normalises queries and keys over all heads together, and the attention here over each head": (
        "olmoe flex_olmo minimax_m2"
    ),
    "its attention has sinks and its experts have biases and a clamped activation": "gpt_oss",
    "most of its attention is a gated delta rule": "qwen3_next qwen3_5_moe",
    "most of its attention is a linear attention": "kimi_linear minimax",
    "its experts weigh their input, and its attention is cut into chunks": "llama4 llama4_text",
    "it clips queries, keys and values and normalises by LayerNorm": "dbrx",
    "it chooses by sparsemixer and normalises by LayerNorm": "phimoe",
    "most of its layers are state-space models": "jamba",
    "it scales embeddings, residuals and logits by multipliers": "granitemoe",
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
            if architectures not in (None, [family.architecture]):
                raise ConfigError(
                    f"{where}: config.json: architectures {architectures!r} with model_type {model_type!r}: a language "
                    f'model of this type is ["{family.architecture}"]; other classes are not converted'
                )
            return family
    reason = REFUSED.get(model_type, "it is not one of the families checked here")
    raise ConfigError(
        f"{where}: config.json: model_type {model_type!r} is not converted: {reason}; these are: {supported}"
    )


def family_of_run(run: Run) -> Family | None:
    """Return the family that is closest to a model trained here from scratch; None for a dense model.

    `hf.config.config_of` checks whether that family's format can describe all of the model.
    """
    if run.moe.num_experts is None:
        return None
    sigmoid = run.moe.moe_router_score_function == "sigmoid"
    if run.model.multi_latent_attention:
        return FAMILIES["deepseek-v3" if sigmoid else "deepseek-v2"]
    if sigmoid:
        return FAMILIES["glm4-moe"]
    if run.moe.moe_shared_expert_intermediate_size is not None or run.model.add_qkv_bias:
        return FAMILIES["qwen2-moe"]
    # Mixtral has neither layers without experts nor weights that do not sum to one.
    plain = all(run.derived.moe_layer_pattern) and run.derived.norm_topk_prob
    return FAMILIES["mixtral" if plain and not run.model.qk_layernorm else "qwen3-moe"]
