"""Parameters of --freeze-parameters keep their bits, and what is trained next to them is trained as without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.module_names import frozen
from megatron_moe.config.schema import build
from tests.helpers.trained_steps import TINY, refusal, tensors, trained

SOME = ("embedding", "first_layer", "router", "*.input_layernorm")
# Steps of 1e-3 in bf16 would round away; nothing is clipped, or one frozen gradient would change all steps.
STEPS = {"clip_grad": 0.0, "save_interval": 1, "lr": 1e-2, "weight_decay": 0.1, "seed": 5}


def steps_of(save: str, flags: dict[str, Any]) -> dict[str, Any]:
    return trained({**STEPS, "save": save, **flags})


def changed(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {key for key in first if not first[key].equal(second[key])}


def weights(step: Path) -> dict[str, Any]:
    return {key: value for key, value in tensors(step).items() if not key.startswith("optimizer.")}


def moments(step: Path) -> set[str]:
    return {key.split(".", 3)[3] for key in tensors(step) if key.startswith("optimizer.")}


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, {}),
        (1, {"bf16": True, "use_distributed_optimizer": True, "recompute_granularity": "full",
             "recompute_method": "uniform", "recompute_num_layers": 1}),
        (1, {"fp16": True, "initial_loss_scale": 256.0}),
        (2, {"bf16": True, "use_distributed_optimizer": True, "expert_model_parallel_size": 2}),
    ],
    ids=["fp32", "bf16-recomputed", "fp16", "EP2"],
)  # fmt: skip
def test_frozen_parameters_keep_their_bits_and_the_others_are_trained_as_without(gloo, tmp_path, ranks, flags):
    run = build({**TINY, "freeze_parameters": SOME})
    names = frozen(run)
    gloo.run(ranks, steps_of, save=str(tmp_path / "all"), flags={**flags, "train_iters": 1})
    gloo.run(ranks, steps_of, save=str(tmp_path / "some"), flags={**flags, "freeze_parameters": SOME})
    all_trained, first, last = (weights(tmp_path / step) for step in (
        "all/iter_0000001", "some/iter_0000001", "some/iter_0000003"))  # fmt: skip
    biases = {key for key in first if key.endswith("expert_bias")}
    assert names < first.keys() and biases
    assert changed(first, last) == first.keys() - names - biases
    assert changed(all_trained, first) == names | biases
    assert moments(tmp_path / "some/iter_0000003") == first.keys() - names - biases
