"""The language model of Kimi-K2.5."""

from megatron_moe.hf.families import deepseek_v3, kimi_vl
from megatron_moe.hf.family import Family, TensorNames

FAMILY = Family(
    name="kimi-k25",
    architecture="KimiK25ForConditionalGeneration",
    classes=("Kimi_K25ForConditionalGeneration",),
    model_types=("kimi_k25",),
    read=deepseek_v3.read,
    write=kimi_vl.write,
    models="Kimi-K2.5, -K2.6, dequantised",
    reads="the language model; vision goes along as it is",
    refuses="packed integers, what DeepSeek-V3 refuses",
    names=TensorNames(
        model="language_model.model.",
        output="language_model.lm_head.weight",
        carried=("vision_tower.", "mm_projector."),
    ),
    text="text_config",
    without="deepseek-v3",
)
