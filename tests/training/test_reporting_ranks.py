"""Health is measured on every layout, is the same on every rank, and changes nothing."""

import math
from typing import Any

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from tests.helpers import model_cases as cases
from tests.helpers import stepped_trainer as steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2, ZERO_3

SMALL = {"seq_length": 16, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, **steps.SMALL}
EXPERTS = {**PRESETS["tiny"], **SMALL, "init_method_std": 0.1}
TABLE = {"padded_vocab_size": 256}  # the padding has zeros, and else depends on TP


def norms(run: Run) -> dict[str, Any]:
    """One step's gradients: the norms that health tells, the joint one, and sums over this rank's parameters."""
    from megatron_moe.training.gradients import count_zeros, part_grad_norms, weights_norm

    trainer = cases.Trainer(run)
    chunks, optimizer = trainer.model, trainer.optimizer
    cases.forward_backward(run, chunks, trainer.groups)
    squares = {True: 0.0, False: 0.0, "weights": 0.0, "zeros": 0}
    for parameter in chunks[0].parameters() if torch.distributed.get_world_size() == 1 else ():
        squares[not getattr(parameter, "allreduce", True)] += float(parameter.main_grad.double().square().sum())
        squares["weights"] += float(parameter.detach().double().square().sum())
        squares["zeros"] += int((parameter.main_grad == 0).sum())
    assert not optimizer.prepare_grads()
    split = part_grad_norms(optimizer)
    counted = {"weights": weights_norm(optimizer), "zeros": int(count_zeros(optimizer).item())}
    return {"split": split, "joint": float(optimizer.get_grad_norm()), "squares": squares, **counted}


EVERY = {**steps.LAYOUTS, "TP2, distributed optimizer": (2, {**TP2, **DISTRIBUTED}), "EP2 x PP2": (4, {**EP2, **PP2})}
TOLD = ["TP2, distributed optimizer", "EP2, distributed optimizer", "PP2", "DP2, ZeRO 3"]


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows(EVERY, test=TOLD))
def test_norms_and_zeros_are_those_of_one_rank(gloo: Any, once: Any, layout: str) -> None:
    (ranks, flags), (oracle,) = EVERY[layout], once(1, norms, run=replace(Run(), **EXPERTS, **TABLE))
    dense, experts, weights = (math.sqrt(oracle["squares"][what]) for what in (False, True, "weights"))
    assert experts > 0.01 * dense
    for rank in gloo.run(ranks, norms, run=replace(Run(), **{**EXPERTS, **TABLE, **flags})):
        assert rank["split"] == pytest.approx((dense, experts), rel=2e-5)
        assert math.hypot(*rank["split"]) == pytest.approx(rank["joint"], rel=1e-6)
        assert rank["weights"] == pytest.approx(weights, rel=2e-6)
        assert rank["zeros"] == oracle["squares"]["zeros"] > 0


def test_a_table_that_two_stages_share_counts_once(gloo: Any) -> None:
    tied = {**EXPERTS, **TABLE, "untie_embeddings_and_output_weights": False}
    (oracle,) = gloo.run(1, norms, run=replace(Run(), **tied))
    for rank in gloo.run(2, norms, run=replace(Run(), **tied, **PP2)):
        assert rank["weights"] == pytest.approx(math.sqrt(oracle["squares"]["weights"]), rel=2e-6)
        assert rank["zeros"] == oracle["squares"]["zeros"]


def measured(flags: dict[str, Any], measure: bool, taken: int = 2) -> dict[str, Any]:
    """Some steps, measured or not: every bit they left, and what was found in the last one."""
    from megatron_moe.checkpoint.state import TrainingProgress
    from megatron_moe.training.callbacks.reporting import HealthProbe
    from megatron_moe.training.metrics import expert_load

    sizes = {**steps.SMALL, "moe_layer_freq": "[1,1]", "seq_length": 32, "micro_batch_size": 4}
    trainer = steps.Trainer({**sizes, **flags})
    count = 8 // (trainer.run.training.micro_batch_size * trainer.groups.dp.size())
    health = load = None
    losses = []
    for _ in range(taken):
        probe = HealthProbe(trainer.model, 32, count) if measure else None
        result = trainer.step(probe=probe)
        assert result.committed
        losses.append((result.loss.hex(), result.grad_norm.hex()))
        load = expert_load(result.router_update, trainer.groups)
        if probe is not None:
            health = probe.health(load.tokens_per_expert, TrainingProgress(4, 32, 1), trainer.groups.pp)
    bits = {**trainer.state(), "generator": steps.digest(torch.get_rng_state())}
    return {
        "bits": bits,
        "losses": losses,
        "health": health,
        "joint": result.grad_norm,
        "counts": load.tokens_per_expert,
        "parameters": sum(p.numel() for chunk in trainer.model for p in chunk.parameters()),
    }


