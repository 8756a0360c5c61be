"""Half-precision products by way of fp32: the same numbers, chosen by what the processor can do."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_moe.moe.grouped_gemm import grouped_linear
from megatron_moe.platform import half_products

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["native", "through fp32"])
def through_fp32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    chosen: bool = request.param

    def choose(dtype: torch.dtype) -> bool:
        return chosen and dtype in HALVES

    monkeypatch.setattr(half_products, "multiply_in_fp32", choose)
    monkeypatch.setattr("megatron_moe.moe.grouped_gemm.multiply_in_fp32", choose)
    return chosen


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """Half a unit in the last place, and fp32's error over a sum of `terms` products of size about one."""
    limit = 0.51 * torch.finfo(actual.dtype).eps * exact.abs() + terms * 1e-6
    assert ((actual.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_layer_and_its_gradients_are_rounded_once(through_fp32: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(24, 32, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 8, 24, generator=generator).to(dtype)
    out = half_products.linear(x, weight)
    out.backward(grad)
    wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, weight, grad))
    assert out.dtype == x.grad.dtype == weight.grad.dtype == dtype
    assert_rounded_once(out, wide_x @ wide_weight.T, 32)
    assert_rounded_once(x.grad, wide_grad @ wide_weight, 24)
    assert_rounded_once(weight.grad, wide_grad.flatten(0, 1).T @ wide_x.flatten(0, 1), 24)


@pytest.mark.parametrize("dtype", HALVES)
def test_grouped_products_are_rounded_once(through_fp32: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 16, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(2, 24, 16, generator=generator).to(dtype).requires_grad_()
    out = grouped_linear("grouped_mm")(rows, weights, torch.tensor([5, 8], dtype=torch.int32))
    out.backward(torch.ones_like(out))
    assert_rounded_once(out[:5], rows[:5].detach().double() @ weights[0].detach().double().T, 16)
    assert_rounded_once(rows.grad[5:], weights[1].detach().double().sum(0).expand(3, -1), 24)
    assert_rounded_once(weights.grad[0], rows[:5].detach().double().sum(0).expand(24, -1), 5)


def test_fp32_products_are_torchs_own() -> None:
    assert not half_products.multiply_in_fp32(torch.float32)
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    assert torch.equal(half_products.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_the_processors_instructions_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = half_products.multiply_in_fp32.__wrapped__
    for capabilities, bf16, fp16 in (
        ({"avx512_f": True}, True, True),
        ({"avx512_bf16": True}, False, True),
        ({"amx_bf16": True, "amx_fp16": True}, False, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert (undecided(torch.bfloat16), undecided(torch.float16)) == (bf16, fp16)


def test_the_engines_linear_layers_take_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(half_products, "multiply_in_fp32", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(half_products, "linear", lambda x, w: calls.append(x.dtype) or x @ w.T)
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    for dtype in (torch.float32, torch.bfloat16):
        layers.linear_with_grad_accumulation_and_async_allreduce(
            input=x.to(dtype),
            weight=weight.to(dtype),
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
    assert calls == [torch.bfloat16]
