"""A checkpoint that does not fit the run is refused with every key that differs."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.checkpoint.plan import architecture_keys, plan, schedule_settings
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, fields_by_name, flatten, replace
from tests.helpers.plain_steps import write_step


def saved_by(run: Run, root: Path, iteration: int = 50, has_optimizer: bool = True) -> Run:
    """A step written by `run`; returns the run that loads it."""
    write_step(root, iteration, config=flatten(run), state={"iteration": iteration, "has_optimizer": has_optimizer})
    return replace(run, load=str(root))


CONVERTED = {"iteration": 0, "has_optimizer": False, "hf": {"family": "mixtral", "copies": [], "dropped": []}}
RUN = replace(Run(), num_experts=8, bf16=True, use_distributed_optimizer=True, train_iters=100)


def test_the_same_run_goes_on_from_its_latest_step_and_is_told_what_has_changed(tmp_path):
    run = replace(saved_by(RUN, tmp_path), save=str(tmp_path))
    found = plan(run)
    assert found.source is not None and found.source.step == tmp_path / "iter_0000050"
    assert (found.start_iteration, found.continues, found.notes) == (50, True, ())
    (note,) = plan(replace(run, lr=0.5, train_iters=200, moe_router_bias_update_rate=0.0)).notes
    for words in ("lr: 0.001 -> 0.5", "train_iters: 100 -> 200", "moe_router_bias_update_rate: 0.001 -> 0.0"):
        assert words in note
    with pytest.raises(ConfigError, match="save to another folder"):
        plan(replace(run, finetune=True))


def test_a_schedule_begins_anew_where_a_step_is_loaded_or_goes_on(tmp_path):
    run = saved_by(RUN, tmp_path)
    for restart in (None, 0, 50):
        assert plan(replace(run, lr_restart_at=restart, lr_decay_iters=9)).source is not None
    with pytest.raises(ConfigError, match="--lr-restart-at 40: .* began with the run, .*use --lr-restart-at 50"):
        plan(replace(run, lr_restart_at=40))
    with pytest.raises(ConfigError, match="--lr-restart-at 40: .*holds no checkpoint yet"):
        plan(replace(run, lr_restart_at=40, load=str(tmp_path / "new"), save=str(tmp_path / "new")))
    begun = replace(saved_by(replace(RUN, lr=0.2, lr_restart_at=40), tmp_path / "begun"), lr_restart_at=None)
    source = plan(begun).source
    assert source is not None and schedule_settings(begun, source) == {"lr_restart_at": 40}
    taken = replace(begun, use_checkpoint_opt_param_scheduler=True, lr=0.5, min_lr=0.1)
    found = schedule_settings(taken, source)
    assert [found[name] for name in ("lr", "min_lr", "lr_decay_iters", "lr_restart_at")] == [0.2, 0.0, 60, 40]
    taken = dataclasses.replace(taken, explicit=frozenset({"lr"}))
    with pytest.raises(ConfigError, match=r"--lr 0.5, --use-checkpoint-opt-param-scheduler: .* has 0.2; leave one"):
        plan(taken)
    write_step(tmp_path / "hf", 0, config=flatten(RUN), state=CONVERTED)
    with pytest.raises(ConfigError, match="--lr-restart-at 1: .*converted without a schedule"):
        plan(replace(RUN, load=str(tmp_path / "hf"), lr_restart_at=1))


def test_every_differing_key_is_listed_with_both_values(tmp_path):
    run = replace(saved_by(RUN, tmp_path), hidden_size=128, num_experts=16, vocab_size=99)
    with pytest.raises(ConfigError) as error:
        plan(run)
    for words in (
        "--hidden-size: checkpoint 256, this run 128",
        "--num-experts: checkpoint 8, this run 16",
        "--vocab-size: checkpoint None, this run 99",
    ):
        assert words in str(error.value)


def test_other_rotary_settings_train_on_from_weights_alone_where_they_are_typed(tmp_path):
    run = saved_by(RUN, tmp_path)
    longer = replace(run, rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=256)
    longer = replace(longer, seq_length=1024, finetune=True)
    typed = dataclasses.replace(longer, explicit=frozenset({"rope_type"}))
    assert "rope: default -> yarn x4, trained 256 -> 1024, attention amplitude 1.14" in plan(typed).notes
    for refused in (longer, replace(typed, finetune=False)):
        with pytest.raises(ConfigError, match="--finetune and --rope-type on the command line"):
            plan(refused)


def test_a_checkpoint_of_megatron_names_its_defaults_where_the_run_has_ours(tmp_path):
    state = {"iteration": 50, "has_optimizer": True, "megatron": {}}
    write_step(tmp_path, 50, config=flatten(replace(RUN, norm_epsilon=1e-5)), state=state)
    with pytest.raises(ConfigError, match="--defaults megatron"):
        plan(replace(RUN, load=str(tmp_path)))
    with pytest.raises(ConfigError) as error:
        plan(replace(RUN, load=str(tmp_path), norm_epsilon=1e-4))
    assert "--defaults" not in str(error.value)


def test_another_precision_is_a_changed_setting_and_so_is_another_optimizer(tmp_path):
    run = replace(saved_by(RUN, tmp_path), bf16=False, use_distributed_optimizer=False)
    for start in ({}, {"no_load_optim": True}, {"finetune": True}):
        (note,) = plan(replace(run, **start)).notes
        assert "bf16: True -> False" in note and "use_distributed_optimizer: True -> False" in note
    saved_by(RUN, tmp_path, iteration=60, has_optimizer=False)
    with pytest.raises(ConfigError, match=r"no fp32 main weights(.|\n)*--bf16: checkpoint True, this run False"):
        plan(replace(run, no_load_optim=True))


def test_a_checkpoint_without_optimizer_is_not_continued_by_accident(tmp_path):
    run = saved_by(RUN, tmp_path, has_optimizer=False)
    with pytest.raises(ConfigError, match="without the optimizer; add --no-load-optim or --finetune"):
        plan(run)
    assert plan(replace(run, no_load_optim=True)).start_iteration == 50
    for step, name in ((51, "consumed_samples"), (52, "skipped_iterations")):
        write_step(tmp_path, step, config=flatten(RUN), state={"iteration": step, "has_optimizer": True, name: -5})
        with pytest.raises(ConfigError, match=f"state.json says {name} -5"):
            plan(run)
    # one of an imported model that was trained is not taken for a converted one
    write_step(tmp_path, 60, config=flatten(RUN), state={**CONVERTED, "iteration": 60, "scheduler": {}})
    with pytest.raises(ConfigError, match="without the optimizer"):
        plan(run)


def test_no_checkpoint_yet_is_a_fresh_start_unless_one_was_demanded(tmp_path):
    run = replace(RUN, load=str(tmp_path / "none"), save=str(tmp_path / "none"))
    found = plan(run)
    assert found.source is None and found.start_iteration == 0 and "starting afresh" in found.notes[0]
    assert not (tmp_path / "none").exists()
    for demand in ("exit_on_missing_checkpoint", "finetune"):
        with pytest.raises(ConfigError, match="does not exist"):
            plan(replace(run, **{demand: True}))


def test_a_folder_without_a_step_is_an_error_unless_the_run_saves_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        for save in (None, str(tmp_path / "other")):
            with pytest.raises(ConfigError, match=f"--load {tmp_path / name}.*--save"):
                plan(replace(RUN, load=str(tmp_path / name), save=save))
        assert plan(replace(RUN, load=str(tmp_path / name), save=str(tmp_path / "." / name))).source is None


def test_a_converted_step_is_weights_alone_and_may_be_trained_in_its_own_folder_and_dtype(tmp_path):
    write_step(tmp_path, 0, config=flatten(RUN), state=CONVERTED)
    found = plan(replace(RUN, load=str(tmp_path), save=str(tmp_path), lr=0.5))
    assert found.source is not None and found.source.weights_only
    assert (found.start_iteration, found.continues) == (0, True)
    (note,) = found.notes
    assert "was converted: weights alone; optimizer, schedule and random states start fresh" in note
    with pytest.raises(ConfigError, match=r"never cast silently(.|\n)* --dtype") as error:
        plan(replace(RUN, load=str(tmp_path), bf16=False))
    assert "--bf16: checkpoint True, this run False" in str(error.value)


def test_a_step_goes_before_the_folder_that_the_weights_came_from(tmp_path):
    run = replace(RUN, load=str(tmp_path), save=str(tmp_path), load_hf="model")
    (note,) = plan(run).notes
    assert plan(run).source is None and "holds no checkpoint yet: starting from model" in note
    saved_by(RUN, tmp_path)
    found = plan(run)
    assert found.source is not None and found.start_iteration == 50 and found.continues
    assert "goes before --load-hf model" in " ".join(found.notes)


def test_architecture_keys_are_flags():
    assert set(architecture_keys()) < set(fields_by_name())
    assert {"hidden_size", "num_experts", "vocab_size", "moe_router_enable_expert_bias"} < set(architecture_keys())
    free = {"seq_length", "moe_expert_backend", "moe_expert_capacity_factor", "fp8_format", "fp8_recipe", "fp8_modules"}
    assert not free & set(architecture_keys())


def test_looking_for_a_checkpoint_and_reading_its_index_loads_no_torch():
    code = "import sys; from megatron_moe.checkpoint import index, lock, plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
