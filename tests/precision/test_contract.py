"""An fp32 island keeps its bits under every cast, computes in fp32, and speaks the dtype of the model around it."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from megatron_moe.precision.contract import Emits, declared_fp32_parameters, declared_fp32_state, make_island
from tests.precision import test_fp32_state

CASTS = {**test_fp32_state.CASTS, "deepcopy": lambda m: copy.deepcopy(m).half()}


class Pair(torch.nn.Module):
    """Two linear layers with a norm between; the norm has a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def pair_with_island(dtype=torch.bfloat16):
    model = Pair().to(dtype)
    make_island(model.first, Emits())
    torch.nn.init.normal_(model.first.weight)
    return model


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_leaves_an_islands_bits_and_parameter_alone(cast):
    model = pair_with_island()
    weight = model.first.weight
    weight.sequence_parallel = True
    before = weight.detach().clone()
    assert not torch.equal(before, before.bfloat16().float())  # a cast would show
    after = CASTS[cast](model)
    assert after.first.weight.dtype == torch.float32
    assert torch.equal(after.first.weight, before)
    assert after.second.weight.dtype != torch.float32
    assert after is not model or (after.first.weight is weight and weight.sequence_parallel)


def test_an_island_moves_with_its_model():
    model = pair_with_island().to("meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model.first.weight.dtype == torch.float32


def test_an_islands_gradients_and_buffers_are_not_cast_either():
    model = Pair()
    make_island(model.norm, Emits())
    model(torch.randn(3, 8)).sum().backward()
    wanted = model.norm.weight.grad.clone()
    model.bfloat16()
    assert model.norm.weight.grad.dtype == torch.float32 and torch.equal(model.norm.weight.grad, wanted)
    assert model.norm.running_var.dtype == torch.float32
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_an_island_is_declared_fp32_state_with_all_that_it_contains():
    model = torch.nn.Sequential(Pair(), torch.nn.Linear(4, 4))
    make_island(model[0], Emits())
    names = {"0.first.weight", "0.first.bias", "0.norm.weight", "0.norm.bias", "0.second.weight", "0.second.bias"}
    assert {name for name, _ in declared_fp32_parameters(model)} == names
    assert {name for name, _ in declared_fp32_state(model)} == names


@dataclass(frozen=True)
class Record:
    rows: torch.Tensor
    counts: torch.Tensor


Named = namedtuple("Named", "x y")


class Nested(torch.nn.Module):
    """Takes its tensors in every kind of nest, and notes the dtypes that it sees."""

    def forward(self, record, pair, *, more, none=None):
        self.seen = [record.rows.dtype, record.counts.dtype, pair.x.dtype, pair.y[0].dtype, more["a"].dtype]
        return Named(record.rows, [pair.x, record.counts]), None, {"b": more["a"]}


def test_nested_inputs_are_widened_and_nested_outputs_come_back_in_the_first_inputs_dtype():
    module = Nested()
    make_island(module, Emits())
    half = torch.ones(2, dtype=torch.bfloat16)
    wide = torch.ones(2, dtype=torch.float64)
    output, none, more = module(Record(half, torch.ones(2, dtype=torch.int32)), Named(half, [wide]), more={"a": half})
    assert module.seen == [torch.float32, torch.int32, torch.float32, torch.float64, torch.float32]
    assert none is None and isinstance(output, Named)
    assert output.x.dtype == output.y[0].dtype == more["b"].dtype == torch.bfloat16
    assert output.y[1].dtype == torch.int32


def test_an_island_computes_as_an_fp32_model_and_rounds_once():
    model = pair_with_island()
    x = torch.randn(5, 8).bfloat16().requires_grad_()
    got = model.first(x)
    wanted = torch.nn.functional.linear(x.float(), model.first.weight, model.first.bias)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted.bfloat16())
    got.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert model.first.weight.grad.dtype == torch.float32
    assert torch.equal(model.first.weight.grad, x.detach().float().sum(0).expand(8, 8))


def test_what_an_island_emits_can_be_said():
    for emits, wanted in ((Emits(lambda: torch.float16), torch.float16), (Emits(as_computed=True), torch.float32)):
        table = torch.nn.Embedding(4, 2)
        make_island(table, emits)
        assert table(torch.tensor([1])).dtype == wanted


def test_a_module_that_casts_for_itself_is_protected_only():
    model = Pair()
    make_island(model.first, None)
    model.bfloat16()
    assert model.first.weight.dtype == torch.float32
    assert model.first(torch.ones(1, 8)).dtype == torch.float32


def test_a_copy_of_an_island_computes_with_its_own_weights():
    model = pair_with_island()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
        other.first.bias.zero_()
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    assert not other.first(x).any() and model.first(x).any()
    other.half()
    assert other.first.weight.dtype == torch.float32 and model.second.weight.dtype == torch.bfloat16
