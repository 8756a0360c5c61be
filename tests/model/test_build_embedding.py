"""The embedding's gradient loses no token, in any dtype, and the lookup is the engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from megatron_moe import platform
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.model.build import ExactEmbedding, build_model
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.parallel import groups

pytestmark = pytest.mark.engine


TOKENS = 4096


def all_gradients() -> dict[Any, dict[str, Any]]:
    """`gradients` of our embedding and of the engine's, by dtype and whether it is ours."""
    world = torch.distributed.get_world_size()
    run = replace(Run(), tensor_model_parallel_size=world, sequence_parallel=world > 1)
    tp = groups.initialize(run).tp
    cases = [("float32", True), ("float16", True), ("bfloat16", True), ("bfloat16", False)]
    return {case: gradients(run, tp, *case) for case in cases}


def gradients(run: Run, tp: Any, dtype_name: str, exact: bool) -> dict[str, Any]:
    """Output and weight gradient of one embedding for ids of which one is very frequent, on this rank's rows."""
    world = tp.size()
    config = transformer_config(replace(run, bf16=dtype_name == "bfloat16", fp16=dtype_name == "float16"))
    embedding = VocabParallelEmbedding(
        16, 8, init_method=lambda _: None, config=config, tp_group=tp, reduce_scatter_embeddings=world > 1
    )
    if exact:
        ExactEmbedding.take_over(embedding)
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(embedding.weight.dtype)
    rows = 16 // world
    first = tp.rank() * rows
    embedding.weight.data.copy_(weight[first : first + rows])
    ids = torch.full((2, TOKENS // 2), 3)
    ids[1, ::8] = 9
    output = embedding(ids)
    gradient = torch.full_like(output, 0.01)
    output.backward(gradient)
    unit = float(gradient.view(-1)[0])
    return {"output": output.detach(), "gradient": embedding.weight.grad, "ids": ids, "unit": unit}


def test_every_token_of_a_frequent_id_counts(once):
    (found,) = once(1, all_gradients)
    for dtype in ("float32", "bfloat16", "float16"):
        seen = found[dtype, True]
        counts = torch.bincount(seen["ids"].flatten(), minlength=16).double()
        wanted = (counts * seen["unit"]).unsqueeze(1).expand(16, 8).to(getattr(torch, dtype))
        torch.testing.assert_close(seen["gradient"], wanted, rtol=1e-3 if dtype == "float32" else 0, atol=0)
    # The engine's own loses nine tenths of them on a CPU, 4 of 38 are left: our reason for a lookup of our own.
    assert found["bfloat16", False]["gradient"][3, 0] == 4.0


def test_a_model_on_cuda_has_the_exact_lookup_too(one_process):
    run = build({**PRESETS["tiny"], "vocab_size": 128, "bf16": True})
    pg_collection = groups.initialize(run)
    with platform.fake_device("cuda", {}), torch.device("meta"):
        (chunk,) = build_model(run, pg_collection, 128, draw=False, wrap=False)
    assert type(chunk.embedding.word_embeddings) is ExactEmbedding


def test_outputs_are_the_engines_and_tensor_parallel_rows_have_the_gradients_of_one_rank(once):
    whole, *parts = ranks = [*once(1, all_gradients), *once(2, all_gradients)]
    assert all(torch.equal(found["bfloat16", True]["output"], found["bfloat16", False]["output"]) for found in ranks)
    gradients = [rank["bfloat16", True]["gradient"] for rank in (whole, *parts)]
    assert torch.equal(torch.cat(gradients[1:]), gradients[0])
