"""One norm over the heads of all ranks: outputs and gradients are those of the whole, written out in fp64."""

from typing import Any

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.helpers.errors import relative

pytestmark = pytest.mark.engine

HEADS, WIDTH, EPSILON = 4, 6, 1e-2


def whole() -> list[torch.Tensor]:
    """x and the gradient of the result [S, B, n, width], and the weight [n x width], the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 2, HEADS, WIDTH), (5, 2, HEADS, WIDTH), (HEADS * WIDTH,))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def of_rank(flags: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.model.norm import RMSNormAcrossHeads
    from megatron_moe.parallel import groups

    sizes = {"num_attention_heads": HEADS, "kv_channels": WIDTH, "norm_epsilon": EPSILON, "qk_layernorm": True}
    run = replace(Run(), **sizes, **flags, qk_layernorm_across_heads=True, bf16=dtype == torch.bfloat16)
    tp = groups.initialize(run).tp
    norm = RMSNormAcrossHeads(transformer_config(run), HEADS, tp)
    x, grad, weight = whole()
    own, own_grad = (t.chunk(tp.size(), 2)[tp.rank()].to(dtype).requires_grad_() for t in (x, grad))
    with torch.no_grad():
        norm.weight.copy_(weight.chunk(tp.size())[tp.rank()])
    y = norm(own)
    y.backward(own_grad)
    (sharded,) = norm.sharded_state_dict("norm.").values()
    return {
        "found": [y.detach(), own.grad, norm.weight.grad],
        "summed by the engine": norm.weight.sequence_parallel,
        "place": (sharded.key, sharded.global_shape, sharded.global_offset, norm.weight.tensor_model_parallel),
    }


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-4)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_its_heads_of_the_whole(gloo: Any, ranks: int, dtype: torch.dtype, most: float) -> None:
    flags = {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}
    seen = gloo.run(ranks, of_rank, flags=flags, dtype=dtype)
    x, grad, weight = (t.to(dtype).double().requires_grad_() for t in whole())
    scale = (x.square().mean((2, 3), keepdim=True) + EPSILON).sqrt()
    y = x / scale * weight.view(HEADS, WIDTH)
    y.backward(grad.detach())
    for rank, result in enumerate(seen):
        wanted = [t.detach().chunk(ranks, dim)[rank] for t, dim in ((y, 2), (x.grad, 2), (weight.grad, 0))]
        for got, right in zip(result["found"], wanted, strict=True):
            # Of bf16 no more than the result is rounded: statistics in bf16 would change every tenth number.
            assert got.dtype == dtype and relative(got, right.to(dtype)) < most
        assert result["summed by the engine"] is False, "each rank has its heads of the whole sequence"
        part = HEADS * WIDTH // ranks
        assert result["place"] == ("norm.weight", (HEADS * WIDTH,), (rank * part,), True)
