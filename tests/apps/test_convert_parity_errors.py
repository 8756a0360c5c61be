"""Conversion errors planted on purpose, at every place where one can be made: none gets through.

Each is planted in this process and shown to be noticed, for its own reason: by the coverage of the table, by the
certificate, or by the comparison with transformers. Without an error, all pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.apps.convert.parity import Parity, compare_with
from megatron_moe.apps.convert.reference_model import ReferenceResult, run_model
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf import opened as opening
from megatron_moe.hf.opened import opened
from megatron_moe.hf.source import locate
from megatron_moe.parallel import groups
from tests.apps.planted_names import NAMES, NUMBERS, TRANSFORMS
from tests.apps.planted_settings import COMPUTED, CONSTANTS, COVERED
from tests.apps.planting import COVERAGE, PARITY, Plant
from tests.helpers import tiny_models

IMPORTED = [*NAMES, *TRANSFORMS, *NUMBERS, *CONSTANTS, *COMPUTED, *COVERED]


@dataclass(frozen=True)
class Baseline:
    """A folder, tokens, and what transformers computes on them."""

    folder: Path
    tokens: torch.Tensor
    reference: ReferenceResult


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, seed) -> its baseline; made once."""

    @cache
    def made(case: str, seed: int = 5) -> Baseline:
        folder = tmp_path_factory.mktemp(case) / "hf"
        model = tiny_models.make(case, seed, folder)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, tiny_models.VOCABULARY, (2, 32), generator=generator)
        return Baseline(folder, tokens, run_model(model, tokens))

    return made


@pytest.fixture(scope="module", autouse=True)
def one_set_of_groups() -> Iterator[None]:
    """The groups of one process for all models of this file: starting them takes longer than a model."""
    collection = groups.initialize(Run())
    same = SimpleNamespace(initialize=lambda run: collection, destroy=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "groups", same)
        patch.setattr(opening, "dist", SimpleNamespace(is_initialized=lambda: False))
        yield
    groups.destroy()


def imported(baseline: Baseline) -> Parity:
    with opened(locate(baseline.folder)) as found:
        return compare_with(baseline.reference, found, baseline.tokens)


@pytest.mark.parametrize("seed", (5, 6))
@pytest.mark.parametrize("case", tiny_models.CASES)
def test_without_a_planted_error_every_family_agrees_with_transformers(baseline: Any, case: str, seed: int) -> None:
    result = imported(baseline(case, seed))
    assert result.passed, result.failures
    assert result.logit_difference < 1e-4
    assert sum(one.tokens for one in result.choices.values()) >= 2 * 64
    assert all(one.equal == one.tokens for one in result.choices.values())


@pytest.mark.parametrize("plant", IMPORTED, ids=str)
def test_an_error_in_the_import_is_noticed(plant: Plant, baseline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = baseline(plant.case)
    plant.breaks(monkeypatch)
    if plant.caught == COVERAGE:
        with pytest.raises(ConfigError) as error:
            imported(sound)
        assert re.search(plant.reason, str(error.value)), error.value
        return
    assert plant.caught == PARITY
    result = imported(sound)
    assert not result.passed
    assert re.search(plant.reason, "\n".join(result.failures)), result.failures


def test_at_least_a_hundred_different_errors_are_planted() -> None:
    assert len({str(plant) for plant in IMPORTED}) == len(IMPORTED)
    assert len({plant.name for plant in IMPORTED}) >= 100
    assert Counter(plant.caught for plant in IMPORTED)[PARITY] >= 100
