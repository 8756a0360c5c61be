"""The data flags: what they mean, and what is refused before a file is opened."""

from __future__ import annotations

import pytest
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from megatron_moe.config.run_flags import DataConfig
from megatron_moe.data.sources import Blend, parse_split, read_sources
from tests.config.refused import refused


@pytest.mark.engine
@pytest.mark.parametrize("words", [("a",), ("a", "b", "c"), ("1", "a"), ("0.3", "a", "7", "b"), ("a", "b")])
def test_blends_mean_what_they_mean_to_the_engine(words):
    blend = read_sources(DataConfig(data_path=words)).blend
    prefixes, weights = get_blend_from_list(list(words))
    assert blend is not None and list(blend.prefixes) == list(prefixes)
    if len(prefixes) > 1:
        assert blend.weights == (None if weights is None else tuple(weights))


@pytest.mark.engine
@pytest.mark.parametrize("split", ["969,30,1", "1", "0,1", "99,1,0", ".5, .25,0.25", "100.0,0,0"])
def test_splits_mean_what_they_mean_to_the_engine(split):
    shares = parse_and_normalize_split(split)
    assert parse_split(split) == shares
    sources = read_sources(DataConfig(data_path=("a",), split=split))
    for number in (1, 7, 999, 100_003):
        for i, part in enumerate(convert_split_vector_to_split_matrix(shares)):
            begin, end = sources.sequence_range(i, number)
            if part is None:
                assert begin == end
            else:
                assert (begin, end) == tuple(int(round(x * float(number))) for x in part)  # noqa: RUF046


def test_paths_per_split_keep_their_split():
    data = DataConfig(train_data_path=("1", "a", "3", "b"), valid_data_path=("c",))
    sources = read_sources(data)
    assert [sources.blend_of(i) for i in range(3)] == [Blend(("a", "b"), (1.0, 3.0)), Blend(("c",), None), None]
    assert sources.prefixes() == ["a", "b", "c"]
    assert sources.sequence_range(1, 10) == (0, 10)


@pytest.mark.parametrize(
    "data, words",
    [
        (DataConfig(mock_data=True, data_path=("a",)), "--mock-data and --data-path"),
        (DataConfig(mock_data=True, valid_data_path=("a",)), "--mock-data and --valid-data-path"),
        (DataConfig(data_path=("a",), test_data_path=("b",)), "--data-path and --test-data-path"),
        (DataConfig(train_data_path=("a",), split="1,1,1"), "--split 1,1,1"),
        (DataConfig(data_path=("1", "a", "2")), "3 words; weights and prefixes come in pairs"),
        (DataConfig(data_path=("1", "a", "0", "b")), "weight 0 of b"),
        (DataConfig(data_path=("1", "a", "nan", "b")), "weight nan of b"),
        (DataConfig(data_path=("inf", "a", "1", "b")), "weight inf of a"),
        (DataConfig(data_path=("1", "a", "b", "c")), "weight b of c"),
        (DataConfig(data_path=("1", "2", "3", "4")), "2 is a number where a prefix is expected"),
        (DataConfig(data_path=("a", "1", "b")), "1 looks like a weight"),
        (DataConfig(train_data_path=("1", "a", "-2", "b")), "--train-data-path 1 a -2 b: weight -2"),
        (DataConfig(data_path=("a",), split="0,0,0"), "--split 0,0,0: the shares sum to zero"),
        (DataConfig(data_path=("a",), split="90,-5,5"), "--split 90,-5,5"),
        (DataConfig(data_path=("a",), split="1,2,3,4"), "--split 1,2,3,4"),
        (DataConfig(data_path=("a",), split="1e3,1"), "--split 1e3,1"),
    ],
)
def test_malformed_data_flags_are_refused_by_name(data, words):
    refused(lambda: read_sources(data), words)
