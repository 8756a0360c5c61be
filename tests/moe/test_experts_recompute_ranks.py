"""Recomputation where the model is split: the same bits as without it."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.helpers import model_cases as cases
from tests.helpers.rows import rows
from tests.model import test_build_ranks as layouts

pytestmark = pytest.mark.engine

EVERYTHING = ("core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": EVERYTHING}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODEL = {**layouts.MODELS["experts"], "moe_layer_freq": "[0,1,1,1]", "attention_dropout": 0.1, "hidden_dropout": 0.1}
CASES = [
    ({**layouts.SP2, **layouts.EP2, "expert_tensor_parallel_size": 1}, SELECTIVE),
    (layouts.VPP2, FULL),
    (layouts.SP2, FULL),
    (layouts.VPP2, SELECTIVE),
]


@pytest.mark.parametrize(("layout", "recomputed"), rows(CASES, test=CASES[:2]))
def test_a_split_model_has_the_same_bits(once, layout, recomputed):
    run = replace(Run(), **{**MODEL, **layout})
    pairs = zip(once(2, cases.one_step, run=replace(run, **recomputed)), once(2, cases.one_step, run=run), strict=True)
    for got, wanted in pairs:
        assert got["loss"] == wanted["loss"]
        assert got["grad_norm"] == wanted["grad_norm"]
        for name, (_, _, grad) in wanted["tensors"].items():
            assert torch.equal(got["tensors"][name][2], grad), name
