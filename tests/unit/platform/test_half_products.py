"""Half-precision products, native or by way of fp32: the same numbers; one switch, or the processor, decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe.moe.grouped_gemm import TorchProduct
from megatron_moe.platform import half_products, hardware, switches

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["native", "fp32"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(switches.HALF_PRODUCTS, request.param)
    return request.param


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """Half a unit in the last place, and fp32's error over a sum of `terms` products of size about one."""
    limit = 0.51 * torch.finfo(actual.dtype).eps * exact.abs() + terms * 1e-6
    assert ((actual.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_layer_and_its_gradients_are_rounded_once(way: str, dtype: torch.dtype) -> None:
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
def test_grouped_products_are_rounded_once(way: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 16, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(2, 24, 16, generator=generator).to(dtype).requires_grad_()
    out = TorchProduct()(rows, weights, torch.tensor([5, 8], dtype=torch.int32))
    out.backward(torch.ones_like(out))
    assert_rounded_once(out[:5], rows[:5].detach().double() @ weights[0].detach().double().T, 16)
    assert_rounded_once(rows.grad[5:], weights[1].detach().double().sum(0).expand(3, -1), 24)
    assert_rounded_once(weights.grad[0], rows[:5].detach().double().sum(0).expand(24, -1), 5)


class _Products(TorchDispatchMode):
    """Notes the dtypes of the operands of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten._grouped_mm):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def engine_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return layers.linear_with_grad_accumulation_and_async_allreduce(
        input=x,
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
    )


def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return TorchProduct()(x, weight[None], torch.tensor([8], dtype=torch.int32))


@pytest.mark.parametrize("product", [half_products.linear, engine_linear, grouped])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_switch_decides_what_is_multiplied_forward_and_backward(
    way: str, product: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    x, weight = (torch.ones(8, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    with _Products() as products:
        product(x, weight).sum().backward()
    assert products.dtypes == {torch.float32 if way == "fp32" else dtype}


def test_a_device_on_paper_multiplies_as_such_a_device_does(way: str) -> None:
    operand = torch.empty(2, dtype=torch.bfloat16, device="meta")
    for kind, wide in (("cuda", False), ("cpu", way == "fp32")):
        with hardware.imagining(kind, {}):
            assert half_products.multiply_in_fp32(operand) == wide


def test_by_itself_the_processors_instructions_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switches.HALF_PRODUCTS, raising=False)
    monkeypatch.setattr(half_products, "_has_instructions", half_products._has_instructions.__wrapped__)
    for capabilities, bf16, fp16 in (
        ({"avx512_f": True}, True, True),
        ({"avx512_bf16": True}, False, True),
        ({"amx_bf16": True, "amx_fp16": True}, False, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        wide = [half_products.multiply_in_fp32(torch.empty(1, dtype=dtype)) for dtype in HALVES]
        assert wide == [bf16, fp16]
        assert not half_products.multiply_in_fp32(torch.empty(1))
