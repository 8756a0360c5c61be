"""Context parallelism: sequences split over ranks train, evaluate and continue as on one rank."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.distributed import model_cases as cases
from tests.distributed.test_model_layouts import EP2, MODELS, PP2, SP2, VPP2, oracle, relative_error  # noqa: F401
from tests.distributed.test_model_layouts import test_a_layout_agrees_with_one_rank as agrees
from tests.unit.model.test_attention import WIDTHS, inputs, reference

CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    ("dense mla", 2, CP2),
    ("dense mla", 4, CP4),
    ("dense mla", 2, {**CP2, **SHARDED}),
    ("dense mla", 2, {**CP2, **FULL}),
    ("dense mla", 4, {**CP2, **VPP2}),
    ("grouped, biased", 2, CP2),
    ("grouped, biased", 2, {**CP2, **CORE}),
    ("grouped, biased", 4, {**CP2, **SP2}),
    ("experts", 2, CP2),
    ("experts", 2, {**CP2, "cross_entropy_loss_fusion": True, "calculate_per_token_loss": True}),
    ("experts", 2, {**CP2, **EP2}),
    ("experts", 4, {**CP2, **SP2, **EP2, "expert_tensor_parallel_size": 2}),
    ("experts", 4, {**CP2, **PP2}),
    ("experts", 4, CP2),  # and DP2
]


@pytest.mark.parametrize(("model", "ranks", "layout"), LAYOUTS, ids=[f"{m}-{r}-{'-'.join(x)}" for m, r, x in LAYOUTS])
def test_a_layout_with_split_sequences_agrees_with_one_rank(gloo, oracle, model, ranks, layout):  # noqa: F811
    agrees(gloo, oracle, model, ranks, layout)
