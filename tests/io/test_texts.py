"""Sizes and durations as a person reads them."""

import pytest

from megatron_moe.io.texts import duration_text, size_text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0s"), (59.6, "1m00s"), (192, "3m12s"), (18420, "5h07m"), (183600, "2d03h"), (float("nan"), "?")],
)
def test_durations_have_at_most_two_units(seconds, shown):
    assert duration_text(seconds) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_500_000_000, "1.5 GB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes_have_the_largest_unit_that_fits(num_bytes, shown):
    assert size_text(num_bytes) == shown
    assert size_text(num_bytes, exact=True) == (shown if num_bytes < 1000 else f"{shown} ({num_bytes} bytes)")
