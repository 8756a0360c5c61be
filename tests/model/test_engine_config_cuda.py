"""What works on the CPU works on CUDA: every preset, and every combination of the flags that shape a layer.

The machine is imagined: the engine's configuration is made, and the model is built and run on torch's meta device, as
on a machine with CUDA and as on one without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from megatron_moe import platform
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.engine_config import transformer_config
from megatron_moe_tools.plan.tracing import trace_ranks
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "mock_data": True,
    "vocab_size": 64,
    "train_iters": 1,
    "lr_warmup_iters": 0,
    "micro_batch_size": 1,
    "global_batch_size": 1,
}
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8}
LATENT = {**RANKS, "multi_latent_attention": True, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
AXES: tuple[tuple[dict, ...], ...] = (
    ({"swiglu": True}, {"swiglu": False}),
    ({}, {"add_bias_linear": True}),
    ({}, {"add_qkv_bias": True}),
    ({}, {"qk_layernorm": True}),
    ({}, LATENT, {"group_query_attention": True, "num_query_groups": 2}),
    ({}, {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}),
    ({}, {"fp32_residual_connection": True}),
    ({}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    ({}, {"bf16": True}, {"fp16": True}),
)


def combinations() -> dict[tuple[int, ...], Run]:
    """A run for each combination of the flags that the rules accept, by its places on the axes."""
    found = {}
    for places in itertools.product(*(range(len(axis)) for axis in AXES)):
        flags = {name: value for place, axis in zip(places, AXES) for name, value in axis[place].items()}
        run = replace(Run(), **SHAPE, **flags)
        try:
            rules.check(run, 1)
        except ConfigError:
            continue
        found[places] = run
    return found


def pairs(places: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(places), 2))


def with_every_pair(every: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A few combinations that together have each pair of settings which any combination has."""
    left, chosen = set().union(*map(pairs, every)), []
    while left:
        chosen.append(max(every, key=lambda places: len(pairs(places) & left)))
        left -= pairs(chosen[-1])
    return chosen


def test_every_combination_of_flags_is_configured_and_built_with_cuda_as_without():
    runs = combinations()
    assert len(runs) > 300, "the rules refuse almost everything"
    with platform.fake_device("cuda", {}):
        for run in runs.values():
            transformer_config(run)
    for places in with_every_pair(runs):
        trace_ranks(runs[places], 1, 64, device="cuda", imbalance=1.0)


@pytest.mark.parametrize("preset", rows(PRESETS, test=["tiny", "deepseek-v3"]))
def test_every_preset_is_built_with_cuda_as_without(preset):
    pattern = 1 if PRESETS[preset].get("moe_layer_freq", 1) == 1 else "[0]+[1]"
    few = {"num_layers": 2, "moe_layer_freq": pattern, "bf16": True, "mock_data": True, "vocab_size": 1024}
    trace_ranks(replace(Run(), **{**PRESETS[preset], **few}), 1, 1024, device="cuda", imbalance=1.0)


def test_gelu_is_the_same_function_with_cuda_as_without():
    """The engine's fused one is an approximation by tanh."""
    fused = {}
    for swiglu in (True, False):
        with platform.fake_device("cuda", {}):
            config = transformer_config(replace(Run(), **SHAPE, swiglu=swiglu, add_bias_linear=True))
        fused[swiglu] = config.bias_activation_fusion
    assert fused == {True: True, False: False}
