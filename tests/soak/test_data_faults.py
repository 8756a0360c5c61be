"""The twelve kinds of bad data with two hundred random variants each, where the suite has four."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data.data_faults import KINDS, Scene, run_trials
from tests.data.test_batches_faults import files  # noqa: F401


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_is_named_or_harmless(
    files: Scene,  # noqa: F811
    scaled: Callable[..., int],
    figure: Callable[..., None],
    kind: str,
) -> None:
    number = scaled(200)
    try:
        run_trials(files, kind, number)
    except AssertionError:
        figure("data faults", trials=number, failures=1, kind=kind)
        raise
    figure("data faults", trials=number, failures=0, kind=kind)
