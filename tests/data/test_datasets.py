"""The engine's datasets as this project builds them: samples, splits, blends, caches."""

import logging
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build
from megatron_moe.data import datasets
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizers import NullTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("process_group")]

VOCABULARY = 1000
S = 8


def make_run(**changes: object) -> Run:
    return build({"seq_length": S, "seed": 5, **changes})


def splits(*samples: int, **flags: object) -> Any:
    """The datasets of a run of these flags, for so many samples of training, validation and test."""
    return build_datasets(make_run(**flags), NullTokenizer(VOCABULARY), *samples)


def built(samples: int, **flags: object) -> Any:
    """The training data of a run of these flags that has no other."""
    return splits(samples, 0, 0, split="1,0,0", **flags)[0]


def rows(dataset: Any, count: int | None = None) -> list[list[int]]:
    """tokens plus the last label of each sample: the S + 1 ids it was made of."""
    samples = [dataset[i] for i in range(len(dataset) if count is None else count)]
    return [[*s["tokens"].tolist(), int(s["labels"][-1])] for s in samples]


@pytest.fixture
def counting(write_ids: Callable[..., str]) -> str:
    """60 documents of 10 ids: the token at position p of the whole has id p."""
    return write_ids([list(range(10 * i, 10 * i + 10)) for i in range(60)], vocab_size=VOCABULARY)


def test_a_split_of_no_samples_is_none_and_an_empty_one_does_not_hang(write_ids):
    paths = [write_ids([[1] * 20] * 20, vocab_size=VOCABULARY)]  # 969,30,1 leaves valid 1 and test 0 documents
    train, valid, test = splits(10, 2, 0, data_path=paths)
    assert len(train) >= 10 and len(valid) >= 2 and test is None
    with pytest.raises(ConfigError, match="test split has 0 tokens"):
        splits(10, 2, 1, data_path=paths)
    assert splits(10, 0, 0, data_path=paths)[1:] == (None, None)


def test_the_order_is_that_of_the_seed_mapped_or_not(counting):
    def order(**flags: object) -> list[list[int]]:
        return rows(built(40, data_path=[counting], **flags), 40)

    assert order(seed=1) == order(seed=1) == order(seed=1, no_mmap_bin_files=True)
    assert order(seed=1) != order(seed=2)


def test_paths_per_split_feed_their_own_split(write_ids):
    a, b, c = (write_ids([[i] * 30] * 10, name=name, vocab_size=VOCABULARY) for i, name in enumerate("abc"))
    datasets = splits(20, 10, 10, train_data_path=[a], valid_data_path=[b], test_data_path=["1", c])
    for i, dataset in enumerate(datasets):
        assert {token for row in rows(dataset, 10) for token in row} == {i}
    assert splits(20, 0, 0, train_data_path=[a])[1:] == (None, None)
    with pytest.raises(ConfigError, match="no valid data"):
        splits(20, 10, 0, train_data_path=[a])


@pytest.mark.parametrize("per_split", [False, True])
def test_a_blend_draws_in_proportion_to_its_weights(write_ids, per_split):
    words = []
    for i, weight in enumerate(("5", "3", "2")):
        words += [weight, write_ids([[i] * 30] * 20, name=f"d{i}", vocab_size=VOCABULARY)]
    flags = {"train_data_path": words} if per_split else {"data_path": words, "split": "100,0,0"}
    train, _, _ = splits(100, 0, 0, **flags)
    drawn = [row[0] for row in rows(train, 100)]
    assert [drawn.count(i) for i in range(3)] == [50, 30, 20]
    assert drawn[:10].count(0) == 5  # in proportion all along, not one after the other


def test_end_of_document_flags_reach_the_samples(write_ids):
    prefix = write_ids([[1, 2, 4]] * 30, vocab_size=6)
    tokenizer = NullTokenizer(6)
    tokenizer.eod = 4
    run = make_run(data_path=[prefix], split="1,0,0", reset_position_ids=True, eod_mask_loss=True)
    sample = build_datasets(run, tokenizer, 4, 0, 0)[0][0]
    assert sample["loss_mask"].tolist() == [float(i != 4) for i in sample["tokens"].tolist()]
    assert sample["position_ids"].tolist() == list(range(S)), "no rotary position goes by an eod alone"


