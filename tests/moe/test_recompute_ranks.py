"""Recomputation where the model is split: the same bits as without it."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.helpers import model_cases as cases
from tests.model import test_build_ranks as layouts

pytestmark = pytest.mark.engine

EVERYTHING = ("core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
RECOMPUTED = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": EVERYTHING},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
MODEL = {**layouts.MODELS["experts"], "moe_layer_freq": "[0,1,1,1]", "attention_dropout": 0.1, "hidden_dropout": 0.1}


@pytest.fixture(scope="module")
def without(gloo):
    known = {}

    def of(run):
        if run not in known:
            known[run] = gloo.run(2, cases.one_step, run=run)
        return known[run]

    return of


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize(
    "layout",
    [layouts.SP2, layouts.TP2 | layouts.SP2 | layouts.EP2 | {"expert_tensor_parallel_size": 1}, layouts.VPP2],
    ids=["TP2+SP", "TP2+SP, EP2", "VPP2"],
)
def test_a_split_model_has_the_same_bits(gloo, without, layout, recomputed):
    run = replace(Run(), **{**MODEL, **layout})
    for got, wanted in zip(gloo.run(2, cases.one_step, run=replace(run, **RECOMPUTED[recomputed])), without(run)):
        assert got["loss"] == wanted["loss"]
        assert got["grad_norm"] == wanted["grad_norm"]
        for name, (_, _, grad) in wanted["tensors"].items():
            assert torch.equal(got["tensors"][name][2], grad), name
