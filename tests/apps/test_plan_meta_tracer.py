"""Operations on the meta device: what is looked up is what torch would have returned."""

from __future__ import annotations

import torch

from megatron_moe.apps.plan.meta_tracer import meta_device


def described(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type, tensor.untyped_storage().nbytes()


def operations():
    """Results of operations that a key might confuse, by name."""
    whole = torch.empty(4, 6, dtype=torch.int64, device="meta")
    half = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    return {
        "integer": whole * 1,
        "float": whole * 1.0,
        "boolean": whole + True,
        "plain": half + half,
        "transposed": half.t() + half.t(),
        "mixed": half + half.float(),
        "product": half @ half.t(),
        "sum": half.sum(dim=1),
        "kept sum": half.sum(dim=1, keepdim=True),
        "joined": torch.cat([half, half.float()], dim=1),
        "wide": half.to(torch.float32),
        "random": torch.rand_like(half),
    }


def test_a_result_that_is_looked_up_is_the_one_that_torch_computes():
    expected = {name: described(result) for name, result in operations().items()}
    with meta_device("cuda", (1, 1)) as tracer:
        for _ in range(2):
            tracer.flops = 0
            results = operations()
            assert {name: described(result) for name, result in results.items()} == expected
            assert tracer.flops == 2 * 4 * 6 * 4
            assert len({result.untyped_storage()._cdata for result in results.values()}) == len(results)


def test_values_and_views_are_not_looked_up():
    real = torch.arange(3)
    with meta_device("cuda", (1, 1)):
        base = torch.empty(4, 6, device="meta")
        for _ in range(2):
            assert real.mul(2).tolist() == [0, 2, 4] and real.clone().add_(1).tolist() == [1, 2, 3]
            assert torch.empty(4, 6, device="meta").t_().shape == (6, 4)
            for view in (base.view(6, 4), torch.ops.aten._unsafe_view(base, [24]), base.add_(1), base.nan_to_num_()):
                assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
