"""The switches beneath the dtypes: a run sets them, keeps what the environment may decide, and puts all back."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.parallel import groups
from megatron_moe.platform import env_vars, numerics
from megatron_moe.precision.table import contract
from megatron_moe.training.start_notes import _precision_notes

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable is set, and the process leaves as it came."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    numerics.restore()
    before = [(switch, switch.read()) for switch in (*numerics.ARITHMETIC, *numerics.DETERMINISTIC)]
    yield
    groups.destroy()
    numerics.restore()
    for switch, value in before:
        switch.write(value)


def variables() -> list[str | None]:
    return [os.environ.get(name) for name in VARIABLES]


def of_torch() -> list[object]:
    """What torch itself answers, by the names that its documentation has."""
    return [
        MATMUL.allow_bf16_reduced_precision_reduction,
        MATMUL.allow_fp16_reduced_precision_reduction,
        MATMUL.allow_fp16_accumulation,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        MATMUL.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    ]


def everything_loose() -> None:
    MATMUL.allow_fp16_accumulation = True
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    torch.set_float32_matmul_precision("medium")


def tf32_by_the_older_name() -> None:
    MATMUL.allow_tf32 = True


def tf32_by_the_newer_name() -> None:
    MATMUL.fp32_precision = "tf32"


@pytest.mark.parametrize("prepare", [lambda: None, everything_loose, tf32_by_the_older_name, tf32_by_the_newer_name])
def test_a_run_adds_in_fp32_and_puts_back_what_was_there(prepare: Callable[[], None]) -> None:
    own = [name.rpartition(".")[2] for name in numerics.differing(numerics.present())[:2]]
    assert own == ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"]
    prepare()
    before = numerics.present()
    numerics.apply(False)
    assert of_torch() == [False] * 6 + ["highest"]
    assert MATMUL.allow_bf16_reduced_precision_reduction_split_k is True  # of which the parts are added in fp32
    assert all(value == wanted for _, value, wanted in numerics.states())
    assert numerics.differing(numerics.present()) == []
    numerics.restore()
    assert numerics.present() == before
    assert list(numerics.states()) == []


def test_the_mode_sets_its_switches_and_variables_and_leaves_without_a_trace() -> None:
    before = numerics.present()
    numerics.apply(True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert variables() == [":4096:8", "Ring", "0"]
    numerics.apply(False)  # another run of this process, without the mode
    assert not torch.are_deterministic_algorithms_enabled()
    assert variables() == [None, None, None]
    numerics.restore()
    assert numerics.present() == before


def test_a_program_that_was_deterministic_stays_so() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for deterministic in (False, True):
        numerics.apply(deterministic)
        assert torch.are_deterministic_algorithms_enabled()
        numerics.restore()
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_value_that_gives_the_same_bits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    numerics.apply(True)
    assert variables() == [":16:8", "^NVLS", "0"]
    numerics.restore()
    assert variables() == [":16:8", "^NVLS", None]


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_ALGO", "NVLS"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")],
)
def test_a_value_that_does_not_is_refused_by_name(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    before = numerics.present()
    for refuse in (env_vars.deterministic_environment, lambda: numerics.apply(True)):
        with pytest.raises(ConfigError, match=f"--deterministic-mode, {name}={value}: .*unset {name}"):
            refuse()
    assert numerics.present() == before
    numerics.apply(False)  # without the mode it is the user's own affair


# ---- --allow-tf32: what it switches, what stays exact, and that the checks and the contract go by it

ALLOWED, DETERMINISTIC = replace(Run(), allow_tf32=True), replace(Run(), deterministic_mode=True)


def products() -> tuple[str, str]:
    mkldnn: Any = torch.backends.mkldnn
    return MATMUL.fp32_precision, mkldnn.matmul.fp32_precision


@pytest.mark.parametrize(("run", "gpu"), [(Run(), "ieee"), (ALLOWED, "tf32"), (DETERMINISTIC, "ieee")])
def test_a_run_has_the_switches_that_were_chosen_and_leaves_without_a_trace(run: Run, gpu: str) -> None:
    before = products()
    groups.initialize(run)
    assert products() == (gpu, "ieee") and torch.are_deterministic_algorithms_enabled() is (run is DETERMINISTIC)
    assert all(value == wanted for _, value, wanted in numerics.states())
    if gpu == "tf32":  # a choice that is lost is noticed
        torch.set_float32_matmul_precision("highest")
        assert [value for _, value, wanted in numerics.states() if value != wanted] == [("ieee", "ieee")]
    groups.destroy()
    assert products() == before and not torch.are_deterministic_algorithms_enabled()


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
    monkeypatch.setattr(torch, "mm", watched("gradient", torch.mm))
    gate_product(hidden, weight, torch.float32).sum().backward()
    assert seen == [(name, ("ieee", "ieee")) for name in ("forward", "gradient", "gradient")]
    assert products() == ("tf32", "ieee")


def test_the_contract_and_the_start_say_so() -> None:
    (row,) = [row for row in contract(ALLOWED) if row.name == "matrix products"]
    assert "TF32 on CUDA but for routers" in row.note
    assert any("--allow-tf32 has no effect here" in note for note in _precision_notes(ALLOWED))
    assert not any("tf32" in note.lower() for note in _precision_notes(Run()))
