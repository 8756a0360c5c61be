"""The products in C of groups of rows, against fp64 and torch's own."""

import itertools

import pytest
import torch

from megatron_moe.kernels import choice
from megatron_moe.moe.grouped_gemm import add_grouped_product, added_to_main_grad, grouped_product
from megatron_moe.platform import cpu_half_gemm, env_vars
from tests.helpers.called import Called

COUNTS = (0, 1, 29, 1037, 0, 520)
ENDS = torch.tensor(COUNTS).cumsum(0).int()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=DTYPES, ids=str)
def dtype(request, monkeypatch):
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, "native")
    monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, "auto")
    monkeypatch.setattr(choice, "_mkl_leaves_avx512", lambda: True)
    if not choice.takes_products(torch.ones(2, 2, dtype=request.param), torch.ones(2, 2, dtype=request.param)):
        pytest.skip("the kernel cannot be had here")
    return request.param


def operands(dtype, depth=1160, width=88):
    """Rows, their gradients, and matrices in both layouts; neither whole panels wide nor whole passes deep."""
    generator = torch.Generator().manual_seed(depth)
    sizes = ((sum(COUNTS), depth), (sum(COUNTS), width), (len(COUNTS), depth, width), (len(COUNTS), width, depth))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def products_of(dtype):
    rows, grad, matrices, others = operands(dtype)
    return [(rows, matrices), (rows, others.transpose(-2, -1)), (grad, others), (grad.t(), rows), (rows.t(), grad)]


def parts(left, right, ends=ENDS):
    """Operands of each group."""
    starts = [0, *ends.tolist()]
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        yield (left[:, start:end], right[start:end]) if right.dim() == 2 else (left[start:end], right[group])


def test_products_are_as_exact_as_torchs_on_any_number_of_threads(dtype):
    def error(found, exact):
        return float((found.double() - exact).norm() / exact.norm())

    for left, right in products_of(dtype):
        pieces = [one.double() @ other.double() for one, other in parts(left, right)]
        exact = torch.stack(pieces) if right.dim() == 2 else torch.cat(pieces)
        found = grouped_product(left, right, ENDS)
        assert error(found, exact) <= 1.1 * error(cpu_half_gemm.grouped_product(left, right, ENDS), exact)
        torch.set_num_threads(1 + torch.get_num_threads() % 2)
        assert torch.equal(found, grouped_product(left, right, ENDS))


def test_a_group_alone_has_the_same_bits_also_next_to_what_is_not_a_number(dtype):
    for left, right in products_of(dtype):
        rows = right if right.dim() == 2 else left
        kept = grouped_product(left, right, ENDS)
        rows[ENDS[-2] :] = torch.nan
        found = grouped_product(left, right, ENDS)
        last = found[-1:] if right.dim() == 2 else found[ENDS[-2] :]
        assert last.isnan().all() and torch.equal(found[: -len(last)], kept[: -len(last)])
        one, other = list(parts(left, right))[3]
        alone = grouped_product(
            one, other if right.dim() == 2 else other[None], torch.tensor([1037], dtype=torch.int32)
        )
        assert torch.equal(alone[0] if right.dim() == 2 else alone, kept[3] if right.dim() == 2 else kept[30:1067])


@pytest.mark.parametrize("fused", [None, True])
def test_a_sum_gets_what_was_in_it_and_the_products(dtype, fused):
    rows, grad, *_ = operands(dtype)
    weights = torch.nn.Parameter(torch.zeros(len(COUNTS), 88, 1160, dtype=dtype))
    before = torch.randn(weights.shape, generator=torch.Generator().manual_seed(5))
    weights.main_grad = before.clone()
    assert added_to_main_grad(weights, grad, rows, ENDS, fused)
    if fused is None:
        assert torch.equal(weights.main_grad, before + grouped_product(grad.t(), rows, ENDS))
    exact = before + torch.stack([one.double() @ other.double() for one, other in parts(grad.t(), rows)])
    assert torch.allclose(weights.main_grad.double(), exact, *((2**-8, 0.1) if fused is None else (1e-5, 1e-4)))


def test_what_watches_sees_torchs_operations_and_changes_no_bit(dtype):
    for left, right in products_of(dtype):
        with Called() as called:
            watched = grouped_product(left, right, ENDS)
        assert torch.equal(watched, grouped_product(left, right, ENDS)) and "mm" in " ".join(called.names)
    rows, grad, *_ = operands(dtype)
    totals = [torch.ones(len(COUNTS), 88, 1160) for _ in range(2)]
    with Called() as called:
        add_grouped_product(totals[0], grad, rows, ENDS)
    add_grouped_product(totals[1], grad, rows, ENDS)
    assert torch.equal(*totals) and called.names


def test_ends_of_groups_that_memory_does_not_have_are_refused(dtype):
    rows, _, matrices, _ = operands(dtype)
    for wrong in ([0, 1, 30, 20, 50, 60], [0, 1, 2, 3, 4, 1588]):
        with pytest.raises(ValueError, match="offsets .* must not decrease"):
            grouped_product(rows, matrices, torch.tensor(wrong, dtype=torch.int32))


def test_torch_computes_where_the_kernels_are_switched_off(dtype, monkeypatch):
    assert choice.why_no_c() is None
    monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, "torch")
    for left, right in products_of(dtype):
        assert torch.equal(grouped_product(left, right, ENDS), cpu_half_gemm.grouped_product(left, right, ENDS))
