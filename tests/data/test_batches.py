"""Micro-batches: one global order whatever the layout, resumable by one number, the same on all ranks that need it."""

import hashlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe.data.batches import (
    KEYS,
    added,
    batch_iterators,
    hex_of,
    micro_batch_indices,
    pairs_and_padding,
    sample_words,
    words_of,
)
from megatron_moe.data.datasets import build_datasets, reads_data
from megatron_moe.data.tokenizers import NullTokenizer
from megatron_moe.parallel import groups
from megatron_moe.training.batch_size import BatchSchedule
from tests.helpers.rows import rows

S = 8


class Numbered(torch.utils.data.Dataset):
    """Sample i has tokens i, labels i + 1."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.full((S,), i),
            "labels": torch.full((S,), i + 1),
            "loss_mask": (torch.arange(S) != i % S).float(),
            "position_ids": torch.arange(S) + i,
        }


def make_run(**changes: object) -> Any:
    return build({"seq_length": S, "vocab_size": 1000, "micro_batch_size": 2, **changes})


@pytest.mark.parametrize("length, rounds", [(8, 2), (9, 2), (11, 2), (12, 3), (3, 0)])
def test_all_ranks_end_together_where_a_full_round_no_longer_fits(length, rounds):
    for rank in range(2):
        taken = list(micro_batch_indices(0, 2, rank, 2, length))
        assert len(taken) == rounds
        assert all(i < length for indices in taken for i in indices)


def test_a_batch_is_the_samples_stacked_and_takes_no_random_number():
    before = torch.get_rng_state()
    batch = next(batch_iterators(Numbered(), make_run(), consumed_samples=4)[0])
    assert torch.equal(torch.get_rng_state(), before)
    for row, i in enumerate((4, 5)):
        for key, value in Numbered()[i].items():
            assert torch.equal(batch[key][row], value)
            assert batch[key].dtype == value.dtype


def test_reading_ahead_in_processes_changes_nothing():
    plain = batch_iterators(Numbered(), make_run(), consumed_samples=6)[0]
    ahead = batch_iterators(Numbered(), make_run(num_workers=2), consumed_samples=6)[0]
    for _ in range(29):
        one, other = next(plain), next(ahead)
        assert all(torch.equal(one[key], other[key]) for key in KEYS)
    assert plain.take_sample_words() == ahead.take_sample_words()
    for iterator in (plain, ahead):
        with pytest.raises(IndexError, match=r"after number 64 .* dataset of 64"):
            next(iterator)


def test_an_id_outside_the_vocabulary_is_named_before_it_reaches_the_model():
    iterator = batch_iterators(Numbered(), make_run(vocab_size=12))[0]
    for _ in range(5):
        next(iterator)  # samples 0 to 9, labels to 10
    with pytest.raises(ValueError, match=r"token id 12 in sample 1\d, outside the vocabulary of 12"):
        next(iterator)


def test_a_rank_that_reads_needs_a_dataset():
    with pytest.raises(ValueError, match="dataset is None"):
        batch_iterators(None, make_run())[0]


# ---- on ranks


def read(changes: dict[str, Any], words: list[str], steps: int) -> dict[str, Any]:
    """What one rank of a layout gets from a blend of files, beginning after 4 samples."""
    run = make_run(data_path=words, split="80,20,0", seed=7, **changes)
    collection = groups.initialize(run)
    train, valid, test = build_datasets(run, NullTokenizer(1000), 64, 16, 0, pg_collection=collection)
    assert test is None and (train is not None) == (valid is not None) == reads_data(run, collection)
    iterators = batch_iterators(train, run, consumed_samples=4, pg_collection=collection)
    batches = [[next(iterator) for iterator in iterators] for _ in range(steps)]
    facts = groups.rank_facts()
    return {
        "facts": {axis: getattr(facts, f"{axis}_rank") for axis in ("tp", "pp", "cp", "dp")},
        "reads": train is not None,
        "batches": [
            [{k: None if v is None else v.tolist() for k, v in batch.items()} for batch in step] for step in batches
        ],
        "dtypes": [str(v.dtype) for v in batches[0][0].values() if v is not None],
        "consumed": iterators[0].consumed_samples,
    }


@pytest.fixture
def words(write_ids: Callable[..., str]) -> list[str]:
    """A blend of two datasets, which all ranks build together."""
    first, second = ([[100 * i + j] * 7 for j in range(80)] for i in range(2))
    return ["1", write_ids(first, name="first"), "2", write_ids(second, name="second")]


def oracle(gloo: Any, words: list[str], count: int) -> dict[str, list]:
    """`count` samples from number 4 on, read by one rank."""
    (alone,) = gloo.run(1, read, changes={"micro_batch_size": 1}, words=words, steps=count)
    return {key: [step[0][key][0] for step in alone["batches"]] for key in KEYS}


PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
# name -> (ranks, flags, (pipeline rank, chunk) that need tokens)
LAYOUTS = {
    "DP4": (4, {}, {(0, 0)}),
    "TP2 DP2": (4, {"tensor_model_parallel_size": 2}, {(0, 0)}),
    "PP2 DP2": (4, PP2, {(0, 0), (1, 0)}),
    "PP4": (4, PP4, {(0, 0), (3, 0)}),
    "PP2 with 2 virtual stages": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}, {(0, 0), (1, 1)}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, **PP2}, {(0, 0), (1, 0)}),
    "predictions before the loss": (
        4,
        {**PP4, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "E|t|t|t|t|t|m|L"},
        {(0, 0), (2, 1), (3, 1)},
    ),
    "EP2": (2, {"expert_model_parallel_size": 2, "num_experts": 4}, {(0, 0)}),
}
FEW = ["TP2 DP2", "PP2 with 2 virtual stages", "predictions before the loss"]


@pytest.mark.engine
@pytest.mark.parametrize("name", rows(LAYOUTS, test=FEW))
def test_every_rank_gets_its_rows_of_the_same_global_batches(gloo, words, name):
    world, changes, wanted_by = LAYOUTS[name]
    results = gloo.run(world, read, changes=changes, words=words, steps=3)
    dp_size = 1 + max(result["facts"]["dp"] for result in results)
    expected = oracle(gloo, words, 6 * dp_size)
    for result in results:
        facts = result["facts"]
        assert result["reads"] == (facts["tp"] == 0 and facts["pp"] in {rank for rank, _ in wanted_by})
        assert result["consumed"] == 4 + 6 * dp_size
        for step, chunks in enumerate(result["batches"]):
            begin = step * 2 * dp_size + 2 * facts["dp"]
            for chunk, batch in enumerate(chunks):
                reads = (facts["pp"], chunk) in wanted_by
                assert batch == {key: expected[key][begin : begin + 2] if reads else None for key in KEYS}
        if result["dtypes"]:
            assert result["dtypes"] == ["torch.int64", "torch.int64", "torch.float32", "torch.int64"]


def test_context_parallel_ranks_share_the_samples_and_split_the_sequence(gloo, words):
    results = gloo.run(2, read, changes={"context_parallel_size": 2}, words=words, steps=1)
    expected = oracle(gloo, words, 2)
    for result in results:
        rank = result["facts"]["cp"]
        positions = [*range(2 * rank, 2 * rank + 2), *range(6 - 2 * rank, 8 - 2 * rank)]
        for key in KEYS:
            assert result["batches"][0][0][key] == [[row[p] for p in positions] for row in expected[key]]


# ---- the hash of what a step read


def step_hash(samples: list[tuple[int, torch.Tensor]]) -> str | None:
    return hex_of(*added(sample_words(number, sample) for number, sample in samples))


def test_the_hash_of_a_step_sees_every_change_and_no_order_of_ranks():
    samples = [(number, torch.full((4, 8), number)) for number in range(6)]
    whole = step_hash(samples)
    assert whole == step_hash(samples[::-1]) and whole is not None and len(whole) == 16
    swapped = [(number, samples[(number + 1) % 6][1]) for number in range(6)]  # the same samples in other places
    changed = [*samples[:5], (5, samples[5][1].clone().index_fill_(1, torch.tensor([7]), 0))]
    others = [samples[:5], [*samples, samples[5]], swapped, changed, [(n + 1, s) for n, s in samples]]
    assert len({whole, *map(step_hash, others)}) == 6
    assert hex_of(*added([])) is None


def test_sums_of_many_hashes_are_exact():
    low, high = words_of(3, b"a sample")
    whole = hashlib.blake2b((3).to_bytes(8, "little") + b"a sample", digest_size=8).digest()
    assert int(low) + (int(high) << 32) == int.from_bytes(whole, "little")
    words = [sample_words(number, torch.zeros(4, 2, dtype=torch.int64)) for number in range(3000)]
    low, high = sum(int(a) for a, _ in words), sum(int(b) for _, b in words)
    assert added(words) == (low, high) and hex_of(low, high) == f"{high % 2**32:08x}{low % 2**32:08x}"


# ---- R6: another number of data-parallel ranks reads the same samples, in the same order


def one(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def read_by(dp: int, micro_batch: int, steps: int, consumed: int, ramp: Any) -> tuple[list[int], list[str | None], int]:
    """Samples in the order in which a global batch is laid out, the hash of each step, and where it ends."""
    run = make_run(micro_batch_size=micro_batch)
    groups = [SimpleNamespace(tp=one(), pp=one(), cp=one(), dp=one(rank, dp)) for rank in range(dp)]
    ranks = [batch_iterators(Numbered(512), run, consumed_samples=consumed, pg_collection=g)[0] for g in groups]
    schedule = BatchSchedule(micro_batch, dp, 16, ramp)
    order: list[int] = []
    hashes = []
    for _ in range(steps):
        for _ in range(schedule.num_micro_batches(consumed)):
            for rank in ranks:
                order += next(rank)["tokens"][:, 0].tolist()
        consumed += schedule.global_batch_size(consumed)
        hashes.append(hex_of(*added(rank.take_sample_words() for rank in ranks)))
    return order, hashes, consumed


def test_pairs_and_padding_of_documents_are_counted_once_whatever_shares_them():
    class Apart(Numbered):
        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {**super().__getitem__(i), "documents": torch.tensor([0, 1, 1, 1, 4, 4, -1, -1])}

    run = make_run(reset_attention_mask=True, context_parallel_size=2)
    found: list[tuple[int, int]] = []
    for cp, dp in itertools.product(range(2), repeat=2):
        groups = SimpleNamespace(tp=one(), pp=one(), cp=one(cp, 2), dp=one(dp, 2))
        iterator = batch_iterators(Apart(), run, pg_collection=groups)[0]
        next(iterator)
        found += [iterator.take_pairs_and_padding(), iterator.take_pairs_and_padding()]
    assert tuple(map(sum, zip(*found))) == (2 * 2 * (1 + 6 + 3), 2 * 2 * 2)
    assert pairs_and_padding(torch.tensor([[0, 0, -1, -1]])) == (3, 2)


@pytest.mark.parametrize("ramp", [None, (8, 4, 90)])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((1, 2, 4), 2)))
def test_samples_are_read_on_in_one_order_none_missing_none_twice(before, after, ramp):
    whole, hashes, end = read_by(1, 4, 20, 0, ramp)
    assert whole == list(range(end)) and None not in hashes
    for cut in (1, 9):
        first, told, consumed = read_by(before, 1, cut, 0, ramp)
        second, more, last = read_by(after, 4 // after, 20 - cut, consumed, ramp)
        # not sorted before they are compared
        assert first + second == whole
        assert last == end and told + more == hashes
