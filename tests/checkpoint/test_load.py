"""A damaged step is found before a weight of it is used, named with its file, and the one before it is taken."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from megatron_moe.checkpoint import errors, folder, load, state
from megatron_moe.checkpoint.plan import CheckpointSource, plan
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.report.jsonl import read_events
from tests.checkpoint import damage
from tests.checkpoint.checkpoint_steps import flip, make_step
from tests.helpers.rows import rows
from tests.helpers.trained_steps import SMALL, TINY, trained


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def found(flags: dict[str, Any], round_seconds: float = 10.0) -> tuple[str | None, list[str], list[str]]:
    """Name of the step that these flags load, or the error; the warnings; the lines of progress. On any rank."""
    told: list[str] = []
    run = replace(Run(), **flags)
    try:
        with mock.patch.object(errors, "ROUND_SECONDS", round_seconds):
            chosen = load.verified(run, plan(run), told.append)
    except ConfigError as error:
        return str(error), [], told
    return chosen.source.step.name if chosen.source else None, chosen.warnings, told


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (50, 100, 150):
        make_step(tmp_path, iteration, seed=iteration)
    return tmp_path


def test_the_newest_sound_step_is_taken_and_the_damaged_one_named(alone, root):
    none = str(root / "none")
    assert found({"load": none, "save": none}) == (None, [], [])
    assert found({"load": str(root)}) == ("iter_0000150", [], [])
    flip(root / "iter_0000150" / "__1_0.distcp")
    step, (warning,), _ = found({"load": str(root)})
    assert step == "iter_0000100"
    for words in ("CHECKPOINT WARNING: step 150 is damaged", "__1_0.distcp does not hold what was saved", str(root)):
        assert words in warning
    flip(root / "iter_0000100" / "common.pt")
    step, warnings, _ = found({"load": str(root)})
    assert step == "iter_0000050" and len(warnings) == 2
    flip(root / "iter_0000050" / "rng" / "rank_00000.pt")
    message, _, _ = found({"load": str(root)})
    assert "none of its 3 steps can be loaded" in message and "rng/rank_00000.pt" in message


def test_a_state_of_before_skipped_samples_had_equal_batches():
    moved = {"loss_scale_raised": 0, "loss_scale_lowered": 2}
    saved = {"iteration": 8, "consumed_samples": 64, "skipped_iterations": 2, **moved}
    for further, samples in (({}, 48), ({"skipped_samples": 20}, 44)):
        progress = state.TrainingProgress.of_state({**saved, **further})
        assert progress.committed_samples == samples


def test_a_random_state_has_what_was_drawn_ahead_and_on_another_layout_the_streams_are_new(tmp_path):
    def drawn() -> tuple[float, float, list[float]]:
        return random.gauss(), numpy.random.standard_normal(), torch.randn(2).tolist()

    groups.initialize(Run())
    groups.seed_everything(Run())
    drawn()  # Python and numpy draw two at a time
    before = state.current()
    wanted = drawn()
    state.restore(before)
    assert drawn() == wanted
    (note,) = load._load_random_state(Run(), CheckpointSource(tmp_path, {}, {"layout": {}, "iteration": 7}))
    drawn()
    assert "iteration 7" in note and drawn() != wanted
    groups.destroy()


def test_a_step_that_was_asked_for_is_an_error_where_it_is_damaged(alone, root):
    flip(root / "iter_0000100" / ".metadata")
    message, _, _ = found({"load": str(root), "ckpt_step": 100})
    assert "--ckpt-step 100: .metadata does not hold what was saved" in message
    assert "other complete steps: 50, 150" in message
    assert found({"load": str(root), "ckpt_step": 150})[0] == "iter_0000150"


def test_going_back_does_not_meet_the_damaged_step_when_saving_and_is_told(alone, root):
    flip(root / "iter_0000150" / "__0_0.distcp")
    run = replace(Run(), load=str(root), save=str(root))
    chosen = load.verified(run, plan(run), print)
    assert chosen.continues and chosen.start_iteration == 100
    assert f"verified {root / 'iter_0000100'}: 9 files" in chosen.notes[-1] and len(chosen.warnings) == 1
    # without verification damage goes unseen, and that is said loudly
    step, (warning,), _ = found({"load": str(root), "verify_checkpoint": False})
    assert step == "iter_0000150"
    assert "CHECKPOINT WARNING" in warning and "NOT VERIFIED (--no-verify-checkpoint)" in warning


def test_every_rank_hashes_a_share_waits_for_the_others_in_rounds_and_all_agree(gloo, root):
    results = gloo.run(2, found, flags={"load": str(root)}, round_seconds=0.0)
    assert [step for step, *_ in results] == ["iter_0000150"] * 2
    assert [bool(told) for *_, told in results] == [True, False]
    assert f"verifying {root / 'iter_0000150'}: " in results[0][2][0]
    flip(root / "iter_0000150" / "__1_0.distcp")
    results = gloo.run(2, found, flags={"load": str(root)})
    assert results[0] == results[1]
    assert results[0][0] == "iter_0000100" and "__1_0.distcp" in results[0][1][0]


def seen_by_rank(roots: list[str]) -> str:
    return str(found({"load": roots[torch.distributed.get_rank()]})[0])


def test_ranks_that_see_different_folders_all_stop(gloo, root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_step(other, 150, seed=7)
    for message in gloo.run(2, seen_by_rank, roots=[str(root), str(other)]):
        assert "the ranks see different checkpoints: step 150" in message and "on rank 1" in message


def complaint(root: Path, damaged: damage.Damage) -> str | None:
    """Why a damaged newest step was not handled as it should be: passed over for the one before, its file named."""
    step, warnings, _ = found({"load": str(root)})
    if step != "iter_0000100":
        return f"{damaged.kind} in {list(damaged.files)}: loaded {step}"
    if not any(name in warning for name in damaged.named for warning in warnings):
        return f"{damaged.kind} in {list(damaged.files)}: not named in {warnings}"
    return None


@pytest.mark.parametrize("trials", rows([4, 200], test=[4]))
def test_every_kind_of_damage_is_found_and_its_file_named(alone, root, trials):
    step, rng = root / "iter_0000150", random.Random(4)
    sound, earlier = damage.content(step), damage.content(root / "iter_0000100")
    damages = itertools.chain(
        damage.flips(sound, 3 * trials, rng),
        damage.truncations(sound, trials, rng),
        damage.zeroed_pages(sound, trials, rng),
        damage.misplaced(sound, earlier),
    )
    found_by_kind = damage.complaints(step, damages, lambda one: complaint(root, one))
    assert len(found_by_kind) == 7
    assert [one for answers in found_by_kind.values() for one in answers if one is not None] == []
    assert found({"load": str(root)}) == ("iter_0000150", [], [])


def test_a_run_goes_on_from_the_step_before_and_its_summary_says_so(gloo, alone, tmp_path):
    flags = {**SMALL, "save_interval": 1, "expert_model_parallel_size": 2}
    gloo.run(2, trained, flags={**flags, "train_iters": 2, "save": str(tmp_path)})
    flip(tmp_path / "iter_0000002" / "__1_0.distcp", 5000)
    both = {"load": str(tmp_path), "save": str(tmp_path)}
    metrics = tmp_path / "metrics.jsonl"
    summary, _ = gloo.run(2, trained, flags={**flags, **both, "train_iters": 3, "metrics_file": str(metrics)})
    (warning,) = summary["checkpoint_warnings"]
    events = {event.kind: event for event in read_events(metrics)}
    assert warning in {event.text for event in read_events(metrics) if event.kind == "warning"}
    assert events["loaded"].facts == {"path": str(tmp_path / "iter_0000001")}
    assert "step 2 is damaged and passed over: __1_0.distcp does not hold what was saved" in warning
    # step 2 was made again, what was damaged is kept under another name, and nothing is wrong any more
    assert folder.steps(tmp_path) == [1, 2, 3] and (tmp_path / "iter_0000002.bad").is_dir()
    assert found({**TINY, **flags, "load": str(tmp_path)})[:2] == ("iter_0000003", [])
