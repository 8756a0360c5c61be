"""The data flags: what they mean."""

import pytest
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from megatron_moe.config.run_flags import DataConfig
from megatron_moe.data.checks import Blend, parse_split, read_sources


@pytest.mark.engine
@pytest.mark.parametrize("words", [("a",), ("1", "a"), ("0.3", "a", "7", "b")])
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
