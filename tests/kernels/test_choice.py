"""Which form of an operation computes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import launches
from benchmarks.contestants import engine_config
from benchmarks.problem import Shape
from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import takes_kernels
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups
from megatron_moe.platform import env_vars
from tests.helpers.errors import largest, relative
from tests.kernels.compiled_kernels import ROOT


class OnGpu(NamedTuple):
    """What is asked of a tensor, of one that this machine cannot have."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cuda:0")


def test_a_kernel_computes_on_a_gpu_unless_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "auto")
    monkeypatch.setattr(choice, "why_no_triton", lambda: None)
    assert takes_kernels(OnGpu()) and not takes_kernels(OnGpu(torch.float64))
    assert not takes_kernels(torch.empty(2))
    with platform.fake_device("cuda", {}):  # a plan is the same where there is no Triton
        assert not takes_kernels(torch.empty(2, device="meta"))
    monkeypatch.setattr(choice, "why_no_triton", lambda: "not installed")
    assert not takes_kernels(OnGpu())
    monkeypatch.setattr(choice, "why_no_triton", lambda: None)
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "triton")
    assert takes_kernels(torch.empty(2)) and not takes_kernels(torch.empty(2, dtype=torch.float64))
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "torch")
    assert not takes_kernels(OnGpu())


def test_what_a_kernel_does_not_cover_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(*arguments: object) -> object:
        asked.append(arguments)
        return NotImplemented

    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "triton")
    monkeypatch.setitem(choice.KERNELS, "doubled", choice.Kernels("anywhere.doubled"))
    monkeypatch.setattr(choice, "_triton", lambda path: refuses)
    doubled = choice.has_kernel("doubled")(lambda x: x * 2)
    assert doubled(torch.ones(2)).tolist() == [2, 2] and len(asked) == 1


def test_a_kernel_is_looked_for_once_for_each_kind_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, ran = [], []

    class Kernel:
        arg_names = ("rows", "number", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(*arguments: Any, **constants: Any) -> Any:
                compiled.append(arguments[1])
                return SimpleNamespace(run=lambda *given: ran.append(given), function="f", packed_metadata="m")

            return first

    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace(get_current_stream=lambda device: "s"))
    kernel, rows = Kernel(), torch.zeros(8)
    for number in (32, 48, 33, 35, 2**31):
        choice.launch(kernel, (3, 2), rows, number, BLOCK=4)
    choice.launch(kernel, (3, 2), rows[1:], 32, BLOCK=4)
    choice.launch(kernel, (0, 2), rows, 32, BLOCK=4)
    assert compiled == [32, 33, 2**31, 32]
    assert ran == [(3, 2, 1, "s", "f", "m", None, None, None, rows.data_ptr(), number, 4) for number in (48, 35)]


# ---- a layer with kernels: the numbers of one without, what a GPU would launch, and what the kernels take of it


SHAPE = {"tokens": 4096, "hidden": 7168, "experts": 32, "topk": 8, "ffn": 2048}


def totals(**how: Any) -> SimpleNamespace:
    every = [one for found in launches.of_layer(**SHAPE, **how) for one in found]
    return SimpleNamespace(
        launches=sum(one.launches for one in every),
        gigabytes=sum(one.size for one in every if not one.flops) / 1e9,
        tflops=sum(one.flops for one in every) / sum(one.seconds for one in every) / 1e12,
    )


# Launches of a layer, forward and backward.
LAUNCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "EP 1": (35, {}),
    "EP 1, shared expert": (50, {"shared": 2048}),
    "EP 1, groups": (35, {"moe_router_num_groups": 8, "moe_router_group_topk": 4}),
    "EP 1, capacity": (79, {"moe_expert_capacity_factor": 1.0}),
    "EP 2": (45, {"ep": 2}),
    "EP 8": (45, {"ep": 8}),
    "EP 8, shared expert": (60, {"ep": 8, "shared": 2048}),
    "EP 8, groups": (45, {"ep": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 4}),
    "EP 8, a loss for each sequence": (
        83,
        {"ep": 8, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4},
    ),
    "EP 1, FP8": (35, {"fp8_format": "e4m3"}),
    "EP 8, FP8": (45, {"ep": 8, "fp8_format": "hybrid"}),
    "EP 8, capacity": (89, {"ep": 8, "moe_expert_capacity_factor": 1.0}),
}


@pytest.mark.parametrize("layer", LAUNCHES)
def test_a_layer_launches_this_many_operations_at_most(layer: str) -> None:
    most, how = LAUNCHES[layer]
    assert totals(**how).launches <= most


def test_sums_that_products_add_to_cost_no_launch_and_no_traffic() -> None:
    alone, added, fused = (totals(sums=sums) for sums in ("none", "added", "fused"))
    assert alone.gigabytes <= 3.8 and alone.tflops >= 555
    assert fused.gigabytes < alone.gigabytes + 0.01 and added.gigabytes > alone.gigabytes + 14
    assert fused.launches < added.launches and fused.tflops >= 555 and added.tflops < 480


@pytest.mark.test_all(instead="tests/kernels/test_choice.py::test_a_layer_is_the_same_with_kernels")
def test_the_kernels_compile_within_their_budget(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compiled_kernels", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def stepped(kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A small MoE layer's output, gradients and counts with this form of its operations."""
    config = engine_config(Shape(24, 16, 8, 2, 8, 0), dtype, moe_shared_expert_intermediate_size=None)
    config.moe_expert_backend = "grouped_mm"
    layer = MoELayer(config, layer_number=1).train()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    hidden = torch.randn(24, 1, 16, generator=generator).to(dtype).requires_grad_()
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, kernels)
    output = layer(hidden)[0]
    output.backward(torch.randn(24, 1, 16, generator=generator).to(dtype))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    counts = layer.router.local_tokens_per_expert
    return {"output": output.detach(), "hidden": hidden.grad, **gradients, "counts": counts}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_layer_is_the_same_with_kernels(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.initialize(Run())
    wanted, found = stepped("torch", dtype, monkeypatch), stepped("triton", dtype, monkeypatch)
    assert torch.equal(found.pop("counts"), wanted.pop("counts"))
    errors = {name: relative(found[name], right) for name, right in wanted.items()}
    assert len(errors) == 5 and largest(errors.values()) <= bound, errors
