"""Granite 3's mixtures of experts with a shared one."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import Keys
from megatron_moe.hf.families import granitemoe
from megatron_moe.hf.family import Family


def read(keys: Keys) -> dict[str, Any]:
    """Return Granite's settings, with a shared expert unless its width is 0."""
    width = keys.integer("shared_intermediate_size", low=0)
    return {**granitemoe.read(keys), "moe_shared_expert_intermediate_size": width or None}


def write(run: Run) -> dict[str, Any]:
    """Return Granite's own keys of config.json."""
    return {**granitemoe.write(run), "shared_intermediate_size": run.moe.moe_shared_expert_intermediate_size or 0}


FAMILY = Family(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    model_types=("granitemoeshared",),
    read=read,
    write=write,
    models="none of IBM's own name",
    reads="what granitemoe reads, and `shared_intermediate_size`",
    refuses="what granitemoe refuses",
    names=granitemoe.NAMES,
)
