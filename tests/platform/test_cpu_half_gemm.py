"""Half-precision products, native or by way of fp32: the same numbers; one switch, or the processor, decides."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_moe.moe.grouped_gemm import TorchProduct
from megatron_moe.platform import cpu_half_gemm, env_vars, hardware
from tests.helpers.called import Called
from tests.helpers.ranks import Child

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["native", "fp32"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, request.param)
    return request.param


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """Half a unit in the last place, and fp32's error over a sum of `terms` products of size about one."""
    limit = 0.51 * torch.finfo(actual.dtype).eps * exact.abs() + terms * 1e-6
    assert ((actual.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_layer_and_its_gradients_are_rounded_once(way, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(24, 32, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 8, 24, generator=generator).to(dtype)
    out = cpu_half_gemm.linear(x, weight)
    out.backward(grad)
    wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, weight, grad))
    assert out.dtype == x.grad.dtype == weight.grad.dtype == dtype
    assert_rounded_once(out, wide_x @ wide_weight.T, 32)
    assert_rounded_once(x.grad, wide_grad @ wide_weight, 24)
    assert_rounded_once(weight.grad, wide_grad.flatten(0, 1).T @ wide_x.flatten(0, 1), 24)


def multiplied_dtypes(called: Called) -> set[torch.dtype]:
    """The dtypes of the first operands of matrix products."""
    products = (torch.ops.aten.mm, torch.ops.aten._grouped_mm)
    return {arguments[0].dtype for operation, arguments in called.calls if operation in products}


def engine_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return layers.linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False
    )


def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return TorchProduct()(x, weight[None], torch.tensor([8], dtype=torch.int32))


@pytest.mark.engine
@pytest.mark.parametrize("product", [cpu_half_gemm.linear, engine_linear, grouped])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_switch_decides_what_is_multiplied_forward_and_backward(way, product, dtype):
    x, weight = (torch.ones(8, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    with Called() as called:
        product(x, weight).sum().backward()
    assert multiplied_dtypes(called) == {torch.float32 if way == "fp32" else dtype}


def test_a_device_on_paper_multiplies_as_such_a_device_does(way):
    operand = torch.empty(2, dtype=torch.bfloat16, device="meta")
    for kind, wide in (("cuda", False), ("cpu", way == "fp32")):
        with hardware.fake_device(kind, {}):
            assert cpu_half_gemm.multiply_in_fp32(operand) == wide


def test_by_itself_the_processors_instructions_decide(monkeypatch):
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, "auto")
    monkeypatch.setattr(cpu_half_gemm, "_has_instructions", cpu_half_gemm._has_instructions.__wrapped__)
    wide = {"avx512_f": [True, True], "avx512_bf16": [False, True], "amx_bf16 amx_fp16": [False, False]}
    for capabilities, wanted in wide.items():
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda found=capabilities: dict.fromkeys(found.split(), True)
        )
        assert [cpu_half_gemm.multiply_in_fp32(torch.empty(1, dtype=dtype)) for dtype in HALVES] == wanted
        assert not cpu_half_gemm.multiply_in_fp32(torch.empty(1))


GROUPS = [[5, 3], [0, 40, 0, 9, 100, 0], [130, 1, 257, 64, 0], [0, 0, 0]]
"""Rows of each group; with the rows that fill it up, a group reaches over one or several behind it, or over the end."""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("counts", GROUPS)
def test_groups_of_any_size_are_rounded_once(way, counts, dtype):
    generator = torch.Generator().manual_seed(2)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows, grad = (torch.randn(sum(counts), size, generator=generator).to(dtype) for size in (32, 24))
    matrices = torch.randn(len(counts), 32, 24, generator=generator).to(dtype)
    groups = list(zip(rows.double().split(counts), grad.double().split(counts)))
    products = cpu_half_gemm.grouped_product(rows, matrices, offsets)
    assert_rounded_once(products, torch.cat([x @ m for (x, _), m in zip(groups, matrices.double())]), 32)
    sums = cpu_half_gemm.grouped_product(grad.t(), rows, offsets)
    assert_rounded_once(sums, torch.stack([dy.t() @ x for x, dy in groups]), 257)


