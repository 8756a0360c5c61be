"""The MoE layer's Triton kernels, in Triton's interpreter, against the same operations in torch and in fp64.

The interpreter cuts numbers off where it stores bf16, which a GPU rounds: one step of bf16 is allowed there.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.model import cross_entropy, mla
from megatron_moe.moe import experts, grouped_gemm, routing
from megatron_moe.moe import rows as moves
from megatron_moe.parallel.collectives import room_for_rows, weights_behind
from tests.kernels.compiled_kernels import all_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def in_turn(sizes: Sequence[Any]) -> list[Any]:
    """Each size with one dtype, and each dtype with some size."""
    return [(*size, DTYPES[number % 3]) for number, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def fused() -> Any:
    return all_kernels()


def eager(operation: Any) -> Any:
    """The form in torch alone."""
    return operation.eager


def steps_apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in steps of the found numbers' dtype at their size, or at the largest one's times 2^-6."""
    if not exact.numel():
        return 0.0
    eps = torch.finfo(found.dtype).eps
    size = exact.abs().clamp(min=max(float(exact.abs().max()) * 2**-6, 1e-30))
    return float(((found.double() - exact).abs() / (size * eps)).max())


@pytest.mark.parametrize(("rows", "width", "dtype"), in_turn([(0, 8), (1, 1), (5, 7), (3, 1500), (17, 64)]))
def test_the_activation_forward_and_backward(fused, rows, width, dtype):
    generator = torch.Generator().manual_seed(rows)
    gate_up = torch.randn(rows, 2 * width, generator=generator).to(dtype)
    probs, grad = torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator).to(dtype)
    wide = (gate_up.double(), probs.double())
    exact = eager(experts.weighted_swiglu_forward)(*wide)
    exact_gate_up, exact_probs = eager(experts.weighted_swiglu_backward)(grad.double(), *wide)
    found = fused.weighted_swiglu_forward(gate_up, probs)
    found_gate_up, found_probs = fused.weighted_swiglu_backward(grad, gate_up, probs)
    assert found.dtype == found_gate_up.dtype == dtype and found_probs.dtype == torch.float32
    steps = 16 if dtype == torch.float32 else 1.01
    assert steps_apart(found, exact) <= steps and steps_apart(found_gate_up, exact_gate_up) <= steps
    size = exact_probs.abs().sum()
    assert (found_probs - exact_probs).abs().sum() <= 1e-6 * size * max(1, width) ** 0.5


def choices(tokens: int, topk: int, num_experts: int, kind: str) -> torch.Tensor:
    if kind == "all on one":
        return torch.full((tokens, topk), num_experts - 1)
    if kind == "one row each":
        return torch.randperm(num_experts)[: tokens * topk].view(tokens, topk)
    return torch.randint(num_experts, (tokens, topk), generator=torch.Generator().manual_seed(tokens))


# (T, K, E): one part of the sort and several, one step of a part and several, experts without rows.
SORTS = [(37, 4, 8, ""), (33, 8, 64, ""), (1, 1, 1, ""), (0, 2, 4, ""), (33, 2, 5, "all on one")]
SORTS += [(4, 8, 32, "one row each"), (600, 1, 3, "")]


@pytest.mark.parametrize(("tokens", "topk", "num_experts", "kind"), SORTS)
def test_choices_are_sorted_by_expert(fused, tokens, topk, num_experts, kind, monkeypatch):
    monkeypatch.setattr("megatron_moe.kernels.triton_dispatch.MOST_PARTS", 2)
    ids = choices(tokens, topk, num_experts, kind)
    for real, partial in ((num_experts, False), (num_experts - 1, True)):  # all experts, and without the last one's
        found, wanted = (sort(ids, real, partial) for sort in (fused.sort_by_expert, eager(moves.sort_by_expert)))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert [one.dtype for one in found] == [one.dtype for one in wanted]
        for sort in (fused.sort_by_expert, eager(moves.sort_by_expert)):
            counts = torch.full((real,), -1)
            assert torch.equal(sort(ids, real, partial, counts)[0], wanted[0])
            assert torch.equal(counts, ids.flatten().bincount(minlength=real)[:real])


