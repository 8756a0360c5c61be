"""Every parallel flag trains, and one rank is its oracle: losses, gradient norms, counts and the evaluation agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build

TINY = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "make_vocab_size_divisible_by": 192,
    "train_iters": 3,  # one with a batch of four, two with one of eight
    "eval_iters": 1,
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}

# Plainer layouts, with more steps and models: tests/numbers/test_layout_matrix.py.
LAYOUTS = {
    "EP2, overlapped": (2, {**EP2, **OVERLAP}),
    "TP2, EP2, ETP1, sharded optimizer": (2, {**TP2, **EP2, **SHARDED, "expert_tensor_parallel_size": 1}),
    "PP2, VPP2": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "TP2, EP2, DP2": (4, {**TP2, **EP2, **SHARDED}),
    "PP2, EP2": (4, {**PP2, **EP2, **OVERLAP}),
    "CP2, TP2, EP2, overlapped": (4, {**CP2, **TP2, **EP2, **OVERLAP}),
}


def trained(flags: dict[str, Any]) -> dict[str, Any]:
    """A whole run; its summary."""
    from megatron_moe.training.run import pretrain

    return pretrain(build({**TINY, **flags}))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Steps with other losses under other layouts: tests/numbers/test_layout_matrix.py.
VARIANT = {
    "calculate_per_token_loss": True,
    "rampup_batch_size": (4, 4, 8),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
}


def test_every_layout_trains_as_one_rank_does(gloo, tmp_path):
    flags: dict[str, Any] = VARIANT
    alone = gloo.run(1, trained, flags={**flags, "metrics_file": str(tmp_path / "one.jsonl")})[0]
    oracle = lines(tmp_path / "one.jsonl")
    wrong = []
    for number, (layout, (world_size, sizes)) in enumerate(LAYOUTS.items()):
        path = tmp_path / f"{number}.jsonl"
        summary = gloo.run(world_size, trained, flags={**flags, **sizes, "metrics_file": str(path)})[0]
        for a, b in zip(oracle, lines(path), strict=True):
            near = {
                "loss": b["loss"] == pytest.approx(a["loss"], rel=1e-5),
                "grad norm": b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4),
                "batch": b["global_batch_size"] == a["global_batch_size"],
                "aux losses": b["aux_losses"] == pytest.approx(a["aux_losses"], rel=1e-4),
            }
            # the first step routes with equal weights, later ones may differ in a near tie
            if a["iteration"] == 1:
                near["counts"] = b["tokens_per_expert"] == a["tokens_per_expert"]
            wrong += [f"{layout}, iteration {a['iteration']}: {name}" for name, good in near.items() if not good]
        if summary["valid_loss"] != pytest.approx(alone["valid_loss"], rel=1e-5):
            wrong.append(f"{layout}: valid loss")
    assert wrong == []
