"""What is told about a step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.data.batches import NOTHING
from megatron_moe.training.finalize_model_grads import RouterUpdate
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.step import StepResult

UPDATE = RouterUpdate(
    layer_numbers=(2, 3),
    tokens_per_expert=(torch.tensor([2, 2, 2, 2]), torch.tensor([6, 2, 0, 0])),
    expert_bias=(torch.tensor([0.1, -0.4, 0.0, 0.2]), None),
    aux_losses=({"aux_loss": torch.tensor(1.0)}, {"aux_loss": torch.tensor(3.0), "z_loss": torch.tensor(5.0)}),
    dropped_per_expert=(None, torch.tensor([3, 1, 0, 0])),
)
ONE_STAGE = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
RUN = build({**PRESETS["tiny"], "train_iters": 100, "peak_tflops": 2.0})


NUMBERS: dict[str, Any] = {"loss_sum": 2.5 * 512, "token_sum": 512, "grad_norm": 1.5, "learning_rate": 1e-3}
NUMBERS |= {"loss_scale": 1.0, "next_loss_scale": 1.0, "overflows": 0, "non_finite_ranks": 0, "damaged_ranks": 0}
NUMBERS |= {"sample_words": NOTHING, "bias_words": NOTHING, "mtp_sums": ()}
RESULT = StepResult(router_update=UPDATE, **NUMBERS)


SAMPLES = {"consumed_samples": 8, "global_batch_size": 8}


def record(meter: Meter, iteration: int, seconds: float):
    return meter.record(RESULT, NO_EXPERT_LOAD, iteration=iteration, seconds=seconds, **SAMPLES)


def test_expert_load_tells_the_worst_layer_the_empty_experts_and_the_largest_bias():
    load = expert_load(UPDATE, ONE_STAGE)
    assert load.tokens_per_expert == {2: [2, 2, 2, 2], 3: [6, 2, 0, 0]}
    assert (load.worst, load.empty) == (3.0, 2)
    assert load.expert_bias_max == pytest.approx(0.4)
    assert load.aux_losses == {"aux_loss": 2.0, "z_loss": 5.0}
    assert load.dropped_per_expert == {3: [3, 1, 0, 0]}
    assert NO_EXPERT_LOAD.worst is None


def staged() -> list[dict]:
    """Rank 0 holds layer 2, rank 1 layer 3, as two pipeline stages do."""
    rank = torch.distributed.get_rank()
    mine = RouterUpdate(*(tuple(field[rank : rank + 1]) for field in vars(UPDATE).values()))
    load = expert_load(mine, SimpleNamespace(pp=torch.distributed.group.WORLD))
    return [load.tokens_per_expert, load.expert_bias_max, load.aux_losses, load.dropped_per_expert]


def test_the_layers_of_all_pipeline_stages_are_told(gloo):
    whole = expert_load(UPDATE, ONE_STAGE)
    expected = [whole.tokens_per_expert, whole.expert_bias_max, whole.aux_losses, whole.dropped_per_expert]
    assert gloo.run(2, staged) == [expected, expected]


def test_rates_are_the_jobs_and_flops_the_devices():
    meter = Meter(RUN, world_size=4, padded_vocab_size=384)
    step = record(meter, 1, seconds=0.5)
    assert (step.tokens, step.tokens_per_second) == (8 * 64, 1024.0)
    tflops = RUN.derived.flops_per_token(384) * 1024.0 / 4 / 1e12
    assert step.model_tflops == pytest.approx(tflops) and step.mfu == pytest.approx(tflops / 2.0)
    for length in (64, 16):  # 512 tokens in equally long documents
        of_documents = replace(RESULT, attended_pairs=512 * (length + 1) / 2)
        step = meter.record(of_documents, NO_EXPERT_LOAD, iteration=1, seconds=0.5, **SAMPLES)
        tflops = RUN.derived.flops_per_token(384, length / 2) * 1024.0 / 4 / 1e12
        assert step.model_tflops == pytest.approx(tflops)
    assert RUN.derived.flops_per_token(384) == RUN.derived.flops_per_token(384, 32) > tflops * 1e12 * 4 / 1024


def test_a_slow_first_step_does_not_count_for_the_time_left():
    meter = Meter(RUN, world_size=1, padded_vocab_size=384)
    assert record(meter, 1, seconds=10.0).seconds_left == pytest.approx(990.0)
    assert record(meter, 2, seconds=1.0).seconds_left == pytest.approx(98.0)
    assert record(meter, 3, seconds=2.0).seconds_left == pytest.approx(97 * 1.5)
    assert record(meter, 100, seconds=1.0).seconds_left == 0.0
