"""Output layer and cross entropy in one: the plain path's losses and gradients, without its memory."""

import ctypes
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import linear_cross_entropy as benchmark
from megatron_moe.model import cross_entropy as fused
from megatron_moe.model.cross_entropy import cross_entropy, linear_cross_entropy
from megatron_moe.platform import cpu_half_gemm
from megatron_moe.precision.contract import PrecisionError
from tests.helpers.errors import relative

TOKENS, ROWS, WIDTH = 37, 50, 16
# Of one rounding to the dtype; fp32 has several sums as well.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def problem(dtype=torch.float32, tokens=TOKENS, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, ROWS, (tokens,), generator=generator)
    labels[:2] = torch.tensor([0, ROWS - 1])
    upstream = torch.rand(tokens, generator=generator) - 0.3
    return hidden, weight, labels, upstream


def results(loss_of, hidden, weight, labels, upstream):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = loss_of(hidden, weight, labels)
    losses.backward(upstream.to(losses.dtype))
    return losses.detach(), hidden.grad, weight.grad


def plain(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")


def exact(hidden, weight, labels, upstream):
    """The plain path in fp64 from the same numbers."""
    return results(plain, hidden.double(), weight.double(), labels, upstream)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, the last one shorter."""
    monkeypatch.setattr(fused, "BLOCK_ROWS", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_tokens", [None, 1, 8, 37, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_losses_and_gradients_are_those_of_the_logits(dtype, chunk_tokens):
    tensors = problem(dtype)
    got = results(partial(linear_cross_entropy, chunk_tokens=chunk_tokens), *tensors)
    wanted = exact(*tensors)
    assert got[0].dtype == torch.promote_types(dtype, torch.float32)
    assert got[1].dtype == got[2].dtype == dtype
    assert relative(got[0], wanted[0]) < min(TOLERANCE[dtype], 1e-6)  # logits are not rounded to half precision
    for name, tensor, reference in zip(("hidden", "weight"), got[1:], wanted[1:]):
        assert relative(tensor, reference) < TOLERANCE[dtype], name


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("vocab_size", [49, 33, 32, 7])  # in the last block, in others, between two
def test_rows_that_only_pad_the_vocabulary_take_no_part(vocab_size):
    hidden, weight, labels, upstream = problem()
    labels = labels % vocab_size
    got = results(partial(linear_cross_entropy, vocab_size=vocab_size), hidden, weight, labels, upstream)
    wanted = exact(hidden, weight[:vocab_size], labels, upstream)
    assert relative(got[0], wanted[0]) < 1e-6
    assert relative(got[1], wanted[1]) < TOLERANCE[torch.float32]
    assert relative(got[2][:vocab_size], wanted[2]) < TOLERANCE[torch.float32]
    assert (got[2][vocab_size:] == 0).all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_large_logits_neither_overflow_nor_lose_the_loss(scale):
    tensors = problem(scale=scale)
    got, wanted = results(linear_cross_entropy, *tensors), exact(*tensors)
    assert wanted[0].max() > 3 * scale
    for tensor, reference in zip(got, wanted):
        assert tensor.isfinite().all()
        assert relative(tensor, reference) < (1e-4 if scale < 1e3 else 1e-2)  # what fp32 logits of that size allow
    agreeing, _, labels, _ = problem(scale=scale)
    easy = torch.zeros(ROWS, WIDTH)
    easy[labels[0]] = agreeing[0]
    losses = linear_cross_entropy(agreeing[:1], easy, labels[:1])
    assert losses.item() == 0.0  # a logit of 1e5 and more beside zeros: log(1), not a difference of large numbers


def test_tokens_without_weight_have_no_gradient():
    hidden, weight, labels, upstream = problem()
    upstream[5:9] = 0
    _, grad_hidden, _ = results(linear_cross_entropy, hidden, weight, labels, upstream)
    assert grad_hidden.any(1).logical_not().nonzero().flatten().tolist() == [5, 6, 7, 8]
    nothing = results(linear_cross_entropy, hidden, weight, labels, torch.zeros_like(upstream))[1:]
    assert not any(gradient.any() for gradient in nothing)


@pytest.mark.usefixtures("small_blocks")
def test_a_frozen_weight_or_a_frozen_input_gets_no_gradient():
    hidden, weight, labels, upstream = problem()
    _, grad_hidden, grad_weight = results(linear_cross_entropy, hidden, weight, labels, upstream)
    only_hidden, only_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(only_hidden, weight, labels).backward(upstream)
    linear_cross_entropy(hidden, only_weight, labels).backward(upstream)
    assert torch.equal(only_hidden.grad, grad_hidden)
    assert torch.equal(only_weight.grad, grad_weight)


def test_a_nan_is_not_lost_and_no_token_is_no_error():
    hidden, weight, labels, upstream = problem()
    hidden[3, 0] = torch.nan
    losses, grad_hidden, grad_weight = results(linear_cross_entropy, hidden, weight, labels, upstream)
    assert losses.isnan().nonzero().flatten().tolist() == [3]
    assert grad_hidden[3].isnan().all()
    assert grad_weight.isnan().any()
    losses, grad_hidden, grad_weight = results(linear_cross_entropy, hidden[:0], weight, labels[:0], upstream[:0])
    assert losses.shape == (0,)
    assert not grad_weight.any()


def test_two_dtypes_are_refused_by_name():
    hidden, weight, labels, _ = problem()
    with pytest.raises(PrecisionError) as refusal:
        linear_cross_entropy(hidden.bfloat16(), weight, labels)
    for part in ("hidden states", "torch.bfloat16", "output_layer.weight", "torch.float32", "cast the hidden states"):
        assert part in str(refusal.value)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_loss_of_logits_keeps_them_alone_and_writes_their_gradient_over_them(dtype):
    _, _, labels, _ = problem()
    leaf = torch.randn(TOKENS, ROWS, generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
    logits, kept = leaf + 0, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.detach()) or x, lambda x: x):
        losses = cross_entropy(logits, labels)
    assert sorted(tensor.numel() for tensor in kept) == [TOKENS] * 3 + [logits.numel()]
    losses.sum().backward(retain_graph=True)
    assert torch.equal(logits, leaf.grad)


def test_a_second_backward_pass_through_overwritten_logits_is_refused():
    losses = cross_entropy(torch.randn(TOKENS, ROWS, requires_grad=True) + 0, problem()[2]).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()


def test_peak_memory_is_a_small_part_of_the_plain_paths_and_that_of_the_engines(one_process):
    plain = {precision: peak("plain", precision) for precision in ("fp32", "bf16")}
    # Without instructions for bf16, torch makes the logits in fp32, which are then as large as the engine's copy.
    share = 0.5 if cpu_half_gemm._has_instructions(torch.bfloat16) else 1.05
    assert plain["bf16"] <= share * peak("engine", "bf16")
    assert peak("fused", "fp32") <= plain["fp32"] / 8
    assert peak("fused", "bf16") <= plain["bf16"] / 4


def peak(way, precision):
    """Peak resident memory above weight and input, of 2,048 tokens and 16,000 rows."""
    losses = benchmark.CONTESTANTS[way]()
    if way == "fused":
        losses = partial(losses, chunk_tokens=64)
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    dtype = benchmark.DTYPES[precision]
    return benchmark.one_step(losses, 2048, 16_000, 64, dtype)[0]
