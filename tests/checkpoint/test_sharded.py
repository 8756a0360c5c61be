"""A range of a tensor's elements is a few boxes, which have these elements in their order."""

import itertools

import pytest
import torch

from megatron_moe.checkpoint.sharded import boxes_of_range


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (3, 1), (2, 3, 4), (3, 2, 1, 2)])
def test_the_boxes_of_a_range_have_its_elements_in_their_order(shape):
    elements = torch.arange(torch.Size(shape).numel())
    whole = elements.view(shape)
    for begin, end in itertools.combinations_with_replacement(range(len(elements) + 1), 2):
        boxes = list(boxes_of_range(shape, begin, end))
        assert len(boxes) <= 2 * len(shape) - 1 and all(len(box) == len(shape) for box in boxes)
        found = torch.cat([elements[:0], *(whole[box].flatten() for box in boxes)])
        assert torch.equal(found, elements[begin:end]), (begin, end)
