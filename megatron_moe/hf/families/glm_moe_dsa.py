"""GLM-5."""

from megatron_moe.hf.families import deepseek_v32
from megatron_moe.hf.family import Family

FAMILY = Family(
    name="glm-moe-dsa",
    architecture="GlmMoeDsaForCausalLM",
    model_types=("glm_moe_dsa",),
    read=deepseek_v32.read,
    write=deepseek_v32.write,
    models="GLM-5",
    reads="what DeepSeek-V3.2 reads, layers that share a selection",
    refuses="what DeepSeek-V3.2 refuses",
    names=deepseek_v32.FAMILY.names,
    without="deepseek-v3",
    predicts=True,
    served_untied=True,
)
