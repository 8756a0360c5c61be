"""Context parallelism in one process: where tokens lie, their positions, and what a rank holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from megatron_moe.model.context_parallel import attend_chunks, chunk_gradients
from megatron_moe.model.rotary import Rotary
from megatron_moe.parallel.sequence import by_rank, context_parallel_slice, holder, in_order
from tests.model.test_attention import WIDTHS

SCALE = 0.3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_by_rank_and_in_order_are_each_others_inverse_and_a_position_is_with_its_holder(size):
    rows = torch.arange(48).view(24, 2)
    parts = torch.cat([context_parallel_slice(rows, rank, size, dim=0) for rank in range(size)])
    assert torch.equal(by_rank(rows, size), parts) if size > 1 else True
    assert torch.equal(in_order(parts, size), rows)
    for position in range(24):
        rank, index = holder(position, 24, size)
        assert context_parallel_slice(torch.arange(24), rank, size)[index] == position


def test_a_sequence_without_equal_chunks_is_refused():
    with pytest.raises(ValueError, match="sequence of 10 has no 2 x CP = 4"):
        context_parallel_slice(torch.arange(10), 0, 2)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_latent_attention_rotates_a_rank_s_rows_for_their_positions_in_the_whole_sequence(rank):
    config = SimpleNamespace(qk_pos_emb_head_dim=8, rotary_percent=1.0, rotary_base=100.0, rope_type="rope")
    x = torch.randn(24, 2, 3, 8)
    wanted = context_parallel_slice(Rotary(config)(x), rank, 4, dim=0)
    assert torch.equal(Rotary(config, rank, 4)(context_parallel_slice(x, rank, 4, dim=0)), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's kernels")
def test_chunks_of_one_token_add_up_to_the_gradients_of_the_sequence():
    query, key, value, grad = whole = torch.randn(4, 1, 2, 6, 8).unbind()
    wanted = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    F.scaled_dot_product_attention(*wanted, is_causal=True, scale=SCALE).backward(grad)
    keys, values = torch.zeros_like(key), torch.zeros_like(value)
    for rank in range(3):
        own, upstream, grad_query = (
            context_parallel_slice(one, rank, 3, dim=2) for one in (query, grad, wanted[0].grad)
        )
        results = attend_chunks(own, key, value, SCALE, rank, 3)
        found = chunk_gradients(upstream, own, key, value, *results, SCALE, rank, 3)
        torch.testing.assert_close(found[0], grad_query)
        keys, values = keys + found[1], values + found[2]
    torch.testing.assert_close((keys, values), (wanted[1].grad, wanted[2].grad))


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's kernels")
def test_a_rank_holds_no_score_matrix():
    """Neither of the whole sequence nor of its own queries."""
    length, (n, g, dk, dv) = 1024, WIDTHS["latent"]
    query, grad = torch.randn(1, n, length // 2, dk), torch.randn(1, n, length // 2, dv)
    key, value = torch.randn(1, g, length, dk), torch.randn(1, g, length, dv)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        context, logsumexp = attend_chunks(query, key, value, SCALE, 1, 2)
        chunk_gradients(grad, query, key, value, context, logsumexp, SCALE, 1, 2)
    assert max(event.cpu_memory_usage for event in trace.events()) < length // 2 * length * n
