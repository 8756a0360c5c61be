"""The engine's router and its balancing: each known defect shows in the engine's own code, and not in ours.

Where a defect was fixed in a release, the table in megatron_moe/platform says so, and these tests hold the table to it.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.module import Float16Module as EngineFloat16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter as EngineRouter

from megatron_moe import Float16Module, TopKRouter
from megatron_moe.config import rules
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.moe.load_balance import updated_expert_bias
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.parallel import groups
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.training.finalize_model_grads import update_routers
from tests.engine.stock import (
    BF16,
    SP2,
    attached_gradient,
    both_routers,
    engine_logged,
    one_hot_logits,
    our_loss,
    present,
    router_config,
)

pytestmark = pytest.mark.engine

BIAS = {"moe_router_enable_expert_bias": True}
RATE = 1e-3


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-5, abs=1e-7)


# ---- E1, E2, E19: fp32 state in a bf16 model


def rounded_state(router: Any, wrapper: Any) -> tuple[Any, float, float]:
    """The wrapped router, a bias of it that was loaded before, and its count of 257 tokens for expert 0 of 4."""
    router.expert_bias.copy_(torch.tensor([0.1234567, 0.0, 0.0, 0.0]))
    wrapped = wrapper(router.config, router)
    router(one_hot_logits([0], 4))
    kept = router.expert_bias[0].item()
    (getattr(router, "reset_counts", None) or router.local_tokens_per_expert.zero_)()
    router.expert_bias.zero_()
    router(one_hot_logits([0] * 257, 4))
    return wrapped, kept, router.local_tokens_per_expert[0].item()


def test_counts_steps_and_loaded_biases_are_rounded_to_bf16(pg):
    stock, ours = both_routers(pg, 4, **BIAS, **BF16)
    theirs, their_bias, their_count = rounded_state(stock, EngineFloat16Module)
    wrapped, bias, count = rounded_state(ours, Float16Module)
    _update_router_expert_bias([theirs], stock.config)
    update_routers([wrapped])
    learnt, rate = torch.tensor([0.1234567, RATE]).tolist()
    assert (count, ours.expert_bias[1].item(), bias) == (257, rate, learnt)
    assert present("E1") == (their_count == 256)
    assert present("E2") == close(stock.expert_bias[1].item(), 0.0009994507)
    assert present("E19") == (their_bias != learnt)


# ---- E4, E5, E12: padding


@pytest.mark.parametrize("num_experts", [4, 6])
def test_padding_masks_experts_where_there_are_as_many_as_tokens_and_crashes_elsewhere(pg, num_experts):
    """True is padding, in the engine's code as in ours, whatever its documentation says (E5)."""
    stock, ours = both_routers(pg, num_experts, **BIAS)
    hidden, is_padding = one_hot_logits([0, 0, 1, 2], num_experts), torch.tensor([[True], [False], [False], [False]])
    ours(hidden, padding_mask=is_padding)
    assert ours.local_tokens_per_expert.tolist() == [1, 1, 1] + [0] * (num_experts - 3)
    try:
        stock(hidden, padding_mask=is_padding)
        defect = stock.local_tokens_per_expert.tolist() == [0, 1, 1, 0]
    except RuntimeError as error:
        defect = num_experts == 6 and "must match the size" in str(error)
    assert present("E4") == defect and present("E5")


def counts_after_a_sum() -> dict[str, Any]:
    """What is left of 3 tokens on rank 0 and 5 on rank 1 after the sum over both."""
    pg = groups.initialize(replace(Run(), **SP2))
    mine = 3 + 2 * dist.get_rank()
    routing_map = torch.ones(mine, 1, dtype=torch.bool)
    _, local, total = moe_utils.get_tokens_per_expert_and_token_count(routing_map, pg.tp_cp, 1, with_padding_mask=True)
    counts = torch.tensor([mine])
    summed = all_reduce_sum(counts, pg.tp_cp)
    return {"stock": (int(local), int(total)), "ours": (counts.item(), summed.item()), "right": (mine, 8)}


def test_local_counts_are_overwritten_by_their_sum_over_ranks(gloo):
    for rank in gloo.run(2, counts_after_a_sum):
        assert rank["ours"] == rank["right"]
        assert present("E12") == (rank["stock"] == (8, 8)) and rank["stock"][1] == 8


