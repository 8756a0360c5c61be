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


@pytest.mark.parametrize(("start", "shape"), [((1, 0), (6, 4)), ((3, 1), (2, 2)), ((2, 0), (1, 4))])
def test_a_box_is_read_into_the_memory_that_is_given(tmp_path, start, shape):
    tensors = {"rows": torch.randn(8, 4), "columns": torch.randn(4, 8).t()}
    reader = StepReader(make_step(tmp_path, 50, tensors=tensors))
    for name, tensor in tensors.items():
        given = torch.full(shape, torch.nan)
        assert reader.read(name, start, shape, given) is given
        assert torch.equal(given, tensor[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]])


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
