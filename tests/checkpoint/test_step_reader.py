"""A step's tensors, read box by box: from any cut, only the bytes needed, nothing but what the index says."""

from typing import Any

import pytest
import torch

from megatron_moe.checkpoint.step_reader import StepReader
from tests.checkpoint.checkpoint_steps import contents, make_step, put_step, saved, tensors_of


def test_a_box_is_read_from_whatever_parts_hold_it(tmp_path):
    step, wanted = make_step(tmp_path, 50), tensors_of(0)
    reader = StepReader(step)
    for key, tensor in wanted.items():
        assert torch.equal(reader.read(key), tensor) and reader.read(key).dtype == tensor.dtype
    key = "embedding.word_embeddings.weight"
    assert torch.equal(reader.read(key, (5, 3), (7, 9)), wanted[key][5:12, 3:12])
    assert torch.equal(reader.read(key, (8, 0), (8, 16)), wanted[key][8:])


def test_one_expert_is_read_without_the_others(tmp_path, monkeypatch):
    experts = torch.randn(8, 2, 6, 4)
    reader = StepReader(make_step(tmp_path, 50, tensors={"x": experts}))  # in two parts of four experts
    read, counts = StepReader._bytes, []
    monkeypatch.setattr(StepReader, "_bytes", lambda *args: counts.append(args[3].nbytes) or read(*args))
    assert torch.equal(reader.read("x", (5, 0, 0, 0), (1, 2, 6, 4)), experts[5:6])
    assert counts == [experts[5].nbytes]


@pytest.mark.parametrize("box", [slice(1, 7), slice(0, 8)])
def test_a_box_of_several_parts_is_read_into_the_memory_that_is_given(tmp_path, box):
    tensors = {"x": torch.randn(8, 3, 4), "y": torch.randn(4, 8).t()}
    reader = StepReader(make_step(tmp_path, 50, tensors=tensors))
    for name, start, shape in (("x", (box.start, 0, 1), (box.stop - box.start, 3, 2)), ("y", (box.start, 1), (1, 2))):
        expected = tensors[name][tuple(slice(first, first + length) for first, length in zip(start, shape))]
        given = torch.full((*shape, 2), torch.nan)[..., 0].contiguous()
        assert reader.read(name, start, shape, given) is given and torch.equal(given, expected)


def test_a_part_with_strides_of_its_own_is_read_too(tmp_path):
    tensor = torch.arange(24.0).view(4, 6)
    step = make_step(tmp_path, 50, tensors={"x": tensor.t()})
    assert torch.equal(StepReader(step).read("x", (2, 1), (3, 2)), tensor.t()[2:5, 1:3])


@pytest.mark.parametrize("value", ["no tensor", torch.ones(2, 3), torch.ones(4, 4, dtype=torch.float64)])
def test_a_part_that_is_not_what_the_index_says_is_refused(tmp_path, value: Any):
    files = contents(50, tensors={"x": torch.ones(5, 4)})
    good, bad = saved(torch.ones(5, 4)), saved(value)
    files["__0_0.distcp"] = files["__0_0.distcp"].replace(good, bad[: len(good)] + bytes(max(0, len(good) - len(bad))))
    step = put_step(tmp_path, 50, files)
    with pytest.raises(ValueError, match=r"x in __0_0\.distcp"):
        StepReader(step).read("x")
