"""A tensor of the wrong dtype is told by name, with where it changed or who produced it."""

import copy

import pytest
import torch

from megatron_moe.precision.contract import PrecisionError, PrecisionGuard, TensorDtype, install_gates

FP32, BF16 = torch.float32, torch.bfloat16
WEIGHT = TensorDtype("a.weight", "weight", BF16, BF16)


def bias(dtype: torch.dtype) -> TensorDtype:
    return TensorDtype("b.bias", "fp32 state", dtype, FP32)


def test_a_violation_is_told_with_the_boundaries_between_which_it_came_about() -> None:
    guard = PrecisionGuard()
    assert guard.check("building", [WEIGHT, bias(FP32)]) == 2
    guard.check("loading", [bias(FP32)])
    with pytest.raises(PrecisionError) as caught:
        guard.check("iteration 20", [WEIGHT, bias(BF16)])
    assert str(caught.value) == (
        "precision contract broken at iteration 20: b.bias (fp32 state) is torch.bfloat16, must be torch.float32: "
        "changed between loading and iteration 20"
    )


def test_every_tensor_that_was_never_right_is_named_up_to_ten() -> None:
    with pytest.raises(PrecisionError, match=r"t0 .*so from the start, building.*t9 .*and 2 more"):
        PrecisionGuard().check("building", [TensorDtype(f"t{i}", "weight", FP32, BF16) for i in range(12)])


def test_one_tensor_may_be_held_to_two_things() -> None:
    guard = PrecisionGuard()
    guard.check("a", [WEIGHT, TensorDtype("a.weight", "accumulated gradient", FP32, FP32)])
    with pytest.raises(PrecisionError, match=r"a.weight \(accumulated gradient\).*between a and b"):
        guard.check("b", [WEIGHT, TensorDtype("a.weight", "accumulated gradient", BF16, FP32)])


class Widens(torch.nn.Module):
    """The fault of DeepSeek-Coder-V2's published MoE: fp32 weights promote bf16 outputs."""

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self.scale = torch.ones(4, dtype=FP32 if widens else BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def chain(widens: bool) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Widens(widens), torch.nn.Linear(4, 4)).bfloat16()
    assert install_gates(model, lambda module: isinstance(module, torch.nn.Linear)) == 2
    return model


def test_a_gate_names_the_module_its_input_came_from_and_what_to_do() -> None:
    with pytest.raises(PrecisionError) as caught:
        chain(widens=True)(torch.ones(2, 4, dtype=BF16))
    told = ("2 (Linear) got torch.float32", "weight is torch.bfloat16", "came from 1", "MulBackward0", "--keep-fp32 2")
    assert all(text in str(caught.value) for text in told), caught.value


def test_gates_let_equal_dtypes_pass_and_survive_a_copy() -> None:
    x = torch.ones(2, 4, dtype=BF16)
    model = chain(widens=False)
    copied = copy.deepcopy(model)
    assert torch.equal(model(x), copied(x))
    copied[1].scale = copied[1].scale.float()
    with pytest.raises(PrecisionError, match="came from 1"):
        copied(x)


class Handed(torch.nn.Module):
    """Multiplies by a weight that is not its own, as an output layer that shares the embedding's table does."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Bilinear(4, 4, 4)  # has a weight, which is not asked for
        self.output.forward = lambda x, weight: x @ weight  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.output(x, weight=weight)


def test_a_weight_that_is_handed_in_is_compared_instead_of_the_modules_own() -> None:
    model = Handed()
    install_gates(model, lambda module: isinstance(module, torch.nn.Bilinear))
    x = torch.ones(2, 4, dtype=BF16)
    assert model(x, torch.ones(4, 4, dtype=BF16)).dtype == BF16
    with pytest.raises(PrecisionError, match=r"output \(Bilinear\) got torch.bfloat16"):
        model(x, torch.ones(4, 4))
