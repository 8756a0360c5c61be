"""The twenty kinds of bad data with a hundred random variants each, where the suite has ten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data import test_batches_faults as trials
from tests.data.test_batches_faults import OF_CONTENT as CONTENT
from tests.data.test_batches_faults import STRUCTURAL, scene  # noqa: F401
from tests.helpers.data_faults import Scene

KINDS: dict[str, Callable[[Scene, int], object]] = {
    **{fault.__name__: lambda at, number, fault=fault: trials.always_named(at, fault, number) for fault in STRUCTURAL},
    **{
        fault.__name__: lambda at, number, fault=fault: trials.named_or_harmless(at, fault, number) for fault in CONTENT
    },
    "token_beyond_vocabulary": trials.token_beyond_vocabulary,
    "file_replaced": trials.file_replaced,
    "too_few_tokens": trials.too_few_tokens,
    "bad_weights": trials.bad_weights,
    "stale_cache": trials.stale_cache,
    "bad_text": trials.bad_text,
}


def test_there_are_twenty_kinds() -> None:
    assert len(KINDS) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_is_named_or_harmless(
    scene: Scene,  # noqa: F811
    scaled: Callable[..., int],
    figure: Callable[..., None],
    kind: str,
) -> None:
    number = scaled(100)
    try:
        KINDS[kind](scene, number)
    except AssertionError:
        figure("data faults", trials=number, failures=1, kind=kind)
        raise
    figure("data faults", trials=number, failures=0, kind=kind)
