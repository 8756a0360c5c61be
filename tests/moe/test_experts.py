"""The pieces between router and output: permutation, activation, grouped products. Gradients against numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_moe import Float16Module
from megatron_moe.moe.dispatch import ExpertInput, LocalDispatcher
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.grouped_gemm import TorchProduct, grouped_linear_loop
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.moe.rows import copy_rows, sum_copies
from tests.helpers.errors import relative
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


# ---- other gated activations, and biases


def plainly(rows: torch.Tensor, probs: torch.Tensor, part: dict[str, torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Experts one after the other: gate and up at most 1, the slope of the quick GELU, up + 0.5, biases weighed."""
    outputs = []
    for e, (own, weight) in enumerate(zip(rows.split(counts), probs.split(counts))):
        gate, up = (own @ part["weight1"][e, half].t() + part["bias1"][e, half] for half in (0, 1))
        gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 0.5)
        outputs.append((hidden @ part["weight2"][e].t() + part["bias2"][e]) * weight.unsqueeze(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_experts_with_biases_and_a_clamped_activation_have_the_gradients_of_plain_ones(dtype, bound, recompute):
    settings = config(hidden_size=16, moe_ffn_hidden_size=8, num_moe_experts=4, gated_linear_unit=True)
    options = MoEOptions.from_engine_config(settings)
    given = {"biases": True, "quick_gelu": True, "activation_clamp": 1.0, "linear_offset": 0.5}
    options = replace(options, **given, recompute_activation=recompute)
    experts, counts = GroupedExperts(settings, options, moe_groups()), [3, 0, 5, 4]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    experts.to(dtype)
    parts = {name: value.detach().double().requires_grad_() for name, value in experts.named_parameters()}
    rows = torch.randn(12, 16, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(12, generator=generator).requires_grad_()
    exact = [rows.detach().double().requires_grad_(), probs.detach().double().requires_grad_()]
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    output = experts(ExpertInput(rows, probs, offsets))
    wanted = plainly(*exact, parts, counts)
    grad = torch.randn(output.shape, generator=generator).to(dtype)
    output.backward(grad)
    wanted.backward(grad.double())
    assert output.dtype == dtype and probs.grad.dtype == torch.float32
    pairs = {"output": (output, wanted), "rows": (rows.grad, exact[0].grad), "probs": (probs.grad, exact[1].grad)}
    pairs |= {name: (value.grad, parts[name].grad) for name, value in experts.named_parameters()}
    for name, (got, want) in pairs.items():
        assert relative(got, want) < bound, name
    nothing = experts(ExpertInput(rows[:0], probs[:0], torch.zeros(4, dtype=torch.int32)))
    assert nothing.shape == (0, 16)


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
