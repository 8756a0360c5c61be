"""The spans over which the plot averages the loads of experts: bounded, equal, and of every row."""

import numpy as np
import pytest

from megatron_moe.report.plot import Spans


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 17, 1000])
def test_spans_are_the_means_of_equal_parts_and_bounded(rows):
    values = np.random.default_rng(0).random((rows, 3))
    spans = Spans(most=4)
    for row in values:
        spans.add(row)
    means = spans.means()
    assert 1 <= len(means) <= 4 and spans.rows == rows
    # The narrowest power of two with which all rows fit into four spans.
    width = 2 ** max(0, int(np.ceil(np.log2(rows / 4))))
    assert spans.width == width
    wanted = [values[first : first + width].mean(axis=0) for first in range(0, rows, width)]
    np.testing.assert_allclose(means, wanted)