# ---- E7, E8: the weight of auxiliary losses with a loss per token


def per_token_ratio(**losses: Any) -> dict[str, float]:
    """Gradient of the attached loss with a loss per token, over the one without, after both are normalised."""
    pg = groups.initialize(replace(Run(), **SP2))
    hidden = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(5))
    mine = hidden.chunk(2)[dist.get_rank()]
    norms: dict[str, list[float]] = {"stock": [], "ours": []}
    for per_token in (False, True):
        routers = both_routers(pg, 4, calculate_per_token_loss=per_token, **SP2, **losses)
        for name, router in zip(norms, routers):
            gradient = attached_gradient(router, mine)
            dist.all_reduce(gradient, group=pg.tp)
            norms[name].append((gradient / (16 if per_token else 1)).norm().item())
    return {name: found[1] / found[0] for name, found in norms.items()}


@pytest.mark.parametrize(
    "losses",
    [{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, {"moe_z_loss_coeff": 0.1}],
    ids=["aux_loss", "z_loss"],
)
def test_with_a_loss_per_token_attached_losses_are_divided_by_the_ranks(gloo, losses):
    for ratio in gloo.run(2, per_token_ratio, **losses):
        assert close(ratio["ours"], 1.0)
        assert close(ratio["stock"], 0.5 if present("E7") else 1.0)


def test_a_sequences_loss_weighs_less_in_a_larger_micro_batch(pg):
    """E8: the gradient of a per-token seq_aux_loss of two sequences at once, over that of one after the other."""
    hidden = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(6))
    losses = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    ratios = []
    for router in both_routers(pg, 4, calculate_per_token_loss=True, **losses):
        at_once = attached_gradient(router, hidden)
        one_by_one = attached_gradient(router, hidden[:, :1]) + attached_gradient(router, hidden[:, 1:])
        ratios.append((at_once.norm() / one_by_one.norm()).item())
    assert close(ratios[1], 1.0) and close(ratios[0], 0.5 if present("E8") else 1.0)


# ---- E9, E10, E11: what is logged, in which dtype, of which decision


def logged_z_loss() -> dict[str, float]:
    pg = groups.initialize(Run())
    hidden = torch.full((4, 1, 4), float(dist.get_rank()))
    stock, ours = both_routers(pg, 4, moe_z_loss_coeff=0.1)
    stock(hidden)
    ours(hidden)
    local = torch.logsumexp(hidden, -1).square().mean()
    mean = local.clone()
    dist.all_reduce(mean)
    return {
        "stock": engine_logged("z_loss", pg),
        "ours": our_loss(ours, "z_loss"),
        "local": local.item(),
        "mean": mean.item() / 2,
    }


def test_the_logged_z_loss_is_one_ranks(gloo):
    for rank in gloo.run(2, logged_z_loss):
        assert close(rank["ours"], rank["mean"]) and not close(rank["local"], rank["mean"])
        assert close(rank["stock"], rank["local"] if present("E9") else rank["mean"])


def test_sigmoid_scores_of_the_loss_have_the_dtype_of_the_logits(pg):
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(7)).bfloat16()
    _, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 1, "sigmoid")
    assert present("E10") == (scores.dtype == torch.bfloat16)
    _, ours = both_routers(pg, 4, **BF16)
    assert Float16Module(ours.config, ours).module.gate(logits).dtype == torch.float32


def test_the_loss_balances_a_decision_that_is_not_dispatched(pg):
    """E11: a bias sends all tokens to expert 0, the scores alone would send each to another."""
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    stock, ours = both_routers(pg, 4, **BIAS, **losses)
    hidden = one_hot_logits([0, 1, 1, 1], 4)
    for router in (stock, ours):
        router.expert_bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
        router(hidden)
        assert router.local_tokens_per_expert.tolist() == [4, 0, 0, 0]
    scores = torch.sigmoid(hidden[:, 0])
    means = (scores / scores.sum(-1, keepdim=True)).mean(0)
    dispatched, undispatched = (
        float(4 * (torch.tensor(shares) * means).sum()) for shares in ([1.0, 0, 0, 0], [0.25, 0.75, 0, 0])
    )
    assert close(our_loss(ours, "aux_loss"), dispatched) and not close(dispatched, undispatched)
    assert close(engine_logged("load_balancing_loss", pg), undispatched if present("E11") else dispatched)