APART = {"reset_attention_mask": True, "reset_position_ids": True}
BOUNDARIES = {  # document_boundaries, packing -> documents, positions and the labels that count, of tokens 9 1 2 3 4 5
    ("index", "none"): ([0, 0, 0, 3], [0, 1, 2, 0], [1, 1, 0, 1]),
    ("eod", "none"): ([0, 1, 1, 1], [0, 0, 1, 2], [0, 1, 1, 1]),
    ("index", "greedy"): ([0, 0, 2, 2], [0, 1, 0, 1], [1, 1, 1, 1]),
    ("eod", "greedy"): ([0, 1, 2, 2], [0, 0, 0, 1], [0, 1, 1, 1]),
}


@pytest.mark.parametrize(("boundaries", "packing"), BOUNDARIES)
def test_documents_begin_where_the_index_or_an_eod_says(write_ids, monkeypatch, boundaries, packing):
    monkeypatch.setattr(datasets.numpy.random, "RandomState", lambda seed: _InOrder())
    prefix, tokenizer = write_ids([[9, 1, 2], [3, 4, 5]], vocab_size=VOCABULARY), NullTokenizer(VOCABULARY)
    tokenizer.eod = 9
    flags = {"document_boundaries": boundaries, "packing": packing, "split": "1,0,0", **APART}
    sample = build_datasets(make_run(data_path=[prefix], seq_length=4, **flags), tokenizer, 1, 0, 0)[0][0]
    assert sample["tokens"].tolist() == ([9, 1, 2, 3] if packing == "none" else [9, 1, 3, 4])
    keys = ("documents", "position_ids", "loss_mask")
    assert tuple(sample[key].tolist() for key in keys) == BOUNDARIES[boundaries, packing]


class _InOrder:
    def shuffle(self, array: Any) -> None: ...

    def permutation(self, given: Any) -> Any:
        return datasets.numpy.arange(given) if isinstance(given, int) else given


@pytest.mark.parametrize("packing", ["greedy", "best-fit"])
def test_packed_samples_have_every_prediction_once_and_no_loss_on_padding(write_ids, packing):
    documents = [list(range(100 * i, 100 * i + length)) for i, length in enumerate((1, 2, 3, 9, 5, 18, 7, 4))]
    prefix = write_ids(documents, vocab_size=VOCABULARY)
    train = built(1, data_path=[prefix], packing=packing, **APART)
    found = []
    for sample in (train[i] for i in range(len(train))):
        mask, padding = sample["loss_mask"] > 0, sample["documents"] < 0
        assert torch.equal(mask, ~padding) and not sample["tokens"][padding].any()
        assert torch.equal(sample["position_ids"][mask], (torch.arange(S) - sample["documents"])[mask])
        found += zip(sample["tokens"][mask].tolist(), sample["labels"][mask].tolist())
    assert sorted(found) == [pair for one in documents for pair in pairwise(one)]
    facts = train.facts()
    assert facts.padding == pytest.approx(1 - len(found) / (S * len(train)))
    assert facts.documents == 9 / len(train)  # the document of 18 tokens is three parts, that of one is none
    with pytest.raises(ConfigError, match="no document of two tokens"):
        built(1, data_path=[write_ids([[1]] * 20, name="ones")], packing=packing, **APART)


