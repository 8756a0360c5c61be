"""R4: bytes of a step that change on the disk: found before a weight is used, named, the step before taken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint.load import verified
from megatron_moe.checkpoint.plan import plan
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build
from tests.checkpoint import damage
from tests.helpers.trained_steps import TINY, trained

FLIPS, TRUNCATIONS, ZEROED_PAGES = 1000, 200, 200


@pytest.fixture(scope="module")
def root(gloo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two ranks, as a run saves them."""
    folder = tmp_path_factory.mktemp("steps")
    flags = {"expert_model_parallel_size": 2, "train_iters": 2, "save_interval": 1, "save": str(folder)}
    gloo.run(2, trained, flags=flags)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def damages(step: Path, earlier: Path, scaled: Callable[..., int], seed: int) -> Iterator[damage.Damage]:
    sound, rng = damage.content(step), random.Random(seed)
    return itertools.chain(
        damage.flips(sound, scaled(FLIPS), rng),
        damage.truncations(sound, scaled(TRUNCATIONS), rng),
        damage.zeroed_pages(sound, scaled(ZEROED_PAGES), rng),
        damage.misplaced(sound, damage.content(earlier)),
    )


def complaint(root: Path, one: damage.Damage) -> str | None:
    """Why a damaged newest step was not passed over for the one before, or refused where it was asked for."""
    flags = {**TINY, "expert_model_parallel_size": 2, "train_iters": 2, "load": str(root)}
    run = build(flags)
    chosen = verified(run, plan(run), print)
    if chosen.source is None or chosen.source.iteration != 1:
        return f"{one.kind} of {list(one.files)}: loaded {chosen.source}"
    if not any(name in warning for warning in chosen.warnings for name in one.named):
        return f"{one.kind} of {list(one.files)}: not named in {chosen.warnings}"
    asked = build({**flags, "ckpt_step": 2})
    try:
        verified(asked, plan(asked), print)
    except ConfigError:
        return None
    return f"{one.kind} of {list(one.files)}: loaded where it was asked for"


def test_all_damage_is_found_before_a_weight_is_used(alone, root, scaled, figure):
    step = root / "iter_0000002"
    found = damage.tally(step, damages(step, root / "iter_0000001", scaled, 4), lambda one: complaint(root, one))
    for kind, trials in found.trials.items():
        figure(f"R4 {kind}", trials=trials, failures=found.missed[kind])
    assert found.first == {}
