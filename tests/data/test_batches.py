"""Micro-batches: one global order whatever the layout, resumable by one number, the same on all ranks that need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe.data.batches import (
    KEYS,
    batch_iterator,
    batch_iterators,
    micro_batch_indices,
)
from megatron_moe.data.datasets import build_datasets, reads_data
from megatron_moe.data.tokenizers import NullTokenizer
from megatron_moe.parallel import groups
from megatron_moe.parallel.sequence import context_parallel_slice

pytestmark = pytest.mark.engine

S = 8
MOCK_S = 128  # mock data is 68 million tokens, whose index grows with 1 / S


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


def global_order(schedule: list[tuple[int, int, int, int]], consumed: int, length: int = 1000) -> list[int]:
    """Samples in order of (step, micro-batch, rank, row) for steps of (global batch, micro-batch size, DP, -)."""
    order: list[int] = []
    for global_batch, size, dp, _ in schedule:
        ranks = [micro_batch_indices(consumed, size, rank, dp, length) for rank in range(dp)]
        for _ in range(global_batch // (size * dp)):
            for rank in ranks:
                order += next(rank)
        consumed += global_batch
    return order


@pytest.mark.parametrize("size, dp", [(1, 1), (2, 1), (1, 4), (4, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("consumed", [0, 8, 24])
def test_global_batches_are_the_next_samples_in_order_for_every_layout(size: int, dp: int, consumed: int) -> None:
    steps = [(8, size, dp, 0), (8, size, dp, 0), (16, size, dp, 0), (24, size, dp, 0)]
    assert global_order(steps, consumed) == list(range(consumed, consumed + 56))


def test_the_layout_may_change_between_steps() -> None:
    steps = [(8, 2, 2, 0), (8, 1, 4, 0), (8, 4, 1, 0), (8, 2, 4, 0)]
    assert global_order(steps, 0) == list(range(32))


def test_one_iterator_serves_a_growing_global_batch() -> None:
    ranks = [micro_batch_indices(0, 2, rank, 2, 1000) for rank in range(2)]
    taken = [next(rank) for batch in (4, 8, 12) for _ in range(batch // 4) for rank in ranks]
    assert [i for indices in taken for i in indices] == list(range(24))


@pytest.mark.parametrize("length, rounds", [(8, 2), (9, 2), (11, 2), (12, 3), (3, 0)])
def test_all_ranks_end_together_where_a_full_round_no_longer_fits(length: int, rounds: int) -> None:
    for rank in range(2):
        taken = list(micro_batch_indices(0, 2, rank, 2, length))
        assert len(taken) == rounds
        assert all(i < length for indices in taken for i in indices)


def test_a_resumed_iterator_continues_where_the_first_stopped() -> None:
    whole = batch_iterator(Numbered(), make_run())
    batches = [next(whole) for _ in range(10)]
    resumed = batch_iterator(Numbered(), make_run(), consumed_samples=12)
    for expected in batches[6:]:
        got = next(resumed)
        assert all(torch.equal(got[key], expected[key]) for key in KEYS)
    assert resumed.consumed_samples == whole.consumed_samples == 20


def test_a_batch_is_the_samples_stacked() -> None:
    batch = next(batch_iterator(Numbered(), make_run(), consumed_samples=4))
    for row, i in enumerate((4, 5)):
        for key, value in Numbered()[i].items():
            assert torch.equal(batch[key][row], value)
            assert batch[key].dtype == value.dtype


def test_reading_ahead_in_processes_changes_nothing() -> None:
    plain = batch_iterator(Numbered(), make_run(), consumed_samples=6)
    ahead = batch_iterator(Numbered(), make_run(num_workers=2), consumed_samples=6)
    for _ in range(29):
        one, other = next(plain), next(ahead)
        assert all(torch.equal(one[key], other[key]) for key in KEYS)
    for iterator in (plain, ahead):
        with pytest.raises(IndexError, match=r"after number 64 .* dataset of 64"):
            next(iterator)


def test_making_an_iterator_draws_no_random_number() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    iterator = batch_iterator(Numbered(), make_run())
    next(iterator)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_id_outside_the_vocabulary_is_named_before_it_reaches_the_model() -> None:
    iterator = batch_iterator(Numbered(), make_run(vocab_size=12))
    for _ in range(5):
        next(iterator)  # samples 0 to 9, labels to 10
    with pytest.raises(ValueError, match=r"token id 12 in sample 1\d, outside the vocabulary of 12"):
        next(iterator)


def test_a_rank_that_reads_needs_a_dataset() -> None:
    with pytest.raises(ValueError, match="dataset is None"):
        batch_iterator(None, make_run())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_slices_pair_an_early_chunk_with_a_late_one(size: int) -> None:
    whole = torch.arange(16).expand(3, 16)
    parts = [context_parallel_slice(whole, rank, size) for rank in range(size)]
    assert sorted(i for part in parts for i in part[0].tolist()) == list(range(16))
    for rank, part in enumerate(parts):
        assert part.shape == (3, 16 // size)
        assert part[0, 0] == rank * 16 // (2 * size)
        assert part[0, -1] == 15 - rank * 16 // (2 * size)


def read_on_a_rank(changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """What one rank of a layout gets from mock data, beginning after 4 samples."""
    run = make_run(mock_data=True, **{"seq_length": MOCK_S, **changes})
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


def oracle(first: int, count: int) -> dict[str, list]:
    """`count` mock samples from number `first`, read without any group."""
    run = make_run(mock_data=True, seq_length=MOCK_S)
    train, _, _ = build_datasets(run, NullTokenizer(1000), 64, 16, 0)
    samples = [train[i] for i in range(first, first + count)]
    return {key: [sample[key].tolist() for sample in samples] for key in KEYS}


PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
# name -> (ranks, flags, (pipeline rank, chunk) that need tokens)
LAYOUTS = {
    "DP2": (2, {}, {(0, 0)}),
    "DP4": (4, {}, {(0, 0)}),
    "TP2": (2, {"tensor_model_parallel_size": 2}, {(0, 0)}),
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_its_rows_of_the_same_global_batches(gloo: Any, name: str) -> None:
    world, changes, wanted_by = LAYOUTS[name]
    steps = 3
    results = gloo.run(world, read_on_a_rank, changes=changes, steps=steps)
    dp_size = 1 + max(result["facts"]["dp"] for result in results)
    expected = oracle(4, 2 * dp_size * steps)
    for result in results:
        facts = result["facts"]
        assert result["reads"] == (facts["tp"] == 0 and facts["pp"] in {rank for rank, _ in wanted_by})
        assert result["consumed"] == 4 + 2 * dp_size * steps
        for step, chunks in enumerate(result["batches"]):
            begin = step * 2 * dp_size + 2 * facts["dp"]
            for chunk, batch in enumerate(chunks):
                reads = (facts["pp"], chunk) in wanted_by
                wanted = {key: expected[key][begin : begin + 2] if reads else None for key in KEYS}
                assert batch == wanted
        if result["dtypes"]:
            assert result["dtypes"] == ["torch.int64", "torch.int64", "torch.float32", "torch.int64"]


def test_context_parallel_ranks_share_the_samples_and_split_the_sequence(gloo: Any) -> None:
    results = gloo.run(2, read_on_a_rank, changes={"context_parallel_size": 2}, steps=1)
    expected = oracle(4, 2)
    for result in results:
        rank = result["facts"]["cp"]
        positions = [*range(32 * rank, 32 * rank + 32), *range(96 - 32 * rank, 128 - 32 * rank)]
        for key in KEYS:
            assert result["batches"][0][0][key] == [[row[p] for p in positions] for row in expected[key]]


def build_on_a_rank(flags: dict[str, Any]) -> list[list[int]] | None:
    """Samples of a blend of files, built by all ranks together."""
    run = make_run(vocab_size=1000, seed=7, **flags)
    collection = groups.initialize(run)
    train, _, _ = build_datasets(run, NullTokenizer(1000), 24, 8, 0, pg_collection=collection)
    return None if train is None else [train[i]["tokens"].tolist() for i in range(24)]


def test_ranks_build_one_order_from_files_and_share_the_index_cache(gloo: Any, write_ids: Any) -> None:
    words = []
    for i in range(2):
        words += [str(i + 1), write_ids([[100 * i + j] * 7 for j in range(40)], name=f"d{i}", vocab_size=1000)]
    flags = {"data_path": words, "split": "80,20,0"}
    alone = gloo.run(1, build_on_a_rank, flags=flags)[0]
    for layout in ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        several = gloo.run(2, build_on_a_rank, flags={**flags, **layout})
        assert all(order in (None, alone) for order in several) and several[0] == alone
        assert (several[1] is None) == ("tensor_model_parallel_size" in layout)
