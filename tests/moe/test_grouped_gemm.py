"""Weight gradients that are added to their fp32 sums in the product, against those that autograd hands on."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.model.cross_entropy import linear_cross_entropy
from megatron_moe.moe.grouped_gemm import TorchProduct, gate_product, main_grad_of
from megatron_moe.platform import env_vars
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding

COUNTS = (5, 0, 1, 18)
ENDS = torch.tensor(COUNTS).cumsum(0).int()
LABELS = torch.arange(24) % 40


def experts(rows: Tensor, weight: Tensor, fused: bool | None) -> Tensor:
    return TorchProduct(fused)(rows, weight, ENDS)


def gate(rows: Tensor, weight: Tensor, fused: bool | None, dtype: torch.dtype = torch.float32) -> Tensor:
    return gate_product(rows, weight, dtype, fused is not False)


wide_gate = functools.partial(gate, dtype=torch.float64)


def loss(rows: Tensor, weight: Tensor, fused: bool | None) -> Tensor:
    return linear_cross_entropy(rows, weight, LABELS, vocab_size=37, fused_gradient=fused is not False)


Product = Callable[[Tensor, Tensor, bool | None], Tensor]
PRODUCTS: dict[str, tuple[Product, tuple[int, ...]]] = {
    "experts, gate and up": (experts, (4, 2, 8, 16)),
    "experts, down": (experts, (4, 16, 16)),
    "gate": (gate, (6, 16)),
    "gate in fp64": (wide_gate, (6, 16)),
    "loss": (loss, (40, 16)),
}


class Trained:
    """A weight with an fp32 sum of its gradients, as the engine's DistributedDataParallel keeps it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.weight: Any = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype))
        self.weight.main_grad = torch.zeros(shape)
        self.handed_on: list[Tensor] = []
        self._node = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        self._node.register_hook(self._add)

    def _add(self, *_: Any) -> None:
        assert self.weight.grad is not None  # what --overlap-grad-reduce asks for
        self.handed_on.append(self.weight.grad)
        self.weight.main_grad.add_(self.weight.grad.data)
        self.weight.grad = None


def micro_batches(number: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(sum(COUNTS), 16, generator=generator).to(dtype).requires_grad_() for _ in range(number)]


def summed(name: str, fused: bool | None, dtype: torch.dtype, number: int) -> tuple[Trained, list[Tensor]]:
    """Return the weight after some micro-batches, and what else its sum could depend on: outputs, gradients of rows."""
    product, shape = PRODUCTS[name]
    trained, found = Trained(shape, dtype), []
    for place, rows in enumerate(micro_batches(number, dtype)):
        output = product(rows, trained.weight, fused)
        slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(place)).to(output.dtype)
        output.backward(slopes)
        found += [output.detach(), rows.grad]
    return trained, found


@pytest.mark.parametrize("name", PRODUCTS)
def test_in_fp32_the_sum_of_one_micro_batch_has_the_same_bits_and_of_several_the_same_numbers(name):
    for number in (1, 4):
        (plain, outputs), (fused, same) = (summed(name, one, torch.float32, number) for one in (False, True))
        assert all(torch.equal(one, other) for one, other in zip(outputs, same, strict=True))
        wanted, found = plain.weight.main_grad, fused.weight.main_grad
        assert torch.equal(wanted, found) or (number > 1 and torch.allclose(wanted, found, rtol=1e-5, atol=1e-6))
        assert {one.layout for one in plain.handed_on} == {torch.strided}
        assert {one.layout for one in fused.handed_on} == {torch.sparse_coo} and not any(
            one._nnz() for one in fused.handed_on
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_in_half_precision_sums_are_more_exact_than_of_rounded_gradients(name, dtype):
    product, shape = PRODUCTS[name]
    (plain, outputs), (fused, same) = (summed(name, one, dtype, 8) for one in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(outputs, same, strict=True))
    exact = torch.zeros(shape, dtype=torch.float64)
    for place, rows in enumerate(micro_batches(8, dtype)):
        leaf = plain.weight.detach().double().requires_grad_()
        if name == "loss":
            output = linear_cross_entropy(rows.detach().double(), leaf, LABELS, vocab_size=37)
        elif product in (gate, wide_gate):
            output = rows.detach().double() @ leaf.t()
        else:
            parts = rows.detach().double().split(COUNTS)
            output = torch.cat([part @ one.t() for part, one in zip(parts, leaf.flatten(1, -2))])
        slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(place)).to(outputs[0].dtype)
        output.backward(slopes.double())
        exact += leaf.grad  # type: ignore[operator]
    size = exact.abs().max()
    errors = [float((one.weight.main_grad - exact).abs().max() / size) for one in (plain, fused)]
    # The loss multiplies tiles that its forward pass made in fp32.
    assert errors[1] <= (2e-5 if name == "loss" else 1e-6)
    assert errors[0] > 20 * errors[1]