@pytest.mark.parametrize(("packing", "files"), [("none", 3), ("best-fit", 2)])
def test_the_index_cache_lies_where_it_was_asked_to_without_files_of_small_epochs(
    counting, tmp_path, monkeypatch, packing, files
):
    cache = tmp_path / "cache"
    flags = {"data_path": [counting], "data_cache_path": str(cache), "packing": packing}
    flags |= APART if packing != "none" else {}
    small = rows(built(200, **flags))
    of_one_epoch = len(list(cache.rglob("*.npy")))
    monkeypatch.setattr(datasets, "_SAMPLES_OF_A_SMALL_EPOCH", 59)
    large = rows(built(200, **flags))  # every epoch's is made at the start
    assert small == large and of_one_epoch == files and len(list(cache.rglob("*.npy"))) > 2 * files
    if packing != "none":  # what is in the cache is read, and what has been damaged is not
        one = next(cache.rglob("*-parts.npy"))
        one.write_bytes(one.read_bytes()[:-8])
        assert rows(built(200, **flags)) == large
        monkeypatch.setattr(datasets, "pack", None)
        assert rows(built(200, **flags)) == large
    assert not (Path(counting).parent / "index_cache").exists()
    built(20, data_path=[counting])
    assert list((Path(counting).parent / "index_cache").rglob("*.npy"))


def test_mock_data_is_the_same_every_time_and_within_the_vocabulary(caplog):
    run = make_run(mock_data=True, seq_length=128)
    first, second = (build_datasets(run, NullTokenizer(50), 30, 5, 0) for _ in range(2))
    assert rows(first[0], 30) == rows(second[0], 30)
    assert rows(first[1], 5) == rows(second[1], 5)
    assert first[2] is None and logging.getLogger(datasets._ENGINE_LOG).level < logging.ERROR
    ids = {i for row in rows(first[0], 30) for i in row}
    assert min(ids) >= 0 and max(ids) < 50
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(("length", "documents"), [(8, 2000), (128, 3200), (4000, 100_000), (8192, 100_000)])
def test_short_samples_of_made_up_data_are_not_many_more_than_long_ones(length, documents):
    for split in splits(2, 2, 2, mock_data=True, seq_length=length):
        assert len(split.dataset) == documents
        tokens = documents / 3 * 2048
        assert len(split) == pytest.approx(tokens / length, rel=0.1)


@pytest.mark.parametrize(("blend", "packing"), [(1, "none"), (2, "none"), (2, "greedy"), (1, "best-fit")])
def test_the_order_of_samples_does_not_depend_on_how_many_a_run_takes(counting, write_ids, blend, packing):
    flags = {} if packing == "none" else {"packing": packing, **APART}
    paths = [counting]
    if blend == 2:
        other = write_ids([list(range(700 + 5 * i, 705 + 5 * i)) for i in range(40)], name="o", vocab_size=VOCABULARY)
        paths = ["0.7", counting, "0.3", other]
    # 74 samples an epoch: a part of the first, one and a bit, four: what they share is the same
    longest = rows(built(300, data_path=paths, **flags), 300)
    for samples in (20, 74, 80, 148, 290):
        assert rows(built(samples, data_path=paths, **flags), samples) == longest[:samples], samples


def test_every_epoch_holds_every_token_once_in_an_order_of_its_own(counting):
    train = built(4 * 74, data_path=[counting])
    found = rows(train)
    assert rows(train, 74) == found[:74], "the first epoch, read again"
    epochs = [found[74 * i : 74 * (i + 1)] for i in range(4)]
    for epoch in epochs:
        tokens = [token for row in epoch for token in row[:-1]]
        assert len(set(tokens)) == len(tokens) == 74 * S
    assert len({str(epoch) for epoch in epochs}) == 4
    seeds = [datasets.epoch_seed(seed, epoch) for seed in (5, 6, 7) for epoch in range(4)]
    assert len(set(seeds)) == len(seeds), "runs with neighbouring seeds share an epoch"


def test_many_epochs_keep_few_files_open(counting, monkeypatch):
    monkeypatch.setattr(datasets, "_SAMPLES_OF_A_SMALL_EPOCH", 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # built, and read from the cache
        train = built(74 * 50, data_path=[counting])
    assert [len(train[i]["tokens"]) for i in (0, 74 * 50 - 1)] == [S, S]
    assert len(os.listdir("/proc/self/fd")) - before < 30
