"""Groups and random streams on several ranks, and the engine's own MoE layer on gloo."""

import random
from typing import Any

import numpy
import pytest
import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from tests.helpers import routers

pytestmark = pytest.mark.engine

MOE = replace(Run(), num_experts=8, expert_model_parallel_size=2)


def group_sizes(run: Run) -> tuple[str, dict[str, int]]:
    collection = groups.initialize(run)
    names = "tp pp cp dp dp_cp tp_cp tp_dp_cp mp ep expt_tp expt_dp tp_ep tp_ep_pp intra_dp_cp intra_expt_dp".split()
    return str(groups.rank_facts()), {name: getattr(collection, name).size() for name in names}


def streams(run: Run) -> dict[str, float]:
    """The next number of each random stream of this rank."""
    groups.initialize(run)
    seed_everything(run)
    drawn = {"python": random.random(), "numpy": float(numpy.random.rand()), "torch": float(torch.rand(()))}
    with get_cuda_rng_tracker().fork():
        drawn["tensor parallel"] = float(torch.rand(()))
    return drawn


def engine_moe(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the engine's all-to-all is from its all-gather: largest difference of outputs and of input gradients."""
    collection = groups.initialize(run)
    seed_everything(run)
    seen, layers = [], []
    for dispatcher in ("allgather", "alltoall"):
        config = routers.config(
            moe_router_enable_expert_bias=False,
            moe_ffn_hidden_size=8,
            moe_token_dispatcher_type=dispatcher,
            expert_model_parallel_size=run.parallel.expert_model_parallel_size,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
        arguments = {"config": config, "pg_collection": collection}
        layer = build_module(spec, **arguments) if isinstance(spec, ModuleSpec) else spec(**arguments)
        layer.set_layer_number(1)
        layers.append(layer)
        layer.load_state_dict(layers[0].state_dict())
        place = groups.rank_facts().ep_rank
        x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(place)).requires_grad_()
        output, _ = layer(x)
        output.square().sum().backward()
        seen.append((output.detach(), x.grad))
    return tuple((mine - other).abs().max() for mine, other in zip(*seen, strict=True))


def test_every_group_has_its_size(gloo):
    run = replace(MOE, tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    place, sizes = gloo.run(4, group_sizes, run=run)[3]
    assert place == "rank 3/4 (tp 1/2, pp 0/1, cp 0/1, dp 1/2, ep 1/2, etp 0/1)"
    assert sizes == {
        **{"tp": 2, "pp": 1, "cp": 1, "dp": 2, "dp_cp": 2, "tp_cp": 2, "tp_dp_cp": 4, "mp": 2},
        **{"ep": 2, "expt_tp": 1, "expt_dp": 2, "tp_ep": 2, "tp_ep_pp": 2, "intra_dp_cp": 2, "intra_expt_dp": 2},
    }


STREAMS = ["python", "numpy", "torch", "tensor parallel"]


@pytest.mark.parametrize(
    ("layout", "differing"),
    [
        ({}, STREAMS),
        ({"tensor_model_parallel_size": 2}, ["tensor parallel"]),
        ({"pipeline_model_parallel_size": 2}, STREAMS),
    ],
    ids=["DP2", "TP2", "PP2"],
)
def test_ranks_draw_differently_but_for_what_tensor_parallel_ranks_share(gloo, layout: Any, differing: list[str]):
    first, second = gloo.run(2, streams, run=replace(Run(), **layout))
    assert [name for name in first if first[name] != second[name]] == differing


def test_the_engines_own_moe_layer_dispatches_on_gloo(gloo):
    for run, world_size in ((replace(MOE, expert_model_parallel_size=1), 1), (MOE, 2)):
        for output, gradient in gloo.run(world_size, engine_moe, run=run):
            assert output < 1e-5 and gradient < 1e-5