@pytest.mark.parametrize("way", ["native", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["experts, gate and up", "experts, down"])
def test_by_default_experts_on_a_cpu_add_the_gradients_of_autograd_one_by_one(monkeypatch, name, dtype, way):
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, way)
    for number in (1, 3) if dtype != torch.float32 else (1,):
        by_autograd, by_default = (summed(name, one, dtype, number)[0] for one in (False, None))
        assert torch.equal(by_autograd.weight.main_grad, by_default.weight.main_grad)
        assert {one.layout for one in by_default.handed_on} == {torch.sparse_coo}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_without_an_fp32_sum_gets_its_gradient_from_autograd(name):
    product, shape = PRODUCTS[name]
    for total in (None, torch.zeros(shape, dtype=torch.bfloat16)):
        weight: Any = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        if total is not None:
            weight.main_grad = total
        product(micro_batches(1, torch.bfloat16)[0], weight, True).sum().backward()
        assert weight.grad.layout == torch.strided and (total is None or not total.any())
    wide: Any = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    wide.main_grad = torch.zeros(2)
    assert main_grad_of(wide) is None  # which would round its gradient


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_with_hooks_shows_them_its_gradient(name):
    product, shape = PRODUCTS[name]
    trained, plain = Trained(shape, torch.float32), summed(name, False, torch.float32, 1)[0]
    trained.weight.register_hook(lambda gradient: 2 * gradient)
    output = product(micro_batches(1, torch.float32)[0], trained.weight, True)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype))
    assert torch.equal(trained.weight.main_grad, 2 * plain.weight.main_grad)


@pytest.mark.parametrize("name", PRODUCTS)
def test_sums_are_found_where_saved_tensors_come_back_as_others(name):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        trained, _ = summed(name, True, torch.bfloat16, 1)
    assert {one.layout for one in trained.handed_on} == {torch.sparse_coo}


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_weight_that_is_used_in_another_place_too_gets_both_gradients(fused_first):
    trained = Trained((40, 16), torch.float32)
    (rows,) = micro_batches(1, torch.float32)
    losses, looked_up = loss(rows, trained.weight, True).sum(), trained.weight[LABELS].sum()
    (losses + looked_up if fused_first else looked_up + losses).backward()
    leaf = trained.weight.detach().clone().requires_grad_()
    (loss(rows, leaf, False).sum() + leaf[LABELS].sum()).backward()
    assert torch.allclose(trained.weight.main_grad, leaf.grad, atol=1e-6)


def test_experts_without_a_row_leave_their_sums_as_they_are():
    trained = Trained((4, 16, 16), torch.float32)
    trained.weight.main_grad.fill_(3.0)
    rows = torch.zeros(0, 16, requires_grad=True)
    TorchProduct(True)(rows, trained.weight, torch.zeros(4, dtype=torch.int32)).sum().backward()
    assert torch.equal(trained.weight.main_grad, torch.full((4, 16, 16), 3.0))


def test_a_layer_that_must_not_fuse_hands_every_gradient_on(one_process):
    case = {**random_case(3), "shared": True, "shared_gate": True}
    layer, _ = build_layer(case, {})
    for weight in layer.parameters():
        weight.main_grad = torch.zeros_like(weight)
    hidden, _ = tokens_and_padding(case, 4, 1)
    layer(hidden)[0].square().sum().backward()
    assert [name for name, weight in layer.named_parameters() if weight.grad.layout is not torch.strided] == []
    assert not any(weight.main_grad.any() for weight in layer.parameters())
