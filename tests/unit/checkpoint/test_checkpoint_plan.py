"""A checkpoint that does not fit the run is refused with every key that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_moe.checkpoint.compare import architecture_keys
from megatron_moe.checkpoint.plan import plan
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, fields_by_name, flatten, replace
from tests.unit.checkpoint.plain_steps import write_step


def saved_by(run: Run, root: Path, iteration: int = 50, has_optimizer: bool = True) -> Run:
    """A step written by `run`; returns the run that loads it."""
    write_step(root, iteration, config=flatten(run), state={"iteration": iteration, "has_optimizer": has_optimizer})
    return replace(run, load=str(root))


RUN = replace(Run(), num_experts=8, bf16=True, use_distributed_optimizer=True, train_iters=100)


def test_the_same_run_goes_on_from_its_latest_step(tmp_path):
    run = replace(saved_by(RUN, tmp_path), save=str(tmp_path))
    found = plan(run)
    assert found.source is not None and found.source.step == tmp_path / "iter_0000050"
    assert (found.start_iteration, found.continues, found.notes) == (50, True, ())


def test_every_differing_key_is_listed_with_both_values(tmp_path):
    run = replace(saved_by(RUN, tmp_path), hidden_size=128, num_experts=16, vocab_size=99, bf16=False)
    with pytest.raises(ConfigError) as error:
        plan(run)
    for words in (
        "--hidden-size: checkpoint 256, this run 128",
        "--num-experts: checkpoint 8, this run 16",
        "--vocab-size: checkpoint None, this run 99",
        "--bf16: checkpoint True, this run False",
    ):
        assert words in str(error.value)


def test_another_precision_needs_the_weights_alone_and_another_optimizer_does_not(tmp_path):
    run = replace(saved_by(RUN, tmp_path), bf16=False)
    with pytest.raises(ConfigError, match="--finetune or --no-load-optim"):
        plan(run)
    assert plan(replace(run, no_load_optim=True)).source is not None
    assert plan(replace(run, finetune=True)).start_iteration == 0
    (note,) = plan(replace(run, bf16=True, use_distributed_optimizer=False)).notes
    assert "use_distributed_optimizer: True -> False" in note


def test_settings_that_may_change_are_told(tmp_path):
    run = replace(saved_by(RUN, tmp_path), lr=0.5, train_iters=200, moe_router_bias_update_rate=0.0)
    (note,) = plan(run).notes
    for words in ("lr: 0.001 -> 0.5", "train_iters: 100 -> 200", "moe_router_bias_update_rate: 0.001 -> 0.0"):
        assert words in note


def test_a_checkpoint_without_optimizer_is_not_continued_by_accident(tmp_path):
    run = saved_by(RUN, tmp_path, has_optimizer=False)
    with pytest.raises(ConfigError, match="without the optimizer; add --no-load-optim or --finetune"):
        plan(run)
    assert plan(replace(run, no_load_optim=True)).start_iteration == 50


def test_no_checkpoint_yet_is_a_fresh_start_unless_one_was_demanded(tmp_path):
    run = replace(RUN, load=str(tmp_path / "none"), save=str(tmp_path / "none"))
    found = plan(run)
    assert found.source is None and found.start_iteration == 0 and "starting afresh" in found.notes[0]
    assert not (tmp_path / "none").exists()
    for demand in ("exit_on_missing_checkpoint", "finetune"):
        with pytest.raises(ConfigError, match="holds no complete checkpoint"):
            plan(replace(run, **{demand: True}))


def test_finetuning_does_not_save_into_the_folder_it_came_from(tmp_path):
    run = replace(saved_by(RUN, tmp_path), finetune=True, save=str(tmp_path))
    with pytest.raises(ConfigError, match="save to another folder"):
        plan(run)


def test_architecture_keys_are_flags():
    assert set(architecture_keys()) < set(fields_by_name())
    assert {"hidden_size", "num_experts", "vocab_size", "moe_router_enable_expert_bias"} < set(architecture_keys())
    assert not {"seq_length", "moe_expert_backend", "moe_expert_capacity_factor"} & set(architecture_keys())
