"""The language model of Kimi-VL."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.families import deepseek_v3
from megatron_moe.hf.family import Family, TensorNames


def write(run: Run) -> dict[str, Any]:
    """Refuse: a model that was trained here from scratch sees nothing."""
    raise ConfigError("models here have no vision; --family deepseek-v3 writes the language model alone")


FAMILY = Family(
    name="kimi-vl",
    architecture="KimiVLForConditionalGeneration",
    model_types=("kimi_vl",),
    read=deepseek_v3.read,
    write=write,
    models="Kimi-VL-A3B",
    reads="the language model; vision goes along as it is",
    refuses="what DeepSeek-V3 refuses",
    names=TensorNames(
        model="language_model.model.",
        output="language_model.lm_head.weight",
        carried=("vision_tower.", "multi_modal_projector."),
    ),
    text="text_config",
    without="deepseek-v3",
)
