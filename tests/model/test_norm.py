"""RMSNorm against fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_moe.model.norm import RMSNorm


def norm(width, dtype, sequence_parallel=False, eps=1e-6):
    config = SimpleNamespace(fp32_residual_connection=False, params_dtype=dtype, sequence_parallel=sequence_parallel)
    return RMSNorm(config, width, eps=eps)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-7), (torch.bfloat16, 2.5e-3), (torch.float16, 4e-4)])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_output_and_gradients_agree_with_fp64(dtype, bound, size):
    torch.manual_seed(0)
    layer = norm(48, dtype, eps=1e-5)
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(48).to(dtype))
    x = (size * torch.randn(7, 3, 48)).to(dtype).requires_grad_()
    grad = torch.randn(7, 3, 48).to(dtype)
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (x, layer.weight))
    wanted = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
    wanted.backward(grad.double())
    got = layer(x)
    got.backward(grad)
    assert got.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    for ours, theirs in ((got, wanted), (x.grad, wide.grad), (layer.weight.grad, weight.grad)):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < bound


def test_the_backward_pass_leaves_its_inputs_alone():
    layer, x = norm(8, torch.float32), torch.randn(4, 8, requires_grad=True)
    kept, grad = x.detach().clone(), torch.randn(4, 8)
    kept_grad = grad.clone()
    layer(x).backward(grad)
    assert torch.equal(x.detach(), kept)
    assert torch.equal(grad, kept_grad)


def test_a_narrow_head_of_a_4d_tensor_is_normalised():
    x = torch.randn(5, 2, 3, 16)
    assert torch.allclose(norm(16, torch.float32)(x).square().mean(-1), torch.ones(5, 2, 3), atol=1e-4)


def test_the_weight_says_whether_its_gradient_is_a_part():
    assert norm(8, torch.float32, sequence_parallel=True).weight.sequence_parallel is True
    assert norm(8, torch.float32).weight.sequence_parallel is False
