"""Our router inside the engine's own MoE layer and GPTModel, trained with our finalize_model_grads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer as EngineMoELayer

from megatron_moe import Float16Module, TopKRouter, finalize_model_grads
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe import router
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from tests.helpers import routers
from tests.numbers.reference_moe import bias_step

pytestmark = pytest.mark.engine

EXPERTS, TOPK, STEPS = 4, 2, 3


def engine_gpt_with_our_router(ep_size: int, half: str) -> Any:
    run = replace(Run(), expert_model_parallel_size=ep_size)
    pg = groups.initialize(run)
    seed_everything(run)
    config = routers.config(
        num_layers=2,
        num_moe_experts=EXPERTS,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ep_size,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[half],
        **{half: True},
    )
    spec = get_gpt_layer_local_spec(EXPERTS, False, False)
    mlp = spec.submodules.mlp  # a ModuleSpec in one engine version, a partial in the other
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    submodules.router = TopKRouter
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8, pg_collection=pg)
    assert isinstance(model.decoder.layers[0].mlp, EngineMoELayer)
    wrapped = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped), pg


def train(ep_size: int, half: str) -> dict[str, Any]:
    ddp, pg = engine_gpt_with_our_router(ep_size, half)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts = []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        mask = torch.triu(torch.ones(1, 1, 8, 8), diagonal=1).bool()
        ddp.zero_grad_buffer()
        ddp(tokens, torch.arange(8).expand_as(tokens), mask, labels=tokens).mean().backward()
        update = finalize_model_grads([ddp], None, pg_collection=pg)
        counts.append([c.tolist() for c in update.tokens_per_expert])
    found = list(router.routers([ddp]))
    left = [r.local_tokens_per_expert.sum().item() for r in found]
    return dict(counts=counts, bias=[r.expert_bias.clone() for r in found], left=left)


@pytest.mark.parametrize(("ranks", "half"), [(1, "bf16"), (2, "fp16")])
def test_the_engines_model_trains_with_our_router(gloo: Any, ranks: int, half: str) -> None:
    found = gloo.run(ranks, train, ep_size=ranks, half=half)
    for layer in range(2):
        expected = [0.0] * EXPERTS
        for step in range(STEPS):
            counts = found[0]["counts"][step][layer]
            assert sum(counts) == 4 * 8 * TOPK
            expected = bias_step(expected, counts, 1e-3)
        for rank in found:
            assert rank["bias"][layer].dtype == torch.float32
            assert torch.equal(rank["bias"][layer].view(torch.int32), torch.tensor(expected).view(torch.int32))
            assert rank["left"] == [0.0, 0.0]
            assert rank["counts"] == found[0]["counts"]
