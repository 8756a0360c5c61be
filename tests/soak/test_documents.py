"""Documents that do not see each other: 2,000 packed sequences under the layouts of a covering array."""

import math

from tests.helpers.model_cases import SEQUENCES
from tests.numbers.test_documents_apart import PACKED, require_as_alone

AT_ONCE = 10  # batches of SEQUENCES
STILL = {"lr": 1e-30, "moe_router_bias_update_rate": 0.0}
"""Each packing meets the same weights."""


def test_each_document_of_two_thousand_sequences_is_as_alone(gloo, scaled, figure):
    wrong, tries, batches = [], 0, math.ceil(2000 / SEQUENCES / len(PACKED))
    for preset, number, ranks, flags in PACKED:
        for first in range(0, scaled(batches), AT_ONCE):
            tries += AT_ONCE * SEQUENCES
            try:
                numbers = [1000 * number + first + one for one in range(AT_ONCE)]
                require_as_alone(gloo, preset, numbers, ranks, flags, **STILL)
            except AssertionError as error:
                wrong.append(f"{preset}, {ranks} ranks, {flags}, packings {numbers}: {error}")
    figure("documents apart", trials=tries, failures=len(wrong))
    assert wrong == []
