"""Parameters of --freeze keep their bits, and what is trained next to them is trained as without them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.checkpoint.plan import check_frozen
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.module_names import frozen, modules
from megatron_moe.config.schema import build
from megatron_moe.model.build import count_frozen
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import Trainer
from tests.helpers.trained_steps import SMALL, TINY, differing, refusal, tensors, trained

pytestmark = pytest.mark.engine

SOME = ("embedding", "first_layer", "router", "*.input_layernorm")
# Nothing is clipped: a norm without the frozen gradients would change every step.
STEPS = {**SMALL, "clip_grad": 0.0, "save_interval": 1, "lr": 1e-2, "weight_decay": 0.1}
SHARDED = {"bf16": True, "use_distributed_optimizer": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CASES: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "bf16, recomputed": (1, SOME, {**SHARDED, **RECOMPUTED}),
    "TP2, EP2": (2, (*SOME, "attention"), {**TP2, **EP2}),
    "fp16, experts": (1, (*SOME, "experts"), {"fp16": True, "initial_loss_scale": 256.0}),
    "EP2": (2, SOME, {**SHARDED, "expert_model_parallel_size": 2}),
    "PP2": (2, ("embedding", *SOME[2:]), {"pipeline_model_parallel_size": 2}),  # a stage trains something
}


def steps_of(save: Path, flags: dict[str, Any]) -> dict[str, Any]:
    return trained({**STEPS, "save": str(save), **flags})


def names_of(patterns: tuple[str, ...]) -> frozenset[str]:
    return frozen(build({**TINY, **SMALL, "freeze": patterns}))


def changed(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {key for key in first if not first[key].equal(second[key])}


def weights(step: Path) -> dict[str, Any]:
    return {key: value for key, value in tensors(step).items() if not key.startswith("optimizer.")}


def moments(step: Path) -> set[str]:
    return {key.split(".", 3)[3] for key in tensors(step) if key.startswith("optimizer.")}


@pytest.mark.parametrize("case", rows(CASES, test=["bf16, recomputed", "TP2, EP2"]))
def test_frozen_parameters_keep_their_bits_and_the_others_are_trained_as_without(gloo, tmp_path, case):
    ranks, patterns, flags = CASES[case]
    names = names_of(patterns)
    gloo.run(ranks, steps_of, save=tmp_path / "all", flags={**flags, "train_iters": 1})
    gloo.run(ranks, steps_of, save=tmp_path / "some", flags={**flags, "freeze": patterns})
    all_trained = weights(tmp_path / "all/iter_0000001")
    first, last = weights(tmp_path / "some/iter_0000001"), weights(tmp_path / "some/iter_0000003")
    biases = {key for key in first if key.endswith("expert_bias")}
    assert names < first.keys() and biases
    assert changed(first, last) == first.keys() - names - biases
    assert changed(all_trained, first) == names | biases
    assert moments(tmp_path / "some/iter_0000003") == first.keys() - names - biases


def test_the_gradient_norm_is_that_of_what_is_trained(gloo, tmp_path):
    run = build({**TINY, **SMALL})
    every = {f"{name}.{own}" for name, parameters in modules(run).items() for own in parameters}
    norms = []
    for number, patterns in enumerate((None, SOME, tuple(sorted(every - names_of(SOME))))):
        file = tmp_path / f"{number}.jsonl"
        flags = {**SMALL, "train_iters": 1, "metrics_file": str(file), "freeze": patterns}
        gloo.run(1, trained, flags=flags)
        norms.append(next(found["grad_norm"] for line in file.open() if "grad_norm" in (found := json.loads(line))))
    assert norms[0] > norms[1] > 0 and norms[0] > norms[2] > 0
    assert math.isclose(norms[0], math.hypot(*norms[1:]), rel_tol=1e-5)


def test_a_run_with_frozen_parameters_is_continued_with_the_same_ones_alone(gloo, tmp_path):
    some, other = {**SHARDED, "freeze": SOME}, {**SHARDED, "freeze": SOME[:2]}
    gloo.run(1, steps_of, save=tmp_path / "whole", flags={**some, "train_iters": 2})
    gloo.run(1, steps_of, save=tmp_path / "parts", flags={**some, "train_iters": 1})
    again = {"load": str(tmp_path / "parts"), "train_iters": 2}
    (message,) = gloo.run(1, refusal, flags={**STEPS, **other, **again, "save": str(tmp_path / "parts")})
    assert "--freeze embedding first_layer router *.input_layernorm" in message
    assert "decoder.layers.1.input_layernorm.weight" in message and "--no-load-optim" in message
    named_otherwise = {**some, "freeze": ("embedding.*", "decoder.layers.0.*", *SOME[2:])}
    gloo.run(1, steps_of, save=tmp_path / "parts", flags={**named_otherwise, **again})
    steps = [tensors(tmp_path / folder / "iter_0000002") for folder in ("whole", "parts")]
    assert differing(*steps) == []


def frozen_here(layout: dict[str, Any]) -> tuple[int, int]:
    """How many parameters the start of a run says are frozen, and how many of them this rank has."""
    freeze = ("embedding", "attention", "experts", "router")
    trainer = Trainer({**layout, "freeze": freeze, "make_vocab_size_divisible_by": 64})
    said = count_frozen(trainer.model, trainer.groups)
    parameters = [one for chunk in trainer.model for one in chunk.parameters() if not one.requires_grad]
    return said, sum(one.numel() for one in parameters)


def test_the_start_says_how_many_parameters_are_frozen_each_counted_once(gloo):
    ((said, number),) = gloo.run(1, frozen_here, layout={})
    assert said == number
    split = gloo.run(2, frozen_here, layout={**TP2, **EP2})
    assert [counted for counted, _ in split] == [number] * 2
    assert number / 2 < split[0][1] < number


def test_a_checkpoint_with_the_flags_name_of_before_is_read() -> None:
    run = build({**TINY, "freeze": ("router",)})
    check_frozen(run, {"freeze_parameters": ["router"]}, "step")
    with pytest.raises(ConfigError, match="--freeze embedding"):
        check_frozen(run, {"freeze_parameters": ["embedding"]}, "step")
