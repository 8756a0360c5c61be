"""The fused loss with the vocabulary split over ranks, alone and inside the whole model: the plain path's numbers."""

import itertools
from unittest import mock

import pytest
import torch

import megatron_moe.model.cross_entropy as fused_loss
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.model.loss import OutputLayerWithLoss
from megatron_moe.parallel import groups
from tests.helpers.errors import relative
from tests.helpers.rows import rows
from tests.model import mtp_cases
from tests.model import test_build_ranks as layouts

TOKENS, ROWS, WIDTH = 24, 40, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


# The whole vocabulary, one that is padded, and one whose padding is all that the second rank has.
CASES = list(itertools.product(TOLERANCE, (False, True), (ROWS, 33, 18)))


def losses_and_gradients_of_all():
    tp = groups.initialize(replace(Run(), tensor_model_parallel_size=2)).tp
    return {case: losses_and_gradients(tp, *case) for case in CASES}


def losses_and_gradients(tp, dtype, sequence_parallel, vocab_size):
    """Of the output layer, fused and plain: per rank (losses, gradient of its hidden states, of its rows)."""
    run = replace(Run(), tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, hidden_size=WIDTH)
    hidden, weight, labels, upstream = problem(dtype, vocab_size)
    layer = OutputLayerWithLoss(
        WIDTH, ROWS, config=transformer_config(run), init_method=None, bias=False, skip_bias_add=False, tp_group=tp
    ).to(dtype)
    layer.chunk_tokens, layer.vocab_size = 7, vocab_size
    found = []
    for path in ("fused", "plain"):
        layer.weight.data.copy_(weight.chunk(2)[tp.rank()])
        layer.weight.grad = None
        own = (hidden.chunk(2)[tp.rank()] if sequence_parallel else hidden).clone().requires_grad_()
        if path == "fused":
            with mock.patch.object(fused_loss, "BLOCK_ROWS", 8):  # which the next case of this rank has as it was
                losses, _ = layer(own, labels=labels)
                losses.backward(upstream)
        else:
            with mock.patch.dict(fused_loss._NUMBERS_OF_TILE, {"on a CPU": 3 * ROWS}):
                logits = layer(own)[0].flatten(0, 1)
                losses = fused_loss.cross_entropy(logits, labels.t().reshape(-1), tp).view(-1, 2).t()
                losses.backward(upstream)
        found.append((losses.detach(), own.grad, layer.weight.grad))
    return found


def problem(dtype, vocab_size):
    """hidden [S, B, H], weight, labels [B, S] with the last token and one that does not exist, upstream [B, S]."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS // 2, 2, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, vocab_size, (2, TOKENS // 2), generator=generator)
    labels[0, :3] = torch.tensor([vocab_size - 1, vocab_size // 2, -1])
    upstream = torch.rand(2, TOKENS // 2, generator=generator)
    upstream[0, 2] = 0
    return hidden, weight, labels, upstream


def exact(dtype, vocab_size):
    hidden, weight, labels, upstream = problem(dtype, vocab_size)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = torch.nn.functional.linear(hidden, weight[:vocab_size]).permute(1, 2, 0)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
    losses.backward(upstream.double())
    return losses.detach(), hidden.grad, weight.grad


def assert_near(got, wanted, tolerance):
    """Relative to the whole of it; where all of it has to be zero, it is."""
    assert torch.equal(got == 0, wanted == 0) or wanted.any()
    assert not wanted.any() or relative(got, wanted) < tolerance


@pytest.mark.parametrize(("dtype", "sequence_parallel", "vocab_size"), CASES)
def test_a_split_vocabulary_has_the_losses_and_gradients_of_a_whole_one(once, dtype, sequence_parallel, vocab_size):
    losses, grad_hidden, grad_weight = exact(dtype, vocab_size)
    counted = problem(dtype, vocab_size)[2] >= 0
    for rank, results in enumerate(once(2, losses_and_gradients_of_all)):
        fused, plain = results[dtype, sequence_parallel, vocab_size]
        own = grad_hidden.chunk(2)[rank] if sequence_parallel else grad_hidden
        for found, tolerance in ((fused, 1), (plain, 3)):
            assert relative(found[0][counted], losses[counted]) < tolerance * min(TOLERANCE[dtype], 2e-3 * tolerance)
            assert relative(found[1], own) < tolerance * TOLERANCE[dtype]
            assert_near(found[2], grad_weight.chunk(2)[rank], tolerance * TOLERANCE[dtype])
        assert relative(fused[0][counted], losses[counted]) < 1e-6
        assert relative(fused[0], plain[0]) < 2e-2  # what no row stands for is the same in both


UNTIED, TIED = "dense mla", layouts.TIED
IN_A_MODEL = [
    (UNTIED, 1, {}),
    (TIED, 1, {}),
    (UNTIED, 2, layouts.TP2),
    (UNTIED, 2, layouts.SP2),
    (TIED, 2, layouts.SP2),
    (TIED, 2, layouts.PP2),
    ("experts", 2, layouts.VPP2),
]


@layouts.over(IN_A_MODEL, test=[(TIED, 2, layouts.SP2), ("experts", 2, layouts.VPP2)])
def test_a_model_has_the_loss_gradients_and_norm_of_one_rank_without_it(once, model, ranks, layout):
    layouts.agrees(once, model, ranks, {**layout, "cross_entropy_loss_fusion": True, "cross_entropy_chunk_tokens": 5})


@pytest.mark.parametrize("precision", rows(["fp32", "bf16"], test=["fp32"]))
def test_a_run_learns_as_without_it_while_weights_are_gathered_in_the_background(gloo, precision):
    run = replace(Run(), **{**layouts.MODELS[UNTIED], **layouts.OVERLAPPED, "lr": 5e-3, "init_method_std": 0.02})
    run = replace(run, bf16=precision == "bf16")
    plain, fused = (
        gloo.run(2, mtp_cases.steps, run=replace(run, cross_entropy_loss_fusion=fusion), count=3)[0]["losses"]
        for fusion in (False, True)
    )
    assert fused == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 1e-2)  # bf16: of its logits
    assert fused[-1] < fused[0] - 0.2