@pytest.mark.parametrize("counts", [[[3, 0, 300], [0, 0, 1]], [[0, 0]], [[2], [0], [5]]])
def test_rows_that_arrived_by_rank_are_sorted_by_expert(fused: Any, counts: list[list[int]]) -> None:
    rows = torch.tensor(counts)
    found, wanted = (sort(rows, int(rows.sum())) for sort in (fused.sort_arrived, eager(moves.sort_arrived)))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    ids = torch.arange(rows.shape[1]).repeat(len(counts)).repeat_interleave(rows.flatten())
    assert torch.equal(found[0], ids.sort(stable=True).indices) and found[2].dtype == torch.int32


@pytest.mark.parametrize(("tokens", "topk", "num_experts", "kind", "dtype"), in_turn([SORTS[0], *SORTS[2:6]]))
def test_rows_are_copied_and_summed(fused, tokens, topk, num_experts, kind, dtype):
    order, source, inverse, *_ = eager(moves.sort_by_expert)(choices(tokens, topk, num_experts, kind), num_experts)
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(tokens, 21, generator=generator).to(dtype), torch.rand(tokens * topk)
    for kept in (len(order), 2 * len(order) // 3):  # all copies, and without the last third
        slots = inverse.view(tokens, topk).clamp(max=kept)
        packed = room_for_rows(kept, 21, rows, weights)
        copies, behind = packed[:, :21], weights_behind(packed, torch.float32)
        fused.spread_rows(rows, weights, order[:kept], source[:kept], slots, copies, behind)
        assert torch.equal(copies, rows[source[:kept]]) and torch.equal(behind, weights[order[:kept]])
        exact = torch.cat([copies, copies.new_zeros(1, 21)]).double()[slots].sum(dim=1)
        for one, of_weights in ((packed, behind), (copies.contiguous(), None)):
            found, sums = fused.add_up_rows(one, of_weights, slots, kept < len(order), 21)
            assert steps_apart(found, exact) <= (topk if dtype == torch.float32 else 1.01)
            assert sums is None or torch.equal(sums, weights.masked_fill(slots.flatten() == kept, 0.0))
        if topk % 2 == 0:  # two copies share a weight
            _, sums = fused.add_up_rows(copies, behind, slots, kept < len(order), 21, 2)
            _, wanted = eager(moves.add_up_rows)(copies, behind, slots, kept < len(order), 21, 2)
            assert torch.allclose(sums, wanted)


def options(**changes: Any) -> Any:
    plain = {"num_groups": None, "group_topk": None, "group_score": "top2", "topk": 2, "score_function": "sigmoid"}
    plain |= {"pre_softmax": False, "norm_topk_prob": True, "scaling_factor": 2.5, "enable_expert_bias": True}
    return SimpleNamespace(**{**plain, **changes})


ROUTERS = {
    "plain": (16, options()),
    "one expert": (1, options(topk=1)),
    "DeepSeek-V3's groups": (64, options(topk=8, num_groups=8, group_topk=4)),
    "DeepSeek-V2's groups": (20, options(topk=3, num_groups=4, group_topk=2, group_score="max", scaling_factor=None)),
    "the engine's groups": (16, options(topk=4, num_groups=4, group_topk=2, group_score="megatron")),
    "all are chosen": (4, options(topk=4)),
    "softmax after the choice": (60, options(score_function="softmax", topk=4)),
    "softmax before it": (60, options(score_function="softmax", topk=4, pre_softmax=True, norm_topk_prob=False)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_weighed_and_counted(fused, name):
    num_experts, how = ROUTERS[name]
    padded = list(ROUTERS).index(name) % 2 == 0
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(11, num_experts, generator=generator)
    bias = 0.1 * torch.randn(num_experts, generator=generator)
    padding = torch.rand(11, generator=generator) < 0.3 if padded else None
    scores = routing.scores_from_logits(logits, how)
    ranked = routing.ranked_values(logits, scores, how)
    ids = fused.choose_experts(ranked, bias, how)
    assert torch.equal(ids, eager(routing.choose_experts)(ranked, bias, how))
    for sequences in (1, 3):
        wanted = eager(routing.count_tokens)(ids, num_experts, padding, sequences)
        assert torch.equal(fused.count_tokens(ids, num_experts, padding, sequences), wanted)
    found, wanted = ((torch.full((num_experts,), 5.0), torch.tensor([7])) for _ in range(2))
    fused.add_counts(*found, ids, padding)
    eager(routing.add_counts)(*wanted, ids, padding)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    softmax = how.score_function == "softmax" and not how.pre_softmax
    weighed = logits if softmax else scores
    settings = (padding, softmax, how.norm_topk_prob, how.scaling_factor or 1.0)
    grad = torch.randn(ids.shape, generator=generator)
    exact = eager(routing.expert_weights)(weighed.double(), logits.double(), ids, *settings)
    for counts in (None, (torch.full((num_experts,), 5.0), torch.tensor([7]))):
        both = fused.choose_and_weigh(ranked, bias, weighed, logits, padding, how, counts, *settings[1:])
        same = ids if padding is None else routing._apart(ids, padding, num_experts)
        probs = fused.expert_weights(weighed, logits, same, *settings)
        assert torch.equal(both[0], same) and torch.equal(both[1], probs)
    assert all(torch.equal(one, other) for one, other in zip(counts, wanted, strict=True))
    assert torch.allclose(fused.expert_weights(weighed, logits, ids, *settings).double(), exact, rtol=1e-6, atol=1e-7)
    slope = eager(routing.expert_weights_backward)(grad.double(), weighed.double(), ids, *settings)
    found = fused.expert_weights_backward(grad, weighed, ids, *settings)
    assert torch.allclose(found.double(), slope, rtol=1e-5, atol=1e-6)


def test_a_tie_goes_to_the_lower_expert_and_no_expert_is_chosen_twice(fused):
    ranked = torch.zeros(5, 8)
    ranked.view(torch.int32)[1, 3] = -(1 << 22)  # the NaN that arithmetic of x86 makes, with its sign
    ranked[2, 5], ranked[3] = float("inf"), float("nan")
    ranked[4, ::2] = -0.0
    ids = fused.choose_experts(ranked, None, options(topk=4))
    assert ids.tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [5, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_passes_where_torchs_passes(fused, value):
    def same(operation: Any, *arguments: Any) -> Any:
        found, wanted = getattr(fused, operation.__name__)(*arguments), eager(operation)(*arguments)
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        assert all(torch.equal(one.isfinite(), other.isfinite()) for one, other in pairs)
        return found

    logits, ids = torch.randn(3, 8), torch.tensor([[0, 1]] * 3)
    logits[1, 2] = value
    found = same(routing.expert_weights, torch.sigmoid(logits), logits, ids, None, False, True, 1.0)
    assert found.isnan().all(dim=1).tolist() == [False, True, False]
    gate_up, probs, grad = torch.randn(6, 16), torch.rand(6), torch.randn(6, 8)
    gate_up[1, 3], gate_up[2, 12], probs[3], grad[4, 5] = value, value, value, value
    same(experts.weighted_swiglu_forward, gate_up, probs)
    same(experts.weighted_swiglu_backward, grad, gate_up, probs)
    copies, slots = torch.ones(6, 5), torch.arange(6).view(3, 2)
    copies[3, 1] = value
    same(moves.add_up_rows, copies, torch.ones(6), slots, False, 5)
    rest, positional, tables = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4), (torch.ones(2, 1, 1, 2),) * 2
    rest[0, 0, 0, 1] = positional[1, 0, 0, 2] = value
    same(mla.join_positions, rest, positional, *tables)

    tile, columns = torch.ones(3, 8), torch.tensor([0, 1, 2])
    tile[1, 3] = value
    ours, torchs = ([torch.full((3,), float("-inf")), torch.zeros(3), torch.zeros(3)] for _ in range(2))
    fused.add_statistics(tile, columns, *ours)
    eager(cross_entropy.add_statistics)(tile.clone(), columns, *torchs)
    assert torch.equal(ours[1].isfinite(), torchs[1].isfinite())
    arguments = (columns, *torchs[:2], torch.ones(3), torch.float32)
    gradient = eager(cross_entropy.gradient_of_tile)(tile.clone(), *arguments)
    assert torch.equal(fused.gradient_of_tile(tile, *arguments).isfinite(), gradient.isfinite())

    left, right, ends = torch.ones(9, 8), torch.ones(9, 16), torch.tensor([4, 9], dtype=torch.int32)
    left[3, 2], right[5, 7] = value, value
    found, wanted = torch.zeros(2, 8, 16), torch.zeros(2, 8, 16)
    fused.add_grouped_product(found, left.bfloat16(), right.bfloat16(), ends)
    eager(grouped_gemm.add_grouped_product)(wanted, left.bfloat16(), right.bfloat16(), ends)
    assert torch.equal(found.isfinite(), wanted.isfinite()) and int((~wanted.isfinite()).sum()) == 16 + 8


@pytest.mark.parametrize(
    ("counts", "dtype"), in_turn([((0, 0),), ((1,),), ((3, 0, 1, 70),), ((0, 0, 65),), ((64, 5),)])
)
def test_weight_gradients_are_added_to_their_sums(fused, counts, dtype):
    generator = torch.Generator().manual_seed(sum(counts))
    rows, height, width = sum(counts), 21, 259  # more than one tile of the wider side
    left = torch.randn(rows, height, generator=generator).to(dtype)
    right = torch.randn(rows, width, generator=generator).to(dtype)
    before = torch.randn(len(counts), height, width, generator=generator)
    ends = torch.tensor(counts).cumsum(0).int()
    exact = before.double()
    for expert, (one, other) in enumerate(zip(left.double().split(counts), right.double().split(counts), strict=True)):
        exact[expert] += one.t() @ other
    total = before.clone()
    fused.add_grouped_product(total, left, right, ends)
    # Products of half-precision numbers are exact in fp32; each of n additions rounds once.
    assert steps_apart(total, exact) <= 8 + max(counts)
    assert all(torch.equal(total[e], before[e]) for e, count in enumerate(counts) if not count)


@pytest.mark.parametrize(
    ("heads", "shared", "sequences", "dtype"), in_turn([(1, False, 1), (3, True, 2), (4, False, 3)])
)
def test_heads_are_joined_and_rotated(fused, heads, shared, sequences, dtype):
    generator = torch.Generator().manual_seed(heads)
    # Parts of wider tensors, as a projection's output is cut.
    rest = torch.randn(5, sequences, heads, 20, generator=generator).to(dtype)[..., 3:13]
    positional = torch.randn(5, sequences, 1 if shared else heads, 9, generator=generator).to(dtype)[..., 1:7]
    angles = torch.rand(5, 1, 1, 3, generator=generator) * 6
    tables = (angles.cos(), angles.sin())
    found = fused.join_positions(rest, positional, *tables)
    wanted = eager(mla.join_positions)(rest, positional, *tables)
    assert torch.equal(found[..., :10], rest) and steps_apart(found, wanted.double()) <= 2.01
    grad = torch.randn(found.shape, generator=generator).to(dtype)
    turned = fused.join_positions_backward(grad, *tables, 10, shared)
    exact = eager(mla.join_positions_backward)(grad, *tables, 10, shared)
    assert turned.shape == positional.shape
    assert steps_apart(turned, exact.double()) <= (8 if dtype == torch.float32 else 2.01)


@pytest.mark.parametrize(("width", "dtype"), in_turn([(1,), (50,), (4100,)]))
def test_the_statistics_and_the_gradient_of_a_tile(fused, width, dtype):
    generator = torch.Generator().manual_seed(width)
    tile = 4 * torch.randn(6, width, generator=generator)
    columns = torch.tensor([0, width - 1, -1, width, width // 2, -5])
    before = (torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 1, torch.zeros(6))
    found, exact = [one.clone() for one in before], [one.double() for one in before]
    fused.add_statistics(tile, columns, *found)
    eager(cross_entropy.add_statistics)(tile.double(), columns, *exact)
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one.double(), other, rtol=2e-6)
    grad = torch.rand(6, generator=generator)
    wide = eager(cross_entropy.gradient_of_tile)(tile.double(), columns, *exact[:2], grad.double(), torch.float64)
    narrow = fused.gradient_of_tile(tile, columns, *found[:2], grad, dtype)
    assert narrow.dtype == dtype and steps_apart(narrow, wide) <= (64 if dtype == torch.float32 else 1.05)