# ---- E15, E18, E20, E21, E22: the bias


def repeated_step() -> dict[str, float]:
    """A step that the engine's rerun machine repeats for its odd loss; ours with a snapshot before the repetition."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine, initialize_rerun_state_machine

    stock, ours = both_routers(groups.initialize(Run()), 4, **BIAS)
    hidden = one_hot_logits([0, 0, 0, 1], 4)
    initialize_rerun_state_machine(
        state_save_func=lambda: {"rng": torch.get_rng_state()},
        state_restore_func=lambda state: torch.set_rng_state(state["rng"]),
        mode=RerunMode.VALIDATE_RESULTS,
    )
    machine, passes = get_rerun_state_machine(), 0
    while machine.should_run_forward_backward(None):
        pass  # it judges no result of the first step
    machine.should_checkpoint_and_exit()
    while machine.should_run_forward_backward(None):
        passes += 1
        stock(hidden)
        _update_router_expert_bias([stock], stock.config)
        stock.local_tokens_per_expert.zero_()
        machine.validate_result(torch.tensor(1.0), rejection_func=lambda loss: True, message="odd", fatal=False)
    snapshot = RouterSnapshot.capture([ours])
    for _ in range(2):
        snapshot.restore()
        ours(hidden)
        update_routers([ours])
    return {"passes": passes, "stock": stock.expert_bias[0].item(), "ours": ours.expert_bias[0].item()}


def test_a_repeated_step_moves_the_bias_again(gloo):
    (found,) = gloo.run(1, repeated_step)
    assert found["passes"] == 2 and close(found["ours"], -RATE)
    assert close(found["stock"], -2 * RATE if present("E15") else -RATE)


def test_the_engines_router_asks_for_a_gpu(monkeypatch, pg):
    def no_gpu() -> Any:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.cuda, "current_device", no_gpu)  # as torch has it where there is none
    assert TopKRouter(router_config(4, **BIAS), pg).expert_bias.device.type == "cpu"
    assert present("E18")
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        EngineRouter(router_config(4, **BIAS), pg)


def test_a_bias_with_softmax_scores_is_refused_by_the_engine_and_chooses_here():
    """A megatron-core program that our router is plugged into still meets the engine's refusal."""
    assert present("E20")
    with pytest.raises(ValueError, match="[Ee]xpert bias"):
        router_config(4, **BIAS, moe_router_score_function="softmax")
    run = replace(Run(), num_experts=4, moe_router_enable_expert_bias=True, vocab_size=8)
    rules.check_model(run, 1)
    router = TopKRouter(transformer_config(run), options=MoEOptions.from_run(run))
    router.weight.data.zero_()
    router.expert_bias.copy_(torch.tensor([0.0, 0.3, 0.1, 0.2]))
    assert router.route(torch.randn(5, 256)).expert_ids.tolist() == [[1, 3]] * 5


def test_layers_with_unequal_numbers_of_experts_crash_the_update(pg):
    pairs = [both_routers(pg, experts, **BIAS) for experts in (4, 6)]
    stock, ours = (torch.nn.ModuleList(routers) for routers in zip(*pairs))
    for router in (*stock, *ours):
        router(one_hot_logits([0, 0, 1], router.config.num_moe_experts))
    assert present("E21")
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        _update_router_expert_bias([stock], pairs[0][0].config)
    update_routers([ours])
    for bias in (router.expert_bias.tolist() for router in ours):
        assert [round(value / RATE) for value in bias] == [-1, -1] + [1] * (len(bias) - 2)


def test_the_mean_of_the_bias_drifts_unless_it_is_centred(pg):
    counts, zeros = torch.tensor([1, 1, 1, 5]), torch.zeros(4)
    (stock,) = moe_utils.get_updated_expert_bias(counts.float()[None], zeros[None], RATE)
    assert present("E22") == close(stock.mean().item(), RATE / 2)
    assert abs(updated_expert_bias(zeros, counts, RATE, center=True).mean().item()) < 1e-10


# ---- capacity, sinkhorn, jitter and the global loss


GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}


def limited(pg: Any, num_experts: int = 4, **changes: Any) -> tuple[Any, Any]:
    """Both routers, whose experts have room for their even share."""
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"}
    return both_routers(pg, num_experts, **capacity, **changes)


