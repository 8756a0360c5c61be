"""Runs whose layers replay graphs: on a CPU, recorded operations that are repeated on the same tensors."""

from typing import Any

import pytest

from tests.helpers.recorded_graphs import RecordedGraph
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, PP2, SMALL, Trainer, digest

BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.1),
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "cuda_graph_warmup_steps": 1,
}
PARTS = ("attn", "mlp", "moe_router")


def trained(flags: dict[str, Any], graphs: bool) -> dict[str, Any]:
    """Steps with an evaluation between them; what they report, the state after them, and replays by part."""
    import torch

    from megatron_moe.model.cuda_graphs import replay_graphs
    from megatron_moe.model.generate import next_token_logits

    made: list[RecordedGraph] = []

    def new_graph(pool: Any) -> RecordedGraph:
        made.append(RecordedGraph(pool))
        return made[-1]

    trainer = Trainer({**SMALL, **BALANCED, "gradient_accumulation_fusion": False, **flags})
    replaying = replay_graphs(trainer.run, trainer.model, new_graph) if graphs else None
    seen = []
    for _ in range(4):
        result = trainer.step(graphs=replaying)
        update = result.router_update
        seen.append(
            [result.loss, result.grad_norm, result.committed, result.max_attention_logit, result.expert_bias_hash]
            + [digest([update.tokens_per_expert, update.dropped_per_expert])]
            + [{name: float(loss) for name, loss in layer.items()} for layer in update.aux_losses]
        )
        if len(trainer.model) == 1 and trainer.groups.pp.size() == 1:
            seen.append(digest(next_token_logits(trainer.model, torch.arange(8).unsqueeze(0), position=5)))
    return {"seen": seen, "state": trainer.state(), "graphs": len(made), "replays": sum(one.replays for one in made)}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "three parts": (1, {"cuda_graph_modules": PARTS}),
    "whole layers": (1, {"moe_shared_expert_intermediate_size": 32}),
}


@pytest.mark.parametrize("case", rows(CASES, test=CASES))
def test_layers_that_replay_graphs_train_as_others_do_to_the_bit(gloo, case):
    ranks, flags = CASES[case]
    flags = {"cuda_graph_impl": "local", **flags}
    eager, replayed = (gloo.run(ranks, trained, flags=flags, graphs=graphs) for graphs in (False, True))
    for without, found in zip(eager, replayed, strict=True):
        assert found["seen"] == without["seen"]
        assert found["state"] == without["state"]
        assert found["replays"] > found["graphs"] > 0