HALF = {"bf16": True, "grad_reduce_in_bf16": True}
PACKED = {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
# The stages of a pipeline: one without experts and one with them.
PIPELINED = {**PP2, "moe_layer_freq": "[0,1]", "recompute_granularity": "selective", "recompute_modules": ("moe",)}
MEASURED: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {}),
    "fp16, DP2": (2, {"fp16": True, "initial_loss_scale": 1024.0}),
    "bf16, EP2": (2, {**EP2, **HALF, **DISTRIBUTED, "hidden_dropout": 0.1}),
    "bf16, PP2, recomputed": (2, {**HALF, **PIPELINED}),
    "packed, EP2": (2, {**EP2, **PACKED, **DISTRIBUTED, "exp_avg_dtype": "int8"}),
    "packed, Muon, ZeRO 3": (2, {**PACKED, **ZERO_3, "optimizer": "muon"}),
}


@pytest.mark.parametrize("case", rows(MEASURED, test=["bf16, EP2", "bf16, PP2, recomputed", "packed, Muon, ZeRO 3"]))
def test_measuring_changes_no_bit_of_a_run(gloo: Any, case: str) -> None:
    ranks, flags = MEASURED[case]
    plain = gloo.run(ranks, measured, flags=flags, measure=False)
    looked = gloo.run(ranks, measured, flags=flags, measure=True)
    for without, with_health in zip(plain, looked, strict=True):
        assert with_health["bits"] == without["bits"]
        assert with_health["losses"] == without["losses"]
        # All ranks tell the same, of all layers, whichever stage has them.
        assert with_health["health"] == looked[0]["health"]
        assert set(with_health["health"].layers) == set(with_health["counts"]) != set()
    health = looked[0]["health"]
    assert (health.skipped_iterations, health.skip_rate) == (1, 0.25)
    assert math.hypot(health.dense_grad_norm, health.expert_grad_norm) == pytest.approx(looked[0]["joint"], rel=1e-6)
    for layer in health.layers.values():
        assert layer.load is not None and layer.load.effective_experts <= 8.0001
        assert layer.sampled_tokens == 32 * (1 if flags.get("pipeline_model_parallel_size") else ranks)
        assert 0 <= layer.margin_p5 <= layer.margin_mean and 0 < layer.max_logit < 10
        assert layer.bias_min <= layer.bias_mean <= layer.bias_max and layer.bias_max > 0


def test_the_rounding_of_stored_moments_is_that_of_one_rank(gloo: Any) -> None:
    def found(ranks: int, **more: Any) -> list[float | None]:
        healths = [rank["health"] for rank in gloo.run(ranks, measured, flags={**PACKED, **more}, measure=True)]
        assert all(health == healths[0] for health in healths)
        return [healths[0].first_moment_rounding, healths[0].second_moment_rounding, healths[0].update_rounding]

    one = found(1)
    # Of bf16's 8 bits, rounding at random leaves a mean square error of 1/6 to 1/24 of the last place's square.
    assert all(0.2 * 2**-8 < figure < 0.6 * 2**-7 for figure in one)
    assert found(2, **PP2) == pytest.approx(one, rel=0.02)  # the same elements
    coarse = found(2, **EP2, **DISTRIBUTED, exp_avg_dtype="int8", exp_avg_sq_dtype="fp32")
    assert coarse[0] > 2 * one[0] and coarse[1] is None and coarse[2] > one[2]


def test_bf16_gradient_buffers_lose_additions_and_say_so_and_fp32_ones_lose_none(gloo: Any) -> None:
    health = gloo.run(1, measured, flags={"bf16": True}, measure=True, taken=1)[0]["health"]
    assert (health.gradient_additions, health.gradient_swallowed) == (0, 0)
    assert (health.other_additions, health.other_swallowed) == (None, None)
    assert (health.first_moment_rounding, health.second_moment_rounding, health.update_rounding) == (None,) * 3
    found = gloo.run(1, measured, flags={**HALF, "micro_batch_size": 1}, measure=True, taken=1)[0]
    health, additions = found["health"], 8 * found["parameters"]
    # Eight micro-batches; rows of the embedding whose tokens do not occur, and experts without a token, add zeros.
    assert 0.3 * additions < health.gradient_additions < additions
    assert 0.001 < health.gradient_swallowed / health.gradient_additions < 0.2
