"""The cases in which the doctor runs a trainer, and the tokens of each.

Two cases are compared at a time. They differ in one thing: in the ranks, in how a batch is cut, in padding, or in
tokens which the trained ones must not see. Labels follow the convention of transformers: the label of position i is the
token at i, predicted from the tokens before it, or IGNORED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

IGNORED = -100
Change = Literal["", "later tokens", "token before", "other documents", "padding"]
MicroBatch = Mapping[str, Tensor]
"""input_ids, labels, attention_mask (1: a token, 0: padding), position_ids, documents: each [B, S] int64."""


@dataclass(frozen=True)
class Case:
    """One way to run a trainer.

    Attributes:
        ranks: processes.
        steps: optimizer steps.
        micro_batch_size: sequences of a micro-batch.
        masked: whether each sequence has another number of trained tokens.
        padding: tokens of padding behind each sequence.
        packed: whether a sequence holds several documents, whose position_ids start again.
        asked: whether only one token of each sequence has a loss, the middle one of its last document.
        change: input tokens that are replaced; labels are not. "later tokens": the asked one and all behind it. "token
            before": the one in front of it. "other documents": all in front of its document.
        saved: whether the trainer is saved after the first step and loaded into a new one.
    """

    ranks: int = 1
    steps: int = 2
    micro_batch_size: int = 1
    masked: bool = True
    padding: int = 0
    packed: bool = False
    asked: bool = False
    change: Change = ""
    saved: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes of the batches, the same in every case: tokens of the vocabulary, of a sequence, sequences of a batch."""

    vocabulary: int = 64
    length: int = 24
    sequences: int = 8


def global_batch(case: Case, sizes: Sizes, step: int, seed: int = 0) -> dict[str, Tensor]:
    """Return all sequences of a step, [sequences, S] each; S includes padding. They are a function of (seed, step)."""
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    rows, length = sizes.sequences, sizes.length
    tokens = torch.randint(1, sizes.vocabulary, (rows, length), generator=generator)
    shares = torch.linspace(0.0, 0.6, rows).roll(step).unsqueeze(1)
    untrained = torch.rand((rows, length), generator=generator) < shares * case.masked
    untrained[:, 0], untrained[:, 1] = True, False  # nothing predicts the first token; each sequence has a loss
    starts = [0, length // 4 + 1, length // 2 + 2] if case.packed else [0]
    documents = torch.zeros(length, dtype=torch.int64)
    for start in starts[1:]:
        documents[start:] += 1
        untrained[:, start] = True
    asked = (starts[-1] + length) // 2
    if case.asked:
        untrained[:] = True
        untrained[:, asked] = False
    batch = {
        "input_ids": tokens.clone(),
        "labels": tokens.masked_fill(untrained, IGNORED),
        "attention_mask": torch.ones_like(tokens),
        "position_ids": (torch.arange(length) - torch.tensor(starts)[documents]).expand(rows, -1),
        "documents": documents.expand(rows, -1),
    }
    replaced = {
        "later tokens": slice(asked, length),
        "token before": slice(asked - 1, asked),
        "other documents": slice(0, starts[-1]),
    }.get(case.change)
    if replaced is not None:
        changed = batch["input_ids"][:, replaced]
        batch["input_ids"][:, replaced] = 1 + (changed + 6) % (sizes.vocabulary - 1)
    if case.padding:
        token = 1 + (case.change == "padding")
        fill = {"input_ids": token, "labels": IGNORED, "attention_mask": 0, "position_ids": 0, "documents": -1}
        for name, value in fill.items():
            batch[name] = torch.nn.functional.pad(batch[name], (0, case.padding), value=value)
    return batch


def micro_batches(case: Case, sizes: Sizes, step: int, rank: int, ranks: int) -> list[MicroBatch]:
    """Return the micro-batches of one data-parallel rank: number m of rank r is the (m x ranks + r)-th of the batch."""
    batch, found = global_batch(case, sizes, step), list[MicroBatch]()
    for first in range(rank * case.micro_batch_size, sizes.sequences, ranks * case.micro_batch_size):
        rows = slice(first, first + case.micro_batch_size)
        found.append({name: tensor[rows].contiguous() for name, tensor in batch.items()})
    return found
