"""Solar Open."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf import family_parts as parts
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Solar Open's settings: GLM-4.5's router and experts in every layer, whole heads rotated."""
    parts.no_window(keys)
    keys.only("use_qk_norm", (False,), "Solar Open's queries and keys are not normalised")
    # transformers reads neither: no layer is dense
    keys.only("first_k_dense_replace", (0,), "every layer of Solar Open has experts")
    # published files leave some of these out
    keys = keys.with_defaults(
        first_k_dense_replace=0,
        intermediate_size=keys.raw("moe_intermediate_size"),
        attention_bias=False,
        n_group=1,
        topk_group=1,
    )
    flat = {**parts.attention(keys), **parts.routed_and_shared(keys, "num_local_experts")}
    return {
        **flat,
        **parts.biased_sigmoid(keys, flat["num_experts"], flat["moe_router_topk"]),
        "add_qkv_bias": keys.boolean("attention_bias"),
    }


def write(run: Run) -> dict[str, Any]:
    """Return Solar Open's own keys of config.json."""
    return {
        **parts.attention_keys(run),
        **parts.routed_and_shared_keys(run),
        "attention_bias": run.model.add_qkv_bias,
    }


FAMILY = Family(
    name="solar-open",
    architecture="SolarOpenForCausalLM",
    model_types=("solar_open",),
    read=read,
    write=write,
    models="Solar-Open-100B",
    reads="`attention_bias`, groups",
    refuses="dense layers, `use_qk_norm`, `partial_rotary_factor` other than 1",
    served_untied=True,
)