def test_counters_of_the_global_loss_stop_at_256_micro_batches(pg: Any) -> None:
    """E3: the 257th micro-batch of a step in bf16, with all tokens alike."""
    stock, ours = both_routers(pg, 4, **GLOBAL, **BF16)
    wrapped = EngineFloat16Module(stock.config, stock), Float16Module(ours.config, ours)
    stock.ga_steps.fill_(256)
    wrapped[0](torch.zeros(4, 1, 4))
    for _ in range(257):
        ours(torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    assert present("E3") == (stock.ga_steps.item() == 256)
    assert our_loss(ours, "global_aux_loss") == pytest.approx(1.0, rel=1e-6)


def test_the_global_loss_divides_by_the_last_micro_batchs_tokens(pg: Any) -> None:
    """E13: six tokens and then two, with uniform scores: E x sum of f P is 1 for any f."""
    stock, ours = both_routers(pg, 4, **GLOBAL)
    for router in (stock, ours):
        router(torch.zeros(6, 1, 4))
        router(torch.zeros(2, 1, 4))
    assert our_loss(ours, "global_aux_loss") == pytest.approx(1.0)
    mean = engine_logged("global_load_balancing_loss", pg) / 2
    assert mean == pytest.approx(1.5 if present("E13") else 1.0)


def test_with_padded_experts_the_bias_stands_still(pg: Any) -> None:
    """N4: six tokens for expert 0, one for each of the next two, and capacities of two, filled up."""
    stock, ours = limited(pg, moe_router_enable_expert_bias=True, moe_pad_expert_input_to_capacity=True)
    for router in (stock, ours):
        router(one_hot_logits([0] * 6 + [1, 2], 4))
    _update_router_expert_bias([stock], stock.config)
    update_routers([ours])
    assert ours.expert_bias.sign().tolist() == [-1, 1, 1, 1]
    assert present("N4") == (not stock.expert_bias.any())


def test_dropping_by_position_keeps_other_tokens_than_the_first(pg: Any) -> None:
    """N5: the tokens that expert 0 keeps of 64 that all want it."""
    hidden = one_hot_logits([0] * 64, 4)
    stock, ours = (
        router(hidden)[1][:, 0].nonzero().flatten().tolist() for router in limited(pg, moe_token_drop_policy="position")
    )
    assert ours == list(range(16)) and len(stock) == 16
    assert present("N5") == (stock != ours)


def dropped_on_two_ranks() -> list[int]:
    """Rank r has 4 tokens, all for expert r: of 8 tokens, half of the capacity that 2 experts have together."""
    routers = limited(groups.initialize(replace(Run(), **SP2)), 2, **SP2)
    hidden = one_hot_logits([dist.get_rank()] * 4, 2)
    return [4 - int(router(hidden)[1].sum()) for router in routers]


def test_each_rank_drops_tokens_by_a_capacity_of_its_own(gloo: Any) -> None:
    assert gloo.run(2, dropped_on_two_ranks) == [[2 if present("N6") else 0, 0]] * 2


def test_sinkhorn_overflows(pg: Any) -> None:
    """N7: whether 16 tokens choose the same experts with all logits higher by 50 and by 100."""
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "softmax"}
    hidden = torch.randn(16, 1, 4, generator=torch.Generator().manual_seed(3))
    stock, ours = (
        [torch.equal(router(hidden)[1], router(hidden + shift)[1]) for shift in (50.0, 100.0)]
        for router in both_routers(pg, 4, moe_router_topk=2, **sinkhorn)
    )
    assert ours == [True, True]
    assert stock == [True, not present("N7")]


def test_jitter_is_coarse_in_bf16_and_drawn_in_evaluation(pg: Any) -> None:
    stock, ours = both_routers(pg, 4, moe_input_jitter_eps=0.01, **BF16)
    ones = torch.ones(1000, 1, 4, dtype=torch.bfloat16)
    few, many = stock.apply_input_jitter(ones).unique().numel(), ours.perturb(ones, True).unique().numel()
    assert many > 1000 and present("N8") == (few < 10)
    with torch.no_grad():
        same = [torch.equal(router(ones)[0], router(ones)[0]) for router in (stock.eval(), ours.eval())]
    assert same == [not present("N8"), True]
