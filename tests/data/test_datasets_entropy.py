"""Entropy in nats per token, against the definition and against known values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy
import pytest
import torch

from megatron_moe.data.datasets import open_dataset
from megatron_moe.data.index_file import entropy_of_counts, label_entropy, unigram_entropy

pytestmark = pytest.mark.engine


def plain_entropy(ids: list[int]) -> float:
    counts = Counter(ids)
    return sum(-c / len(ids) * math.log(c / len(ids)) for c in counts.values())


def test_entropy_of_equal_counts_is_the_logarithm_of_their_number() -> None:
    assert entropy_of_counts(numpy.array([7, 0, 7, 7, 7])) == pytest.approx(math.log(4), rel=1e-15)
    assert entropy_of_counts(numpy.array([0, 3])) == 0.0
    with pytest.raises(ValueError, match="no tokens"):
        entropy_of_counts(numpy.zeros(3, dtype=numpy.int64))


def test_prefix_and_open_dataset_give_the_entropy_of_all_tokens(
    write_ids: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = numpy.random.default_rng(0)
    documents = [rng.zipf(1.5, size=rng.integers(1, 50)).clip(0, 900).tolist() for _ in range(40)]
    expected = plain_entropy([i for document in documents for i in document])
    prefix = write_ids(documents)
    assert unigram_entropy(prefix) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy(open_dataset(prefix)) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr("megatron_moe.data.index_file._CHUNK_TOKENS", 7)
    assert unigram_entropy(prefix) == pytest.approx(expected, rel=1e-12)


def test_label_entropy_counts_what_an_evaluation_predicts() -> None:
    samples = [
        {"labels": torch.tensor([1, 1, 2]), "loss_mask": torch.tensor([1.0, 1.0, 0.0])},
        {"labels": torch.tensor([3, 3, 9]), "loss_mask": torch.tensor([1.0, 1.0, 1.0])},
        {"labels": torch.tensor([50, 50, 50]), "loss_mask": torch.ones(3)},
    ]
    assert label_entropy(samples, 2) == pytest.approx(plain_entropy([1, 1, 3, 3, 9]), rel=1e-15)
