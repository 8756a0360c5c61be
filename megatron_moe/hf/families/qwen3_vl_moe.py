"""The language model of Qwen3-VL."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.families import qwen3_moe
from megatron_moe.hf.family import Family, TensorNames


def read(keys: Keys) -> dict[str, Any]:
    """Return the settings of Qwen3-VL's language model, which are Qwen3-MoE's.

    Its rotation by time, height and width (mrope) is the plain one for tokens of a text, whose three positions are
    equal. transformers always normalises the weights of the chosen experts.
    """
    keys.only("norm_topk_prob", (True,), "the weights of the chosen experts are normalised")
    return qwen3_moe.read(keys.with_defaults(norm_topk_prob=True))


def write(run: Run) -> dict[str, Any]:
    """Refuse: a model that was trained here from scratch sees nothing."""
    raise ConfigError("models here have no vision; --family qwen3-moe writes the language model alone")


FAMILY = Family(
    name="qwen3-vl-moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_types=("qwen3_vl_moe",),
    read=read,
    write=write,
    models="Qwen3-VL-30B-A3B, -235B-A22B",
    reads="the language model; vision goes along as it is",
    refuses="what Qwen3-MoE refuses, `norm_topk_prob` false",
    names=TensorNames(model="model.language_model.", stacked="mlp.experts.", carried=("model.visual.",)),
    text="text_config",
    without="qwen3-moe",
)
