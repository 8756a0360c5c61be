"""`--allow-tf32`: what it switches, what stays exact, and that the checks and the contract go by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.parallel import groups
from megatron_moe.platform import numerics
from megatron_moe.precision.table import contract
from megatron_moe.training.build import _precision_notes

pytestmark = pytest.mark.engine

ALLOWED = replace(Run(), allow_tf32=True)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = numerics.present()
    yield
    groups.destroy()
    numerics.restore()
    assert numerics.present() == before


def products() -> tuple[str, str]:
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    return matmul.fp32_precision, mkldnn.matmul.fp32_precision


@pytest.mark.parametrize(("run", "gpu"), [(Run(), "ieee"), (ALLOWED, "tf32")])
def test_a_run_multiplies_by_tf32_where_it_was_chosen_and_leaves_without_a_trace(run: Run, gpu: str) -> None:
    before = products()
    groups.initialize(run)
    assert products() == (gpu, "ieee")
    assert all(value == wanted for _, value, wanted in numerics.states())
    groups.destroy()
    assert products() == before


def test_a_run_that_loses_its_choice_is_noticed() -> None:
    groups.initialize(ALLOWED)
    torch.set_float32_matmul_precision("highest")
    assert [value for _, value, wanted in numerics.states() if value != wanted] == [("ieee", "ieee")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_routers_products_are_exact_forward_and_backward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[str, str]]] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append((name, products()))
            return function(*arguments, **options)

        return call

    groups.initialize(ALLOWED)
    hidden, weight = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (6, 4))
    monkeypatch.setattr(F, "linear", watched("forward", F.linear))
    monkeypatch.setattr(torch, "matmul", watched("rows", torch.matmul))
    monkeypatch.setattr(torch, "mm", watched("weight", torch.mm))
    gate_product(hidden, weight, torch.float32).sum().backward()
    assert seen == [(name, ("ieee", "ieee")) for name in ("forward", "rows", "weight")]
    assert products() == ("tf32", "ieee")


def test_the_contract_and_the_start_say_so() -> None:
    (row,) = [row for row in contract(ALLOWED) if row.name == "matrix products"]
    assert "TF32 on CUDA but for routers" in row.note
    assert any("--allow-tf32 has no effect here" in note for note in _precision_notes(ALLOWED))
    assert not any("tf32" in note.lower() for note in _precision_notes(Run()))
