"""The router: what it counts, what it refuses, and that it serves the engine's own MoE layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_moe.moe.load_balance import EXACT_FP32_INTEGER
from megatron_moe.moe.router import RouterSnapshot
from tests.helpers.routers import router, tokens

pytestmark = pytest.mark.engine


def test_recomputation_counts_once() -> None:
    r = router()
    hidden = tokens().requires_grad_()
    probs = torch.utils.checkpoint.checkpoint(lambda x: r.route(x).probs, hidden, use_reentrant=True)
    assert r.local_tokens_per_expert.sum().item() == 0, "the pass without gradients is thrown away"
    probs.sum().backward()
    assert r.local_tokens_per_expert.sum().item() == 20


def test_an_observer_sees_the_passes_that_count_or_every_pass_and_only_within_its_block() -> None:
    r, hidden = router(), tokens()
    counted: list[Any] = []
    every: list[Any] = []
    with r.observed_by(lambda _, routed: every.append(routed), every_pass=True):
        with r.observed_by(lambda seen, routed: counted.append((seen, routed))):
            decision = r.route(hidden)
            with torch.no_grad():
                r.route(hidden)
        r.eval().route(hidden)
    r.train().route(hidden)
    ((seen, routed),) = counted
    assert seen is r and [one.counted for one in every] == [True, False, False]
    assert torch.equal(routed.decision.expert_ids, decision.expert_ids) and torch.equal(routed.logits, r.gate(hidden))


def test_route_runs_the_forward_pre_hook_in_which_ddp_waits_for_the_gathered_weight() -> None:
    r, hidden = router(), tokens()
    wanted, gathered = r.route(hidden).probs, r.weight.detach().clone()
    r.register_forward_pre_hook(lambda *_: setattr(r.weight, "data", gathered))
    r.weight.data = torch.full_like(gathered, float("nan"))
    assert torch.equal(r.route(hidden).probs, wanted)


def test_outside_a_run_each_token_of_a_micro_batch_has_the_same_share_of_the_auxiliary_loss() -> None:
    coeff, num_experts, hidden = 0.5, 8, tokens(12)
    r = router(
        moe_router_topk=3,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=coeff,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
    )
    decision = r.route(hidden)
    (0.0 * decision.probs.sum()).backward()  # the auxiliary loss alone
    # Switch Transformer, arXiv 2101.03961, eq. 4: E x sum of (share of the choices) x (mean probability).
    weight = r.weight.detach().double().requires_grad_()
    scores = torch.softmax(hidden.double() @ weight.T, dim=-1)
    shares = torch.bincount(decision.expert_ids.flatten(), minlength=num_experts) / decision.expert_ids.numel()
    (coeff * num_experts * (shares * scores.mean(dim=0)).sum()).backward()
    torch.testing.assert_close(r.weight.grad, weight.grad.float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_has_no_part_in_gradients_and_losses(score: str) -> None:
    hidden, upstream, found = tokens(), torch.randn(10, 2), []
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    for first, is_padding in ((3, None), (0, torch.arange(10) < 3)):
        r = router(moe_router_score_function=score, moe_router_enable_expert_bias=False, **options)
        (r.route(hidden[first:], is_padding).probs * upstream[first:]).sum().backward()
        found += [r.weight.grad, r.aux_losses.totals["aux_loss"]]
    torch.testing.assert_close(found[2:], found[:2])


def test_training_counts_every_valid_choice_once_and_an_evaluation_none() -> None:
    r = router()
    r.route(tokens(), torch.tensor([True] * 3 + [False] * 7))
    r.route(tokens())
    r.eval().route(tokens())
    assert r.local_tokens_per_expert.sum().item() == (7 + 10) * 2


def test_the_bias_chooses_and_never_weighs() -> None:
    r = router()
    before = r.route(tokens())
    r.expert_bias.copy_(torch.tensor([0.0] * 7 + [100.0]))
    after = r.route(tokens())
    assert (after.expert_ids == 7).any(dim=1).all()
    scores = torch.sigmoid(r.gate(tokens())).gather(1, after.expert_ids)
    torch.testing.assert_close(after.probs, scores / scores.sum(1, keepdim=True))
    assert not torch.equal(before.expert_ids, after.expert_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_computes_in_fp32_from_half_precision_storage(dtype: torch.dtype) -> None:
    r = router().to(dtype)
    hidden = tokens(dtype=dtype)
    assert r.weight.dtype == dtype
    assert torch.equal(r.gate(hidden), hidden.float() @ r.weight.float().T)
    assert r.route(hidden).probs.dtype == torch.float32
    assert router(moe_router_dtype="fp64").route(tokens()).probs.dtype == torch.float64


def test_the_gate_keeps_no_fp32_copy_of_the_hidden_states() -> None:
    gate, hidden = router().bfloat16(), tokens(64, torch.bfloat16).requires_grad_()
    kept: list[torch.dtype] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = gate.gate(hidden)
    assert kept == [torch.bfloat16] * 2
    grad = torch.randn(logits.shape)
    logits.backward(grad)
    wide = [hidden.detach().clone().requires_grad_(), gate.weight.detach().clone().requires_grad_()]
    torch.nn.functional.linear(wide[0].float(), wide[1].float()).backward(grad)
    assert torch.equal(hidden.grad, wide[0].grad) and torch.equal(gate.weight.grad, wide[1].grad)


def test_a_count_that_could_be_rounded_is_refused() -> None:
    r = router()
    r.step.num_tokens = EXACT_FP32_INTEGER - 5
    with pytest.raises(OverflowError, match="--global-batch-size"):
        r.route(tokens())


def test_a_replay_of_the_recorded_operations_counts_again() -> None:
    r = router()
    replay = make_fx(lambda hidden: r.route(hidden).probs)(tokens())
    r.reset_counts()
    r.route(tokens())
    counts = r.local_tokens_per_expert.clone()
    replay(tokens())
    assert r.local_num_tokens.item() == 20 and torch.equal(r.local_tokens_per_expert, 2 * counts)


def test_a_snapshot_undoes_a_step_and_drops_its_counts() -> None:
    r = router()
    r.expert_bias.copy_(torch.linspace(-1, 1, 8) / 3)
    before = r.expert_bias.clone()
    snapshot = RouterSnapshot.capture([r])
    r.route(tokens())
    r.expert_bias += 0.001
    snapshot.restore()
    assert torch.equal(r.expert_bias, before)
    assert r.local_tokens_per_expert.sum().item() == 0 and r.step.num_tokens == 0


def test_the_engines_protocol_gives_the_same_decision_in_dense_form() -> None:
    r = router().eval()
    hidden = tokens(12)
    padding = torch.tensor([[False, True]] * 6)
    probs, routing_map = r(hidden.view(6, 2, 16), padding)
    decision = r.route(hidden, padding.flatten())
    assert probs.shape == routing_map.shape == (12, 8)
    assert torch.equal(probs.gather(1, decision.expert_ids), decision.probs)
    assert routing_map.sum(1).tolist() == [2, 0] * 6
