"""The attention of each context-parallel rank, one after the other in one process, against softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_moe.model.context_parallel import attend_chunks, chunk_gradients
from megatron_moe.model.rotary import Rotary
from megatron_moe.parallel.sequence import by_rank, context_parallel_slice, holder, in_order
from tests.helpers.errors import largest, relative
from tests.model.test_attention import WIDTHS, inputs, reference

SCALE = 0.3


def heads(tensor):
    """[S, B, h, d] -> [B, h, S, d]."""
    return tensor.detach().permute(1, 2, 0, 3)


def over_ranks(query, key, value, grad, size):
    """Context and gradients [S, B, h, d] in the sequence's order, put together from what each rank computes."""
    query, key, value, grad = (heads(tensor) for tensor in (query, key, value, grad))
    contexts, grad_queries, grad_keys, grad_values = [], [], [], []
    for rank in range(size):
        own = context_parallel_slice(query, rank, size, dim=2)
        context, logsumexp = attend_chunks(own, key, value, SCALE, rank, size)
        contexts.append(context)
        own_grad = context_parallel_slice(grad, rank, size, dim=2)
        shares = chunk_gradients(own_grad, own, key, value, context, logsumexp, SCALE, rank, size)
        for found, share in zip((grad_queries, grad_keys, grad_values), shares):
            found.append(share)
    rows = [
        in_order(torch.cat([part.permute(2, 0, 1, 3) for part in found]), size) for found in (contexts, grad_queries)
    ]
    return [*rows, *(sum(found).permute(2, 0, 1, 3) for found in (grad_keys, grad_values))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_the_ranks_together_have_the_output_and_gradients_of_the_whole_sequence(widths, size, dtype):
    """Half-precision operands are exact in fp32, so one bound holds for all."""
    ours = inputs(widths, dtype)
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    wanted = reference(*theirs, scale=SCALE).unflatten(2, (widths[0], widths[3]))
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted.backward(grad.double())
    found = over_ranks(*ours, grad, size)
    assert largest(map(relative, found, (wanted, *(tensor.grad for tensor in theirs)))) < 1e-6


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_by_rank_and_in_order_are_each_others_inverse(size):
    rows = torch.arange(48).view(24, 2)
    parts = torch.cat([context_parallel_slice(rows, rank, size, dim=0) for rank in range(size)])
    assert torch.equal(by_rank(rows, size), parts) if size > 1 else True
    assert torch.equal(in_order(parts, size), rows)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_holder_of_a_position_has_it_there(size):
    for position in range(24):
        rank, index = holder(position, 24, size)
        assert context_parallel_slice(torch.arange(24), rank, size)[index] == position


def test_a_sequence_without_equal_chunks_is_refused():
    with pytest.raises(ValueError, match="sequence of 10 has no 2 x CP = 4"):
        context_parallel_slice(torch.arange(10), 0, 2)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_latent_attention_rotates_a_rank_s_rows_for_their_positions_in_the_whole_sequence(rank):
    from types import SimpleNamespace

    config = SimpleNamespace(qk_pos_emb_head_dim=8, rotary_percent=1.0, rotary_base=100.0, rope_type="rope")
    x = torch.randn(24, 2, 3, 8)
    wanted = context_parallel_slice(Rotary(config)(x), rank, 4, dim=0)
    assert torch.equal(Rotary(config, rank, 4)(context_parallel_slice(x, rank, 4, dim=0)), wanted)


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
