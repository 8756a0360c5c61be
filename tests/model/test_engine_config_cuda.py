"""What works on the CPU works on CUDA: every preset, and every combination of the flags that shape a layer.

The machine is imagined: the engine's configuration is made, and the model is built and run on torch's meta device, as
on a machine with CUDA and as on one without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megatron_moe import platform
from megatron_moe.apps.plan.tracing import trace_ranks
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.engine_config import transformer_config

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
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
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
TRACED_OF = 17
"""One combination in so many is built and run; the number has no factor in common with those of the axes."""


def combinations() -> Iterator[Run]:
    """Yield a run for each combination of the flags that the rules accept."""
    for flags in itertools.product(*AXES):
        run = replace(Run(), **SHAPE, **{name: value for one in flags for name, value in one.items()})
        try:
            rules.check(run, 1)
        except ConfigError:
            continue
        yield run


def test_every_combination_of_flags_is_configured_and_built_with_cuda_as_without():
    runs = list(combinations())
    assert len(runs) > 300, "the rules refuse almost everything"
    for run in runs:
        with platform.imagining("cuda", {}):
            transformer_config(run)
    for run in runs[::TRACED_OF]:
        for kind in platform.DEVICE_KINDS:
            trace_ranks(run, 1, 64, device=kind, imbalance=1.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_configured_and_built_with_cuda_as_without(preset):
    run = replace(Run(), **PRESETS[preset])
    pattern = 1 if run.moe.moe_layer_freq == 1 else "[0]+[1]"
    few = replace(run, num_layers=2, moe_layer_freq=pattern, bf16=True, mock_data=True, vocab_size=1024)
    for kind in platform.DEVICE_KINDS:
        with platform.imagining(kind, {}):
            transformer_config(run)
        trace_ranks(few, 1, 1024, device=kind, imbalance=1.0)


def test_gelu_is_the_same_function_with_cuda_as_without():
    """The engine's fused one is an approximation by tanh."""
    fused = {}
    for swiglu in (True, False):
        with platform.imagining("cuda", {}):
            config = transformer_config(replace(Run(), **SHAPE, swiglu=swiglu, add_bias_linear=True))
        fused[swiglu] = config.bias_activation_fusion
    assert fused == {True: True, False: False}