@pytest.mark.parametrize("dtype", HALVES)
def test_groups_of_any_size_have_the_bits_of_torchs_grouped_product(way, dtype):
    """An audit, or a probe of a step's health, sees torch's form, and may change no bit of a run."""
    generator = torch.Generator().manual_seed(3)
    for counts in GROUPS[:-1]:
        offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
        rows, grad = (torch.randn(sum(counts), size, generator=generator).to(dtype) for size in (96, 64))
        weights = torch.randn(len(counts), 64, 96, generator=generator).to(dtype)
        for left, right in ((rows, weights.transpose(-2, -1)), (grad, weights), (grad.t(), rows)):
            ours = cpu_half_gemm.grouped_product(left, right, offsets)
            with Called() as called:
                theirs = cpu_half_gemm.grouped_product(left, right, offsets)
            assert torch.equal(ours, theirs)
            assert multiplied_dtypes(called) == {torch.float32 if way == "fp32" else dtype}


def test_copies_in_fp32_are_of_one_group_at_a_time(monkeypatch):
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, "fp32")
    mm, multiplied = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda one, other: multiplied.append((one, other)) or mm(one, other))  # type: ignore[func-returns-value]
    rows, matrices = torch.ones(200, 8).bfloat16(), torch.ones(3, 8, 16).bfloat16()
    offsets = torch.tensor([50, 50, 200], dtype=torch.int32)
    cpu_half_gemm.grouped_product(rows, matrices, offsets)
    cpu_half_gemm.grouped_product(torch.ones(16, 200).bfloat16(), rows, offsets)
    shapes = [(tuple(one.shape), tuple(other.shape)) for one, other in multiplied]
    assert shapes == [((50, 8), (8, 16)), ((150, 8), (8, 16)), ((16, 50), (50, 8)), ((16, 150), (150, 8))]
    assert {tensor.dtype for pair in multiplied for tensor in pair} == {torch.float32}


def test_what_is_not_a_number_stays_in_its_group(way):
    rows = torch.ones(12, 8, dtype=torch.bfloat16)
    rows[5:] = torch.nan
    offsets = torch.tensor([5, 12], dtype=torch.int32)
    products = cpu_half_gemm.grouped_product(rows, torch.ones(2, 8, 8, dtype=torch.bfloat16), offsets)
    sums = cpu_half_gemm.grouped_product(rows.t(), rows, offsets)
    assert products[:5].isfinite().all() and products[5:].isnan().all()
    assert sums[0].isfinite().all() and sums[1].isnan().all()


def test_few_numbers_of_rows_stand_for_all():
    for most, kinds, parts_of in (
        (3 / 2, 18, lambda rows: [cpu_half_gemm.padded_rows(rows)]),
        (4 / 3, 10, cpu_half_gemm.pieces_of_rows),
    ):
        parts = {rows: parts_of(rows) for rows in range(1, 4097)}
        assert all(rows <= sum(some) <= max(rows + 7, rows * most) for rows, some in parts.items())
        assert all(sum(some[:-1]) < rows and len(some) <= 2 for rows, some in parts.items())
        assert len({part for some in parts.values() for part in some}) == kinds


def resident_growth(folder: str) -> None:
    """Write what 448 further sizes of groups leave behind, forward and backward, after every eighth size was met."""

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rows, weights = (torch.ones(*size, 64, dtype=torch.bfloat16, requires_grad=True) for size in ((512,), (2, 64)))
    for sizes in (range(0, 512, 8), range(512)):
        before = resident()
        for size in sizes:
            TorchProduct()(rows, weights, torch.tensor([size, 512], dtype=torch.int32)).sum().backward()
    Path(folder, "grown").write_text(str(resident() - before))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and trims glibc's heap")
def test_groups_of_ever_other_sizes_leave_no_memory_behind(rank_parent, tmp_path):
    """torch's own product kept 480 MB for them, 45 without AVX-512's bf16."""
    log, native = tmp_path / "log", {env_vars.HALF_PRODUCTS: "native"}
    target = "tests.platform.test_cpu_half_gemm:resident_growth"
    child = Child(target, str(tmp_path), str(log), environment=native)
    assert rank_parent.statuses(rank_parent.fork([child]), 600) == [0], log.read_text()
    assert int((tmp_path / "grown").read_text()) < 8 << 20
