"""Checkpoints with multi-token prediction: any layout reads them, a resumed run goes on bit for bit, and the metrics
hold the losses of the depths."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trained_steps import SMALL, differing, moved, tensors, trained

pytestmark = pytest.mark.engine

# The first of two stages has no experts, and both hold the one table of the vocabulary.
FLAGS = {
    **SMALL,
    "bf16": True,
    "train_iters": 2,
    "untie_embeddings_and_output_weights": False,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}


def files(folder: Path, name: str) -> dict[str, Any]:
    return {"save": str(folder / name), "metrics_file": str(folder / f"{name}.jsonl")}


def test_a_run_with_predictions_is_resumed_and_read_bit_for_bit_and_logs_every_depth(gloo, tmp_path):
    stages = {**FLAGS, "pipeline_model_parallel_size": 2}
    gloo.run(2, trained, flags={**stages, **files(tmp_path, "whole")})
    gloo.run(2, trained, flags={**stages, **files(tmp_path, "parts"), "exit_interval": 1})
    gloo.run(2, trained, flags={**stages, **files(tmp_path, "parts"), "load": str(tmp_path / "parts")})
    whole = tensors(tmp_path / "whole" / "iter_0000002")
    # Megatron-LM's names, one copy of the table that two stages hold
    assert "mtp.layers.1.transformer_layer.mlp.router.expert_bias" in whole
    assert whole["mtp.layers.0.eh_proj.weight"].shape == (32, 64)
    assert "output_layer.weight" not in whole
    assert differing(whole, tensors(tmp_path / "parts" / "iter_0000002")) == []
    # the weight of these losses may change on the way, as in DeepSeek-V3's training
    places = {"load": str(tmp_path / "whole"), "save": str(tmp_path / "alone")}
    other = {"mtp_loss_scaling_factor": 0.1, "use_distributed_optimizer": True, "train_iters": 3}
    gloo.run(1, moved, flags={**FLAGS, **places, **other})
    assert differing(whole, tensors(tmp_path / "alone" / "iter_0000002")) == []
    gloo.run(1, trained, flags={**FLAGS, "metrics_file": str(tmp_path / "first.jsonl"), "train_iters": 1})
    logged, again, first = (losses(tmp_path / f"{name}.jsonl") for name in ("whole", "parts", "first"))
    assert logged == again and len(logged) == 2
    assert all(len(depths) == 2 and all(5.0 < loss < 6.0 for loss in depths) for _, depths in logged)
    assert first[0][1] == pytest.approx(logged[0][1], rel=1e-4)


def losses(path: Path) -> list[tuple[str, list[float]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["loss_hex"], line["mtp_losses"]) for line in lines if line.get("mtp_losses")]
