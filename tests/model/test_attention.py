"""The core attention against a plain fp32 reference, and the shapes and settings it refuses."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.profiler import ProfilerActivity, profile

from megatron_moe.config.schema import Run
from megatron_moe.model.attention import MeasuredCoreAttention, SDPACoreAttention, largest_logits
from megatron_moe.parallel import groups
from tests.helpers.errors import relative

# (query heads, key/value heads, key width, value width)
WIDTHS = {
    "multi-head": (4, 4, 16, 16),
    "grouped": (4, 2, 16, 16),
    "latent": (4, 4, 24, 16),
    "wide values": (4, 2, 8, 24),
}


def core_attention(scale=None, kind=SDPACoreAttention, mask=AttnMaskType.causal, pg_collection=None, **config):
    ranks = 1 if pg_collection is None else pg_collection.cp.size()
    plain = {"softmax_type": "vanilla", "window_size": None, "attention_dropout": 0.0, "sequence_parallel": False}
    config = {"context_parallel_size": ranks, **plain, **config}
    return kind(SimpleNamespace(**config), 1, mask, softmax_scale=scale, pg_collection=pg_collection)


def inputs(widths, dtype, length=24, batch=2):
    n, g, dk, dv = widths
    torch.manual_seed(0)
    shapes = ((length, batch, n, dk), (length, batch, g, dk), (length, batch, g, dv))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def reference(query, key, value, scale, window=None, sinks=None):
    query, key, value = (tensor.double() for tensor in (query, key, value))
    times = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    places = torch.arange(scores.shape[-1])
    before = places.unsqueeze(1) - places
    scores = scores.masked_fill((before < 0) | (before > (len(places) if window is None else window)), float("-inf"))
    if sinks is None:
        return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).flatten(2)
    beside = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


ALONE = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_windows_and_sinks_agree_with_the_reference(kind, dtype, bound):
    sizes = {"num_attention_heads": 4, "tensor_model_parallel_size": 1, "params_dtype": dtype, "softmax_type": kind}
    for name, window in ((name, window) for name in WIDTHS for window in (None, 1, 5, 7, 22, 23, 40)):
        windows = {"window_size": None if window is None else (window, 0), "window_attn_skip_freq": [1]}
        attention = core_attention(0.4, pg_collection=ALONE, **sizes, **windows)
        ours, theirs = inputs(WIDTHS[name], dtype), inputs(WIDTHS[name], dtype)
        sinks = torch.zeros(4) if kind == "off-by-one" else None
        if kind == "learnable":
            torch.nn.init.normal_(attention.softmax_offset, std=2.0)
            sinks = attention.softmax_offset.detach().clone().requires_grad_()
            ours, theirs = [*ours, attention.softmax_offset], [*theirs, sinks]
        output, wanted = attention(*ours[:3]), reference(*theirs[:3], 0.4, window, sinks)
        grad = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
        output.backward(grad)
        wanted.backward(grad.double())
        assert output.dtype == dtype and relative(output, wanted) < bound, (name, window)
        for got, want in zip(ours, theirs):
            assert got.grad.dtype == dtype and relative(got.grad, want.grad) < bound, (name, window)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_output_and_gradients_agree_with_the_reference(widths, dtype, bound):
    ours, theirs = inputs(widths, dtype), inputs(widths, dtype)
    scale = None if dtype == torch.float32 else 0.4
    output, wanted = core_attention(scale)(*ours), reference(*theirs, scale=scale or widths[2] ** -0.5)
    grad = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
    output.backward(grad)
    wanted.backward(grad.double())
    assert output.dtype == dtype
    assert output.shape == (24, 2, widths[0] * widths[3])
    assert relative(output, wanted) < bound
    for got, want in zip(ours, theirs):
        assert relative(got.grad, want.grad) < bound


@pytest.mark.parametrize(("widths", "dtype"), [("grouped", torch.float32), ("latent", torch.bfloat16)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's kernels")
def test_no_score_matrix_is_held(widths, dtype):
    """The flash kernel is taken in both directions, and no single allocation is as large as a score matrix."""
    widths, length, batch = WIDTHS[widths], 512, 1
    tensors = inputs(widths, dtype, length, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        core_attention()(*tensors).sum().backward()
    names = {event.key for event in trace.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names
    assert "aten::bmm" not in names
    assert max(event.cpu_memory_usage for event in trace.events()) < length * length * widths[0] * batch


def test_dropout_acts_in_training_only(one_process):
    groups.initialize(Run())
    groups.seed_everything(Run())
    tensors = [tensor.detach() for tensor in inputs(WIDTHS["latent"], torch.float32)]
    attention = core_attention(attention_dropout=0.5)
    assert not torch.equal(attention(*tensors), attention(*tensors))
    attention.eval()
    assert relative(attention(*tensors), reference(*tensors, scale=24**-0.5)) < 1e-6


def test_masks_and_context_parallelism_without_its_group_are_refused():
    with pytest.raises(ValueError, match="pg_collection"):
        core_attention(context_parallel_size=2)
    tensors = inputs(WIDTHS["multi-head"], torch.float32)
    with pytest.raises(ValueError, match="attention_mask"):
        core_attention()(*tensors, torch.zeros(1, 1, 24, 24, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal only"):
        core_attention(mask=AttnMaskType.padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's kernels take half precision as it is")
def test_half_precision_operands_are_kept_as_they_are_and_the_numbers_are_those_of_wide_copies(widths, dtype):
    kept: list[torch.Tensor] = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    ours, theirs = inputs(widths, dtype), inputs(widths, dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = core_attention(scale=0.3)(*ours)
    wide = [tensor.float() for tensor in theirs]
    wanted = core_attention(scale=0.3)(*wide).to(dtype)
    assert torch.equal(output, wanted)
    grad = torch.randn(output.shape).to(dtype)
    output.backward(grad)
    wanted.backward(grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))
    wide_and_large = [tensor for tensor in kept if tensor.dim() == 4 and tensor.dtype == torch.float32]
    assert len(wide_and_large) == 1  # the context


def largest_scores(query, key, scale, first=0):
    """The largest entry of each head's whole score matrix, of queries that begin at a position."""
    query, key = query.detach().double(), key.detach().double().repeat_interleave(query.shape[2] // key.shape[2], 2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + first)
    return scores.masked_fill(later, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("at_a_time", [1, 50, 300, 2000, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", ["grouped", "latent"])
def test_the_largest_logits_are_found_in_pieces_of_any_size_and_not_rounded(widths, dtype, at_a_time):
    query, key, _ = inputs(WIDTHS[widths], dtype, length=37)
    found = largest_logits(query, key, 0.3, at_a_time=at_a_time)
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.double(), largest_scores(query, key, 0.3), rtol=1e-5, atol=0)
    later = largest_logits(query[20:30], key, 0.3, first=20, at_a_time=at_a_time)
    torch.testing.assert_close(later.double(), largest_scores(query[20:30], key, 0.3, first=20), rtol=1e-5, atol=0)


@pytest.mark.parametrize("at_a_time", [1, 20, 10**6])
def test_no_logit_of_a_later_key_is_found(at_a_time):
    query, next_one = torch.eye(9), torch.diag(torch.full((8,), 100.0), -1)
    found = largest_logits(query.view(9, 1, 1, 9), (query + next_one).view(9, 1, 1, 9), 1.0, at_a_time=at_a_time)
    assert found.tolist() == [1.0]
    below_zero = largest_logits(torch.ones(5, 1, 2, 4), -torch.ones(5, 1, 2, 4), None, at_a_time=at_a_time)
    assert below_zero.tolist() == [-2.0, -2.0]


def test_a_measured_attention_keeps_the_largest_logits_of_passes_that_are_differentiated():
    measured, widths = core_attention(kind=MeasuredCoreAttention), WIDTHS["grouped"]
    query, key, value = inputs(widths, torch.float32)
    plain = core_attention()(query, key, value)
    with torch.no_grad():
        measured(query, key, value)
    measured.eval()(query, key, value)
    assert measured.largest_logits is None
    assert torch.equal(measured.train()(query, key, value), plain)
    first = measured.largest_logits.clone()
    torch.testing.assert_close(first.double(), largest_scores(query, key, widths[2] ** -0.5), rtol=1e-5, atol=0)
    measured(0.5 * query, key, value)
    assert torch.equal(measured.largest_logits, first)
    measured(2.0 * query, key, value)
    torch.testing.assert_close(measured.largest_logits, 2 * first)
    assert "largest_logits" not in measured.state_dict() and not list(measured.buffers())
