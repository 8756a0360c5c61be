"""Our Adam: torch's arithmetic, apex's place for the step."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe.engine.adam import Adam
from megatron_moe.optim.adam import AdamWithMomentsOnHost
from tests.helpers.called import Called

SHAPES = [(3, 5), (17,), (0,), (64, 33)]


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups_of(params: list[torch.nn.Parameter]) -> list[dict]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 3e-3}]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * 10.0 ** (step % 5 - 3)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_it_takes_torchs_steps(decoupled):
    ours, theirs = parameters(0), parameters(0)
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    train(Adam(groups_of(ours), adam_w_mode=decoupled, **options), ours, range(20))
    stock = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(stock(groups_of(theirs), foreach=False, **options), theirs, range(20))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-6, atol=1e-7)


def test_a_parameter_without_gradient_stays_and_makes_no_state():
    params = parameters(0)
    before = params[0].detach().clone()
    optimizer = Adam(params)
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state


def test_low_precision_weights_and_capturing_are_refused():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = Adam([weight])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="fp32 weights, not torch.bfloat16"):
        optimizer.step()
    with pytest.raises(ValueError, match="Transformer Engine"):
        Adam(parameters(0), capturable=True)


def test_a_step_calls_as_many_operations_for_many_tensors_as_for_a_few() -> None:
    found = []
    for number in (2, 40):
        params = [torch.nn.Parameter(torch.randn(5)) for _ in range(number)]
        optimizer = Adam(params, lr=1e-2)
        train(optimizer, params, range(1))  # allocates the moments
        with Called() as called:
            optimizer.step()
        found.append(called.names)
    assert found[0] == found[1] and found[0].count("_fused_adamw_") == 1


@pytest.mark.parametrize(("kind", "piece"), [(Adam, None), (AdamWithMomentsOnHost, 64), (AdamWithMomentsOnHost, 10**6)])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_loaded_optimizer_goes_on_bit_for_bit_also_with_moments_on_the_host(monkeypatch, kind, piece, decoupled):
    straight, stopped = parameters(0), parameters(0)
    train(Adam(groups_of(straight), lr=1e-2, adam_w_mode=decoupled), straight, range(8))
    first = kind(groups_of(stopped), lr=1e-2, adam_w_mode=decoupled)
    if kind is AdamWithMomentsOnHost:
        monkeypatch.setattr(kind, "piece_numel", piece)
        first.allocate()
    train(first, stopped, range(4))
    second = kind(groups_of(stopped), lr=0.5, adam_w_mode=decoupled)
    second.load_state_dict(first.state_dict())
    train(second, stopped, range(4, 8))
    assert all(torch.equal(mine, reference) for mine, reference in zip(stopped, straight, strict=True))
    assert [group["step"] for group in second.param_groups] == [8, 8]


def test_moments_on_the_host_are_there_before_and_after_a_step_and_a_load(monkeypatch):
    monkeypatch.setattr("megatron_moe.optim.adam.synchronize", lambda: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [torch.nn.Parameter(torch.ones(shape, device="cuda")) for shape in SHAPES]
        optimizer = AdamWithMomentsOnHost(params)

        def devices() -> set[str]:
            return {value.device.type for state in optimizer.state.values() for value in state.values()}

        optimizer.allocate()
        assert devices() == {"cpu"}
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert devices() == {"cpu"} and {param.device.type for param in params} == {"cuda"}
        optimizer.load_state_dict(optimizer.state_dict())
        assert devices() == {"cpu"} and len(optimizer.state) == len(SHAPES)
