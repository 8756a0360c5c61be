"""Entropy of tokens under their own frequencies: what a model that ignores context can reach at best.

H = -sum_v p_v ln p_v with p_v = count_v / total, in nats per token (Shannon 1948), comparable to a cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy

from megatron_moe.data.index_file import open_index


def entropy_of_counts(counts: numpy.ndarray) -> float:
    """Entropy in nats of int counts [V]; zero counts add nothing.

    Raises:
        ValueError: no counts above zero.
    """
    total = int(counts.sum())
    if total <= 0:
        raise ValueError("the entropy of no tokens is not defined")
    p = counts[counts > 0] / total
    return float(-(p * numpy.log(p)).sum())


def unigram_entropy(source: str | Any) -> float:
    """Entropy in nats per token of all tokens of an indexed dataset.

    Args:
        source: a prefix (path without .bin/.idx), or the engine's IndexedDataset, or anything that yields 1-D integer
            arrays, one per document.
    """
    if isinstance(source, str):
        return entropy_of_counts(_count(tokens for _, tokens in open_index(source).chunks()))
    return entropy_of_counts(_count(source[i] for i in range(len(source))))


def label_entropy(dataset: Any, num_samples: int) -> float:
    """Entropy in nats per token of the labels that count in the first `num_samples` samples of a dataset.

    These are the very tokens that an evaluation over those samples predicts.

    Args:
        dataset: samples with `labels` int64 [S] and `loss_mask` float [S].
    """
    samples = (dataset[i] for i in range(num_samples))
    return entropy_of_counts(_count(s["labels"][s["loss_mask"] > 0].numpy() for s in samples))


def _count(arrays: Iterable[numpy.ndarray]) -> numpy.ndarray:
    """Occurrences of each id, int64 [largest id + 1]."""
    counts: numpy.ndarray = numpy.zeros(0, dtype=numpy.int64)
    for array in arrays:
        new = numpy.bincount(array)
        if len(new) > len(counts):
            new[: len(counts)] += counts
            counts = new
        else:
            counts[: len(new)] += new
    return counts
