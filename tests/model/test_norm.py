"""RMSNorm against fp64."""

from types import SimpleNamespace

import pytest
import torch

from megatron_moe.model.norm import RMSNorm
from tests.helpers.errors import relative


def norm(width, dtype=torch.float32, sequence_parallel=False, eps=1e-6):
    config = SimpleNamespace(fp32_residual_connection=False, params_dtype=dtype, sequence_parallel=sequence_parallel)
    return RMSNorm(config, width, eps=eps)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-7), (torch.bfloat16, 2.5e-3), (torch.float16, 4e-4)])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(7, 3, 48), (5, 2, 3, 16)], ids=["hidden states", "heads"])
def test_output_and_gradients_agree_with_fp64_and_inputs_are_left_alone(shape, dtype, bound, size):
    torch.manual_seed(0)
    layer = norm(shape[-1], dtype, eps=1e-5)
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(shape[-1]).to(dtype))
    x, grad = (size * torch.randn(shape)).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    wide, weight, wide_grad = (tensor.detach().double().requires_grad_() for tensor in (x, layer.weight, grad))
    wanted = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
    wanted.backward(wide_grad.detach())
    got = layer(x)
    got.backward(grad)
    assert got.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    for ours, theirs in ((got, wanted), (x.grad, wide.grad), (layer.weight.grad, weight.grad)):
        assert relative(ours, theirs) < bound
    assert torch.equal(x.double(), wide) and torch.equal(grad.double(), wide_grad)


def test_the_weight_says_whether_its_gradient_is_a_part():
    assert norm(8, sequence_parallel=True).weight.sequence_parallel is True
    assert norm(8).weight.sequence_parallel is False
