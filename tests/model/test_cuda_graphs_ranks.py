"""Runs whose layers replay graphs: on a CPU, recorded operations that are repeated on the same tensors."""

from typing import Any
from unittest import mock

import pytest

from megatron_moe.platform import env_vars
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, PP2, SMALL, Trainer, digest

BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.1),
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "cuda_graph_warmup_steps": 1,
}
PARTS = {"cuda_graph_modules": ("attn", "mlp", "moe_router")}
SKIPPING = {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 1, "hysteresis": 1}  # the third step
LATENT: dict[str, Any] = {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}
MEASURED = {"log_max_attention_logit": True, "recompute_granularity": "selective", "recompute_modules": ("moe_act",)}
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

    made = RecordedGraphs()
    trainer = Trainer({**SMALL, **BALANCED, "gradient_accumulation_fusion": False, **flags})
    replaying = replay_graphs(trainer.run, trainer.model, made) if graphs else None
    seen = []
    for _ in range(4):
        result = trainer.step(graphs=replaying)
        update = result.router_update
        seen.append(
            [result.loss, repr(result.grad_norm), result.committed, result.max_attention_logit, result.expert_bias_hash]
            + [digest([update.tokens_per_expert, update.dropped_per_expert])]
            + [{name: float(loss) for name, loss in layer.items()} for layer in update.aux_losses]
        )
        if len(trainer.model) == 1 and trainer.groups.pp.size() == 1:
            seen.append(digest(next_token_logits(trainer.model, torch.arange(8).unsqueeze(0), position=5)))
    return {"seen": seen, "state": trainer.state(), "graphs": len(made), "replays": sum(one.replays for one in made)}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "three parts": (1, {**PARTS, "mtp_num_layers": 1}),
    "whole layers, losses per token": (1, {"calculate_per_token_loss": True, "eod_mask_loss": True}),
    "a skipped step": (1, {**PARTS, **SKIPPING}),
    "dropout and jitter": (1, {**PARTS, "hidden_dropout": 0.1, "moe_input_jitter_eps": 0.1}),
    "capacity": (1, {"moe_expert_capacity_factor": 1.0}),
    "latent attention, measured": (1, {**LATENT, **MEASURED}),
    "overlapping reductions": (2, {**DISTRIBUTED, **OVERLAP}),
    "an interleaved pipeline": (2, {**PP2, **FOUR_STAGES}),
    "EP2, fused gradients": (2, {"expert_model_parallel_size": 2, "bf16": True, "gradient_accumulation_fusion": None}),
}


@pytest.mark.parametrize("case", rows(CASES, test=list(CASES)[:-1]))
def test_layers_that_replay_graphs_train_as_others_do_to_the_bit(gloo, case):
    ranks, flags = CASES[case]
    flags = {"cuda_graph_impl": "local", **flags}
    eager, replayed = (gloo.run(ranks, trained, flags=flags, graphs=graphs) for graphs in (False, True))
    for without, found in zip(eager, replayed, strict=True):
        assert found["seen"] == without["seen"]
        assert found["state"] == without["state"]
        assert found["replays"] > found["graphs"] > 0
        committed = [one[2] for one in found["seen"] if isinstance(one, list)]
        assert all(committed) != ("fp16" in flags) and committed[0] and committed[-1]
