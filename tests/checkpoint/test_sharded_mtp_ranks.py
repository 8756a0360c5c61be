"""Checkpoints with multi-token prediction: every layout reads them, a resumed run goes on bit for bit, and the metrics
hold the losses of the depths."""

from __future__ import annotations

import json

import pytest

from tests.helpers.trained_steps import differing, tensors, trained

pytestmark = pytest.mark.engine

MTP = {
    "num_layers": 2,
    "moe_layer_freq": "[0,1]",
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
    "seq_length": 16,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 32,
    "micro_batch_size": 1,
    "global_batch_size": 2,
}
PP2 = (2, {"pipeline_model_parallel_size": 2})
TP2 = (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
ALONE = (1, {})


@pytest.mark.parametrize(
    ("tied", "readers"),
    [
        pytest.param(False, [TP2, PP2], id="two tables", marks=pytest.mark.test_all),
        pytest.param(True, [ALONE], id="one table, three copies"),
    ],
)
def test_a_checkpoint_travels_through_layouts_and_comes_back_equal(gloo, tmp_path, tied, readers):
    flags = {**MTP, "bf16": True, "use_distributed_optimizer": True, "untie_embeddings_and_output_weights": not tied}
    first = gloo.run(2, trained, flags={**flags, **PP2[1], "save": str(tmp_path / "0")})[0]["checkpoint"]
    original = tensors(first)
    # Megatron-LM's names, one copy of the table that two stages hold
    assert "mtp.layers.1.transformer_layer.mlp.router.expert_bias" in original
    assert original["mtp.layers.0.eh_proj.weight"].shape == (32, 64)
    assert ("output_layer.weight" in original) is not tied
    for number, (world_size, sizes) in enumerate(readers, start=1):
        folders = {"load": str(tmp_path / str(number - 1)), "save": str(tmp_path / str(number))}
        # the weight of these losses may change on the way, as in DeepSeek-V3's training
        gloo.run(world_size, trained, flags={**flags, **sizes, **folders, "mtp_loss_scaling_factor": 0.1})
        assert differing(original, tensors(tmp_path / str(number) / "iter_0000003")) == [], sizes


def test_a_resumed_run_goes_on_bit_for_bit_and_logs_every_depth(gloo, tmp_path):
    flags = {**MTP, **PP2[1], "bf16": True}  # the first stage has no experts
    whole = gloo.run(
        2, trained, flags={**flags, "save": str(tmp_path / "a"), "metrics_file": str(tmp_path / "a.jsonl")}
    )
    part = {**flags, "save": str(tmp_path / "b"), "metrics_file": str(tmp_path / "b.jsonl")}
    gloo.run(2, trained, flags={**part, "exit_interval": 2})
    resumed = gloo.run(2, trained, flags={**part, "load": str(tmp_path / "b")})
    assert differing(tensors(whole[0]["checkpoint"]), tensors(resumed[0]["checkpoint"])) == []
    logged = [steps_of(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert logged[0] == logged[1]
    assert len(logged[0]) == 3
    assert all(len(depths) == 2 and all(5.0 < loss < 6.0 for loss in depths) for _, depths in logged[0])
    alone = {**MTP, "bf16": True, "metrics_file": str(tmp_path / "c.jsonl"), "train_iters": 1}
    gloo.run(1, trained, flags=alone)
    assert steps_of(tmp_path / "c.jsonl")[0][1] == pytest.approx(logged[0][0][1], rel=1e-4)


def steps_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["loss_hex"], line["mtp_losses"]) for line in lines if line.get("mtp_losses")]
