"""Which form of an operation computes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from benchmarks.contestants import engine_config
from benchmarks.problem import Problem, Shape
from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import takes_kernels
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups
from megatron_moe.platform import switches


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switches.KERNELS, raising=False)
    monkeypatch.setattr(choice, "why_no_triton", lambda: None)


class OnGpu(NamedTuple):
    """What is asked of a tensor, of one that this machine cannot have."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cuda:0")


@pytest.mark.claim("A kernel computes on a GPU, and torch's operations on a CPU.")
@pytest.mark.usefixtures("with_triton")
def test_a_kernel_computes_on_a_gpu_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes_kernels(OnGpu()) and not takes_kernels(OnGpu(torch.float64))
    assert not takes_kernels(torch.empty(2))
    with platform.imagining("cuda", {}):  # a plan is the same where there is no Triton
        assert not takes_kernels(torch.empty(2, device="meta"))
    monkeypatch.setattr(choice, "why_no_triton", lambda: "not installed")
    assert not takes_kernels(OnGpu())


@pytest.mark.usefixtures("with_triton")
def test_the_variable_chooses_one_form_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switches.KERNELS, "triton")
    assert takes_kernels(torch.empty(2)) and not takes_kernels(torch.empty(2, dtype=torch.float64))
    monkeypatch.setenv(switches.KERNELS, "torch")
    assert not takes_kernels(OnGpu())


def test_what_a_kernel_does_not_cover_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(*arguments: object) -> object:
        asked.append(arguments)
        return NotImplemented

    monkeypatch.setenv(switches.KERNELS, "triton")
    monkeypatch.setattr(choice, "_kernel", lambda module, name: refuses)
    doubled = choice.has_kernel("anywhere")(lambda x: x * 2)
    assert doubled(torch.ones(2)).tolist() == [2, 2] and len(asked) == 1


def stepped(kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A small MoE layer's output, gradients and counts with this form of its operations."""
    nothing = torch.empty(0, dtype=dtype)
    config = engine_config(Problem(Shape(24, 16, 8, 2, 8, 0), *[nothing] * 7), moe_shared_expert_intermediate_size=None)
    config.moe_expert_backend = "grouped_mm"
    layer = MoELayer(config, layer_number=1).train()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    hidden = torch.randn(24, 1, 16, generator=generator).to(dtype).requires_grad_()
    monkeypatch.setenv(switches.KERNELS, kernels)
    output = layer(hidden)[0]
    output.backward(torch.randn(24, 1, 16, generator=generator).to(dtype))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    counts = layer.router.local_tokens_per_expert
    return {"output": output.detach(), "hidden": hidden.grad, **gradients, "counts": counts}


@pytest.mark.triton
@pytest.mark.claim("A layer with kernels counts the same tokens, bit for bit, and computes the same in bounds.")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_layer_is_the_same_with_kernels(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.initialize(Run())
    wanted, found = stepped("torch", dtype, monkeypatch), stepped("triton", dtype, monkeypatch)
    assert torch.equal(found.pop("counts"), wanted.pop("counts"))
    errors = {
        name: float((found[name] - right).double().norm() / right.double().norm()) for name, right in wanted.items()
    }
    assert len(errors) == 5 and max(errors.values()) <= bound, errors
