"""Whole runs of combined layouts, with one rank as oracle: what their metrics say of each step, and the evaluation."""

import pytest

from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2
from tests.helpers.trained_steps import TINY, lines, trained

# Steps with other models and losses under other layouts: tests/numbers/test_layout_matrix.py.
FLAGS = {
    **TINY,
    "make_vocab_size_divisible_by": 192,  # as many rows with TP2
    "global_batch_size": 8,  # of two steps; the first has a batch of four
    "eval_iters": 1,
    "calculate_per_token_loss": True,
    "rampup_batch_size": (4, 4, 8),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
    "mtp_num_layers": 1,
}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
LAYOUTS = {
    "TP2, EP2, ETP1, sharded optimizer": (2, {**TP2, **EP2, **DISTRIBUTED, "expert_tensor_parallel_size": 1}),
    "PP2, VPP2": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "TP2, EP2, DP2": (4, {**TP2, **EP2, **DISTRIBUTED}),
    "PP2, EP2, overlapped": (4, {**PP2, **EP2, **OVERLAP}),
    "CP2, TP2, EP2, overlapped": (4, {"context_parallel_size": 2, **TP2, **EP2, **OVERLAP}),
}


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["PP2, EP2, overlapped", "CP2, TP2, EP2, overlapped"]))
def test_every_layout_trains_as_one_rank_does(gloo, once, folder, tmp_path, layout):
    (wanted,) = once(1, trained, flags={**FLAGS, "metrics_file": str(folder / "one.jsonl")})
    ranks, flags = LAYOUTS[layout]
    found, *_ = gloo.run(ranks, trained, flags={**FLAGS, **flags, "metrics_file": str(tmp_path / "metrics.jsonl")})
    assert found["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-5)
    for mine, wanted in zip(lines(tmp_path / "metrics.jsonl"), lines(folder / "one.jsonl"), strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert mine["global_batch_size"] == wanted["global_batch_size"]
        assert mine["mtp_losses"] == pytest.approx(wanted["mtp_losses"], rel=1e-4) and len(mine["mtp_losses"]) == 1
        assert mine["aux_losses"] == pytest.approx(wanted["aux_losses"], rel=1e-4)
        # the first step routes with equal weights, later ones may differ in a near tie
        if wanted["iteration"] == 1:
            assert mine["tokens_per_expert"] == wanted["tokens_per_expert"]
