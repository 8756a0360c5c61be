"""The hash of what a step read: one sample more, less, changed or elsewhere, and it is another."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe.data.batches import added, batch_iterator, hex_of, sample_words
from tests.data.test_batches import Numbered, make_run

pytestmark = pytest.mark.engine


def step_hash(samples: list[tuple[int, torch.Tensor]]) -> str | None:
    return hex_of(*added(sample_words(number, sample) for number, sample in samples))


def test_the_hash_of_a_step_sees_every_change_and_no_order_of_ranks() -> None:
    samples = [(number, torch.full((4, 8), number)) for number in range(6)]
    whole = step_hash(samples)
    assert whole == step_hash(samples[::-1]) and whole is not None and len(whole) == 16
    swapped = [(number, samples[(number + 1) % 6][1]) for number in range(6)]  # the same samples in other places
    changed = [*samples[:5], (5, samples[5][1].clone().index_fill_(1, torch.tensor([7]), 0))]
    others = [samples[:5], [*samples, samples[5]], swapped, changed, [(n + 1, s) for n, s in samples]]
    assert len({whole, *map(step_hash, others)}) == 6
    assert hex_of(*added([])) is None


def test_sums_of_many_hashes_are_exact() -> None:
    words = [sample_words(number, torch.zeros(4, 2, dtype=torch.int64)) for number in range(3000)]
    low, high = sum(int(a) for a, _ in words), sum(int(b) for _, b in words)
    assert added(words) == (low, high) and hex_of(low, high) == f"{high % 2**32:08x}{low % 2**32:08x}"


def test_a_run_of_batches_has_the_hash_of_its_samples_whatever_their_size_and_readers() -> None:
    taken = []
    for flags, reads in (({"micro_batch_size": 1}, 8), ({}, 4), ({"micro_batch_size": 4, "num_workers": 1}, 2)):
        batches = batch_iterator(Numbered(), make_run(**flags), consumed_samples=8)
        for _ in range(reads):
            next(batches)
        taken.append(batches.take_sample_words())
        assert batches.take_sample_words() == (0.0, 0.0)
    assert len(set(taken)) == 1 and hex_of(*taken[0]) is not None
    elsewhere = batch_iterator(Numbered(), build({"seq_length": 8, "vocab_size": 1000}), consumed_samples=9)
    for _ in range(8):
        next(elsewhere)
    assert elsewhere.take_sample_words() != taken[0]
