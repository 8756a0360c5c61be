"""The embedding's gradient loses no token, in any dtype, and the lookup is the engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine


def gradients(dtype_name: str, exact: bool, tokens: int = 4096) -> dict[str, Any]:
    """Output and weight gradient of one embedding for ids of which one is very frequent, on this rank's rows."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    from megatron_moe.config.schema import Run, replace
    from megatron_moe.model.build import ExactEmbedding
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.parallel import groups

    world = torch.distributed.get_world_size()
    layout = {"tensor_model_parallel_size": world, "sequence_parallel": world > 1}
    run = replace(Run(), bf16=dtype_name == "bfloat16", fp16=dtype_name == "float16", **layout)
    pg_collection = groups.initialize(run)
    embedding = VocabParallelEmbedding(
        16, 8, init_method=lambda _: None, config=transformer_config(run), tp_group=pg_collection.tp,
        reduce_scatter_embeddings=world > 1,
    )  # fmt: skip
    if exact:
        ExactEmbedding.take_over(embedding)
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(embedding.weight.dtype)
    rows = 16 // world
    first = torch.distributed.get_rank() * rows
    embedding.weight.data.copy_(weight[first : first + rows])
    ids = torch.full((2, tokens // 2), 3)
    ids[1, ::8] = 9
    output = embedding(ids)
    gradient = torch.full_like(output, 0.01)
    output.backward(gradient)
    return {
        "output": output.detach(),
        "gradient": embedding.weight.grad,
        "ids": ids,
        "unit": float(gradient.view(-1)[0]),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_token_of_a_frequent_id_counts(gloo, dtype):
    (seen,) = gloo.run(1, gradients, dtype_name=dtype, exact=True)
    counts = torch.bincount(seen["ids"].flatten(), minlength=16).double()
    wanted = (counts * seen["unit"]).unsqueeze(1).expand(16, 8).to(getattr(torch, dtype))
    torch.testing.assert_close(seen["gradient"], wanted, rtol=1e-3 if dtype == "float32" else 0, atol=0)


def class_where_cuda_is_imagined() -> str:
    from megatron_moe import platform
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.model.build import build_model
    from megatron_moe.parallel import groups

    run = build({**PRESETS["tiny"], "vocab_size": 128, "bf16": True})
    pg_collection = groups.initialize(run)
    with platform.imagining("cuda", {}), torch.device("meta"):
        (chunk,) = build_model(run, pg_collection, 128, draw=False, wrap=False)
    return type(chunk.embedding.word_embeddings).__name__


def test_a_model_on_cuda_has_the_exact_lookup_too(gloo):
    assert gloo.run(1, class_where_cuda_is_imagined) == ["ExactEmbedding"]


def test_the_engines_lookup_on_a_cpu_loses_nine_tenths_of_them_in_bf16(gloo):
    (seen,) = gloo.run(1, gradients, dtype_name="bfloat16", exact=False)
    assert seen["gradient"][3, 0] == 4.0  # of 38: our reason for a lookup of our own


def test_the_outputs_are_the_engines(gloo):
    for ranks in (1, 2):
        ours, engines = (gloo.run(ranks, gradients, dtype_name="bfloat16", exact=exact) for exact in (True, False))
        for mine, theirs in zip(ours, engines):
            assert torch.equal(mine["output"], theirs["output"])


def test_tensor_parallel_rows_have_the_gradients_of_one_rank(gloo):
    (whole,) = gloo.run(1, gradients, dtype_name="bfloat16", exact=True)
    parts = gloo.run(2, gradients, dtype_name="bfloat16", exact=True)
    assert torch.equal(torch.cat([part["gradient"] for part in parts]), whole["gradient"])
