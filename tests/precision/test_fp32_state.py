"""Declared fp32 state keeps dtype and bits under everything that casts, moves, copies or loads a module."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_moe.precision.contract import declared_fp32_state
from megatron_moe.precision.fp32_state import Fp32State, PrecisionWarning
from tests.helpers import routers


class Gate(Fp32State, torch.nn.Module):
    fp32_state = ("expert_bias", "local_tokens_per_expert")

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3))
        # Values that bf16 and fp16 cannot hold, among them one that fp16 turns into infinity.
        self.register_buffer("expert_bias", torch.tensor([1.0009766, -0.1234567, 3e38, 1e-40]))
        counts = torch.tensor([16777215.0, 65505.0, 257.0, 0.0])
        self.register_buffer("local_tokens_per_expert", counts, persistent=False)
        self.register_buffer("table", torch.ones(3))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Gate(), torch.nn.Linear(3, 3), Gate()])


def router() -> torch.nn.Module:
    made = routers.router()
    made.expert_bias.uniform_()
    made.local_tokens_per_expert.random_(65505, 2**24)
    return made


def bits(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.view(torch.int32).clone() for _, tensor in declared_fp32_state(module)]


def all_fp32(module: torch.nn.Module) -> bool:
    return all(tensor.dtype == torch.float32 for _, tensor in declared_fp32_state(module))


CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.bfloat16),
    "float then half": lambda m: m.float().half(),
    "a lambda of a wrapper": lambda m: m._apply(lambda t: t.bfloat16() if t.is_floating_point() else t),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("made", [Model, router])
def test_a_cast_leaves_the_bits_alone(name: str, made: Callable[[], torch.nn.Module]) -> None:
    model = made()
    before = bits(model)
    CASTS[name](model)
    assert len(bits(model)) == len(before) >= 2 and all_fp32(model)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model)))
    assert all(torch.equal(a, b) for a, b in zip(before, bits(copy.deepcopy(model))))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_fp32_values_is_silent_and_keeps_their_bits(assign: bool) -> None:
    source, target = Model(), Model().bfloat16()
    source.layers[0].expert_bias.add_(0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(target.layers[0].expert_bias, source.layers[0].expert_bias)
    assert len(bits(target)) == 4 and all_fp32(target)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_rounded_bias_is_loud_recorded_and_stays_fp32(assign: bool) -> None:
    target = Model()
    state = {name: tensor.bfloat16() for name, tensor in Model().state_dict().items()}
    with pytest.warns(PrecisionWarning, match=r"layers\.0\.expert_bias is torch\.bfloat16"):
        target.load_state_dict(state, assign=assign)
    assert len(bits(target)) == 4 and all_fp32(target)
    assert torch.equal(target.layers[0].expert_bias, state["layers.0.expert_bias"].float())
    assert target.layers[0].fp32_conversions == (("layers.0.expert_bias", torch.bfloat16),)
    assert state["layers.0.expert_bias"].dtype == torch.bfloat16, "the caller's state dict was changed"
