"""The counted parameters are those of the model that is built."""

from __future__ import annotations

import shlex

import pytest

from megatron_moe.config import cli
from megatron_moe.model.build import build_model
from megatron_moe.parallel import groups

pytestmark = pytest.mark.engine

DENSE = "--num-layers 2 --hidden-size 32"
FLAGS = [
    "--preset tiny",
    "--preset tiny --q-lora-rank none --moe-shared-expert-gate",
    "--preset tiny-gqa",
    "--preset tiny-gqa --qk-layernorm --add-qkv-bias --no-untie-embeddings-and-output-weights",
    f"{DENSE} --add-bias-linear",
    "--preset tiny --mtp-num-layers 2",
    f"{DENSE} --mtp-num-layers 1",
    f"{DENSE} --no-swiglu --kv-channels 16",
]


def test_parameters_are_counted_as_they_are_built(one_process):
    pg_collection = groups.initialize(cli.parse([]))
    for flags in FLAGS:
        run = cli.parse(shlex.split(flags))
        chunks = build_model(run, pg_collection, 256, wrap=False)
        built = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert run.derived.parameter_count(256) == built, flags


@pytest.mark.parametrize("flags", FLAGS)
def test_active_parameters_leave_out_the_experts_not_chosen(flags):
    run = cli.parse(shlex.split(flags))
    idle = run.derived.parameter_count(256) - run.derived.active_parameter_count(256)
    one_expert = 3 * run.model.hidden_size * run.derived.moe_ffn_hidden_size
    idle_experts = (run.moe.num_experts or run.moe.moe_router_topk) - run.moe.moe_router_topk
    pattern = run.derived.moe_layer_pattern
    moe_layers = sum(pattern) + pattern[-1] * (run.model.mtp_num_layers or 0)
    assert idle == moe_layers * idle_experts * one_expert
