"""Runs whose layers replay graphs: on a CPU, recorded operations that are repeated on the same tensors."""

from typing import Any
from unittest import mock

import pytest

from megatron_moe.platform import env_vars
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, SMALL, Trainer, digest

BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.1),
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "cuda_graph_warmup_steps": 1,
}
PARTS = {"cuda_graph_modules": ("attn", "mlp", "moe_router")}
MOE = {"cuda_graph_modules": ("moe",)}
SKIPPING = {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 1, "hysteresis": 1}  # the third step
LATENT: dict[str, Any] = {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts"),
    "moe_shared_expert_intermediate_size": 32,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
FOUR_STAGES = {"num_layers": 4, "moe_layer_freq": "[0,1,1,1]", "num_layers_per_virtual_pipeline_stage": 1}


def trained(flags: dict[str, Any], graphs: bool) -> dict[str, Any]:
    """Steps with an evaluation between them; what they report, the state after them, and replays by part."""
    with mock.patch.dict(env_vars.chosen, {env_vars.CPU_KERNELS: "torch"}):  # a record does not see kernels in C
        return in_torch(flags, graphs)


def in_torch(flags: dict[str, Any], graphs: bool) -> dict[str, Any]:
    import torch

    from megatron_moe.model.cuda_graphs import replay_graphs
    from megatron_moe.model.generate import next_token_logits
    from megatron_moe.parallel.groups import pretend_machines

    made = RecordedGraphs()
    if "moe_alltoall_by_node" in flags:
        pretend_machines(1)
    trainer = Trainer({**SMALL, **BALANCED, "gradient_accumulation_fusion": False, **flags})
    # Where attention is captured, its dropout draws from another stream.
    replaying = replay_graphs(trainer.run, trainer.model, made) if graphs or "attention_dropout" in flags else None
    seen = []
    for _ in range(4):
        result = trainer.step(graphs=replaying if graphs else None)
        update = result.router_update
        seen.append(
            [result.loss, repr(result.grad_norm), result.committed, result.max_attention_logit, result.expert_bias_hash]
            + [digest([update.tokens_per_expert, update.dropped_per_expert])]
            + [{name: float(loss) for name, loss in layer.items()} for layer in update.aux_losses]
        )
        if len(trainer.model) == 1 and trainer.groups.pp.size() == 1:
            seen.append(digest(next_token_logits(trainer.model, torch.arange(8).unsqueeze(0), position=5)))
    found = {"seen": seen, "state": trainer.state(), "graphs": len(made), "replays": sum(one.replays for one in made)}
    found["filled"] = [storage.nbytes() for one in made for storage in one.freed]
    # How an exchange's sort writes the rows to each rank.
    return {**found, "sorts": sum(call[0] is torch.ops.aten.sub.out for one in made for call in one.calls)}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "three parts": (1, {**PARTS, "mtp_num_layers": 1}),
    "whole layers, losses per token": (1, {"calculate_per_token_loss": True, "eod_mask_loss": True}),
    "a skipped step": (1, {**PARTS, **SKIPPING}),
    "dropout and jitter": (1, {**PARTS, "hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}),
    "capacity": (1, {**MOE, "moe_expert_capacity_factor": 1.0}),
    "padding to a capacity": (1, {**MOE, "moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}),
    "latent attention, measured": (1, {**LATENT, "log_max_attention_logit": True}),
    "recomputation": (1, {**LATENT, **RECOMPUTED}),
    "recomputed experts": (1, {**MOE, "recompute_granularity": "selective", "recompute_modules": ("moe",)}),
    "overlapping reductions": (2, {**DISTRIBUTED, **OVERLAP}),
    "an interleaved pipeline": (2, {**PP2, **FOUR_STAGES}),
    "EP2, padding to a capacity": (
        2,
        {**EP2, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ),
    "EP2, by node": (2, {**EP2, "moe_alltoall_by_node": True}),
    "EP2, fused gradients": (2, {**EP2, "bf16": True, "gradient_accumulation_fusion": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_replay_graphs_train_as_others_do_to_the_bit(gloo, case):
    ranks, flags = CASES[case]
    flags = {"cuda_graph_impl": "local", **flags}
    eager, replayed = (gloo.run(ranks, trained, flags=flags, graphs=graphs) for graphs in (False, True))
    for without, found in zip(eager, replayed, strict=True):
        assert found["seen"] == without["seen"]
        assert found["state"] == without["state"]
        assert found["replays"] > found["graphs"] > 0
        assert not any(found["filled"]) and bool(found["filled"]) == (case == "recomputation")
        assert found["graphs"] == 4 or not case.startswith("whole layers")  # a layer's passes are one graph each
        assert found["sorts"] or "expert_model_parallel_size" not in flags  # what precedes the exchange is captured
        committed = [one[2] for one in found["seen"] if isinstance(one, list)]
        assert all(committed) != ("fp16" in flags) and committed[0] and committed[-1]
