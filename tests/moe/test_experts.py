"""The pieces between router and output: permutation, activation, grouped products. Gradients against numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_moe import Float16Module
from megatron_moe.moe.dispatch import LocalDispatcher
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.grouped_gemm import TorchProduct, grouped_linear_loop
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.moe.rows import copy_rows, sum_copies
from tests.helpers.routers import config


def tables(tokens: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(tokens * copies, generator=torch.Generator().manual_seed(0))
    return order // copies, order.argsort().view(tokens, copies)


@pytest.mark.parametrize("kept", [15, 9])  # slots of the copies behind are nowhere, and add nothing
def test_copies_and_sums_are_each_others_backward(kept):
    source, slots = tables(5, 3)
    source, slots, partial = source[:kept], slots.clamp(max=kept), kept < 15
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    many = torch.randn(kept, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: copy_rows(x, source, slots, partial), rows)
    assert torch.autograd.gradcheck(lambda x: sum_copies(x, source, slots, partial), many)
    assert torch.equal(copy_rows(rows, source, slots, partial), rows[source])
    with_nothing = torch.cat([many, many.new_zeros(1, 4)])
    torch.testing.assert_close(sum_copies(many, source, slots, partial), with_nothing[slots].sum(1))


@pytest.mark.parametrize("kernel", [TorchProduct(), grouped_linear_loop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_without_tokens_work(kernel, dtype):
    counts = [0, 5, 0, 3, 0]
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows = torch.randn(8, 16).to(dtype).requires_grad_()
    weights = torch.randn(5, 24, 16).to(dtype).requires_grad_()
    out = kernel(rows, weights, offsets)
    assert out.dtype == dtype and out.shape == (8, 24)
    torch.testing.assert_close(out[:5], F.linear(rows[:5], weights[1]))
    torch.testing.assert_close(out[5:], F.linear(rows[5:], weights[3]))
    out.sum().backward()
    assert weights.grad.shape == weights.shape
    assert all((weights.grad[e] == 0).all() == (counts[e] == 0) for e in range(5))
    weights.grad = None
    nothing = kernel(rows[:0], weights, torch.zeros(5, dtype=torch.int32))
    nothing.sum().backward()
    assert nothing.shape == (0, 24) and not weights.grad.any()


def test_an_fp64_product_names_the_backend_that_has_one():
    rows, weights, offsets = torch.randn(4, 8).double(), torch.randn(1, 8, 8).double(), torch.tensor([4]).int()
    with pytest.raises(ValueError, match="--moe-expert-backend"):
        TorchProduct()(rows, weights, offsets)
    assert grouped_linear_loop(rows, weights, offsets).dtype == torch.float64


def test_rows_arrive_grouped_by_expert_and_go_home():
    ids = torch.tensor([[2, 0], [1, 2], [2, 3]])
    probs = torch.arange(6.0).view(3, 2)
    hidden = torch.tensor([[1.0], [10.0], [100.0]])
    dispatcher = LocalDispatcher(4, moe_groups())
    expert_input, plan = dispatcher.dispatch(hidden, RoutingDecision(ids, probs))
    assert expert_input.rows.flatten().tolist() == [1, 10, 1, 10, 100, 100]
    assert expert_input.probs.tolist() == [1, 2, 0, 3, 4, 5]
    assert expert_input.offsets.tolist() == [1, 2, 5, 6]
    assert dispatcher.combine(expert_input.rows, plan).flatten().tolist() == [2, 20, 200]


# ---- widths that the grouped product cannot take

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def layer(hidden: int, width: int, backend: str = "grouped_mm", **changes: Any) -> MoELayer:
    settings = config(hidden_size=hidden, moe_ffn_hidden_size=width, gated_linear_unit=True, **changes)
    settings.moe_expert_backend = backend
    return MoELayer(settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widths_that_the_kernel_cannot_take_are_refused_when_the_layer_is_built(dtype):
    multiple = 4 if dtype == torch.float32 else 8
    for hidden, width in ((multiple + 2, multiple), (multiple, multiple - 2), (multiple, multiple // 2)):
        with pytest.raises(ValueError) as caught:
            layer(hidden, width, params_dtype=dtype)
        for text in (f"--hidden-size {hidden}", f"--moe-ffn-hidden-size {width}", f"multiples of {multiple}", "loop"):
            assert text in str(caught.value)
    for hidden, width, backend in ((multiple, multiple, "grouped_mm"), (18, 6, "loop")):
        built = layer(hidden, width, backend, params_dtype=dtype)
        rows = torch.randn(5, 1, hidden).to(dtype)
        assert built(rows)[0].shape == rows.shape


@pytest.mark.parametrize("half", HALVES)
def test_weights_cast_to_half_precision_are_refused_by_the_cast(half):
    """Four numbers of fp32 are 16 bytes, and four of half precision are not."""
    for cast in (lambda module: Float16Module(config(**{half: True}), module), lambda module: module.to(HALVES[half])):
        with pytest.raises(ValueError, match="--moe-ffn-hidden-size 12.* multiples of 8"):
            cast(layer(16, 12))
        cast(layer(16, 8))
        cast(layer(16, 12, "loop"))


def test_the_width_that_counts_is_a_ranks_part_of_an_expert():
    settings, split = config(moe_ffn_hidden_size=8), replace(moe_groups(), etp_size=4)
    options = MoEOptions.from_engine_config(settings)
    GroupedExperts(settings, options, replace(split, etp_size=2))
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size 4: .*width on a rank .2."):
        GroupedExperts(settings, options, split)
