"""Which documents share a sequence: all predictions of an epoch once, greedily or with best-fit decreasing."""

from itertools import pairwise

import numpy
import pytest

from megatron_moe.data.packing import pack, part_sizes


def slowly(sizes: list[int], length: int, packing: str) -> list[int]:
    """The free positions of each sequence, one part at a time."""
    rooms: list[int] = []
    for size in sizes if packing == "greedy" else sorted(sizes, reverse=True):
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= size]
        if packing == "greedy":
            fitting = [one for one in fitting if one[1] == len(rooms) - 1]
        if not fitting:
            rooms.append(length)
        at = min(fitting)[1] if fitting else len(rooms) - 1
        rooms[at] -= size
    return sorted(rooms)


@pytest.mark.parametrize("packing", ["greedy", "best-fit"])
def test_every_prediction_is_in_one_sequence_as_the_rule_says(packing):
    random = numpy.random.default_rng(0)
    for seed in range(300):
        length, number = int(random.integers(1, 40)), int(random.integers(0, 60))
        lengths = random.integers(0, 3 * length + 2, number + 5).astype(numpy.int32)
        documents = random.permutation(number + 5)[:number].astype(numpy.int32)
        parts, begins = pack(lengths, documents, length, seed, packing)
        sizes = part_sizes(lengths, parts, length)
        predicted = [(d, at) for (d, first), size in zip(parts, sizes) for at in range(first, first + size)]
        assert sorted(predicted) == sorted((d, at) for d in documents for at in range(lengths[d] - 1))
        rooms = [length - int(sizes[one:end].sum()) for one, end in pairwise(begins)]
        in_order = numpy.random.RandomState(seed).permutation(documents)
        whole = [min(length, int(lengths[d]) - 1 - at) for d in in_order for at in range(0, lengths[d] - 1, length)]
        assert sorted(rooms) == slowly(whole, length, packing)
