"""Whole runs of combined layouts, with one rank as oracle: what their metrics say of each step, and the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from tests.helpers.rows import rows

# Steps with other models and losses under other layouts: tests/numbers/test_layout_matrix.py.
TINY = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "make_vocab_size_divisible_by": 192,
    "train_iters": 3,  # one with a batch of four, two with one of eight
    "eval_iters": 1,
    "calculate_per_token_loss": True,
    "rampup_batch_size": (4, 4, 8),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
LAYOUTS = {
    "TP2, EP2, ETP1, sharded optimizer": (2, {**TP2, **EP2, **SHARDED, "expert_tensor_parallel_size": 1}),
    "PP2, VPP2": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "TP2, EP2, DP2": (4, {**TP2, **EP2, **SHARDED}),
    "PP2, EP2, overlapped": (4, {**PP2, **EP2, **OVERLAP}),
    "CP2, TP2, EP2, overlapped": (4, {**CP2, **TP2, **EP2, **OVERLAP}),
}


def valid_loss(flags: dict[str, Any], metrics: str) -> float:
    """Train a whole run; return the loss of its evaluation."""
    from megatron_moe.training.run import pretrain

    return pretrain(build({**TINY, **flags, "metrics_file": metrics}))["valid_loss"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["PP2, EP2, overlapped", "CP2, TP2, EP2, overlapped"]))
def test_every_layout_trains_as_one_rank_does(gloo, once, folder, tmp_path, layout):
    (wanted_loss,) = once(1, valid_loss, flags={}, metrics=str(folder / "one.jsonl"))
    ranks, flags = LAYOUTS[layout]
    losses = gloo.run(ranks, valid_loss, flags=flags, metrics=str(tmp_path / "metrics.jsonl"))
    assert losses[0] == pytest.approx(wanted_loss, rel=1e-5)
    for mine, wanted in zip(lines(tmp_path / "metrics.jsonl"), lines(folder / "one.jsonl"), strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert mine["global_batch_size"] == wanted["global_batch_size"]
        assert mine["aux_losses"] == pytest.approx(wanted["aux_losses"], rel=1e-4)
        # the first step routes with equal weights, later ones may differ in a near tie
        if wanted["iteration"] == 1:
            assert mine["tokens_per_expert"] == wanted["tokens_per_expert"]
