"""Records survive the way to JSON and back with every bit."""

import json
import math

import pytest

from megatron_moe.report.health import load_max_over_mean
from megatron_moe.report.jsonl import eval_from_json, step_from_json, to_json
from megatron_moe.report.metric import dropped_share
from megatron_moe.report.records import EvalRecord, exact
from tests.report import steps

STEP = steps.STEP.replace(
    iteration=7,
    loss=0.1 + 0.2,
    learning_rate=1e-3 / 3,
    grad_norm=1.0 / 3,
    tokens_per_expert={2: [3, 0, 5, 0], 3: [2, 2, 2, 2]},
    expert_load=2.5,
    expert_bias_max=0.007,
    aux_losses={"seq_aux_loss": 1.01},
    memory_bytes=1 << 30,
    dropped_per_expert={3: [1, 0, 0, 1]},
)


def through_json(record):
    return json.loads(json.dumps(to_json(record), allow_nan=False))


def test_steps_and_evaluations_come_back_equal_from_their_json_lines_which_have_the_bits():
    further = STEP.replace(mtp_losses=[0.1 + 0.2, 3.0])
    line = through_json(further)
    assert (line["loss_hex"], line["grad_norm_hex"]) == ((0.1 + 0.2).hex(), (1.0 / 3).hex())
    assert step_from_json(line) == further
    del line["mtp_losses"]  # as in older lines
    assert step_from_json(line) == step_from_json(through_json(STEP)) == STEP
    no_number = step_from_json(through_json(STEP.replace(mtp_losses=[math.nan])))
    assert math.isnan(no_number.mtp_losses[0])
    evaluation = EvalRecord(7, "valid", 2.0 / 3, 4096, 1.5)
    assert eval_from_json(through_json(evaluation)) == evaluation


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_null_in_json_and_comes_back_as_it_was_and_no_grad_norm_has_no_bits(value):
    line = through_json(STEP.replace(loss=value, skipped=True, grad_norm=None))
    assert line["loss"] is None and "grad_norm_hex" not in line
    back = step_from_json(line)
    assert (math.isnan(back.loss) if math.isnan(value) else back.loss == value) and back.grad_norm is None


def test_load_is_max_over_mean_and_the_share_of_dropped_choices_is_of_the_layers_that_drop():
    assert [load_max_over_mean(counts) for counts in ([3, 0, 5, 0], [4, 4], [0, 0])] == [2.5, 1.0, None]
    assert dropped_share(STEP) == 2 / 10  # layer 2 has no capacity
    assert dropped_share(STEP.replace(dropped_per_expert={})) is None


def test_what_two_runs_must_agree_on_is_kept_exactly_nan_and_all():
    kept = exact(STEP.replace(loss=math.nan, grad_norm=0.1, data_hash="00ff", expert_bias_hash=None))
    assert (kept["loss_hex"], kept["grad_norm_hex"]) == ("nan", (0.1).hex())
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert exact(step_from_json(to_json(STEP))) == exact(STEP)
