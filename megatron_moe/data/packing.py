"""Packing: which documents, or parts of them, share a sequence. Pure functions of lengths and an order.

A document of L tokens has L - 1 predictions, one for each token but the first, and takes as many positions: its last
token is a label only. A longer document than a sequence is cut into parts of S predictions and a rest. The token at a
cut is the last label of one part and the first token of the next, so every prediction of an epoch is made once. A
document of one token predicts nothing and is left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy


class Packing(NamedTuple):
    """The sequences of one epoch.

    parts: [P, 2] int32, the document and the place in it of each part's first token, sequence by sequence.
    begins: [N + 1] int64, where the parts of each of the N sequences begin.
    """

    parts: numpy.ndarray
    begins: numpy.ndarray


def part_sizes(lengths: numpy.ndarray, parts: numpy.ndarray, seq_length: int) -> numpy.ndarray:
    """Return the predictions of each part, [P] int64. lengths: tokens of every document of the data."""
    documents, firsts = parts[:, 0], parts[:, 1].astype(numpy.int64)
    return numpy.minimum(lengths[documents] - 1 - firsts, seq_length)


def pack(lengths: numpy.ndarray, documents: numpy.ndarray, seq_length: int, seed: int, packing: str) -> Packing:
    """Pack one epoch: `documents`, in an order of the seed, into sequences, in another order of the seed.

    Args:
        lengths: tokens of every document of the data.
        documents: [D] int32, the numbers of those to pack.
        packing: greedy: a sequence takes documents in their order, and ends before the first one that does not fit.
            best-fit: the longest part comes first, and goes to the sequence in which it leaves least room (best-fit
            decreasing, arXiv 2404.10830).
    """
    random = numpy.random.RandomState(seed)
    order = random.permutation(documents)
    predictions = numpy.maximum(lengths[order].astype(numpy.int64) - 1, 0)
    counts = -(-predictions // seq_length)
    numbers = numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)
    parts = numpy.stack((numpy.repeat(order, counts), numbers * seq_length), axis=1).astype(numpy.int32)
    sizes = part_sizes(lengths, parts, seq_length)
    if packing == "greedy":
        ends = numpy.concatenate(([0], sizes.cumsum()))
        next_begins = numpy.searchsorted(ends, ends[:-1] + seq_length, side="right") - 1
        is_first, begin = numpy.zeros(len(sizes), dtype=numpy.int64), 0
        while begin < len(sizes):
            is_first[begin] = 1
            begin = next_begins[begin]
        sequences = is_first.cumsum() - 1
    else:
        sequences = _best_fit(sizes, seq_length)
    count = int(sequences.max(initial=-1)) + 1
    sequences = random.permutation(count)[sequences]
    begins = numpy.zeros(count + 1, dtype=numpy.int64)
    begins[1:] = numpy.bincount(sequences, minlength=count).cumsum()
    return Packing(parts[numpy.argsort(sequences, kind="stable")], begins)


def _best_fit(sizes: numpy.ndarray, seq_length: int) -> numpy.ndarray:
    """Return the sequence of each part, [P] int64.

    Parts of one size are placed together: the sequence with the least room that takes one takes as many as fit, since
    its room only shrinks. So the work is for each size and each number of free positions, and not for each part.
    """
    found = numpy.empty(len(sizes), dtype=numpy.int64)
    by_size = numpy.argsort(-sizes, kind="stable")
    changes = numpy.flatnonzero(numpy.diff(sizes[by_size])) + 1
    with_room: dict[int, list[numpy.ndarray]] = {}  # free positions -> sequences
    rooms: list[int] = []  # its keys, ascending
    count = 0

    def keep(room: int, sequences: numpy.ndarray) -> None:
        if room == 0 or len(sequences) == 0:
            return
        if room not in with_room:
            with_room[room] = []
            insort(rooms, room)
        with_room[room].append(sequences)

    for same in numpy.split(by_size, changes) if len(sizes) else ():
        size = int(sizes[same[0]])
        while len(same):
            index = bisect_left(rooms, size)
            if index < len(rooms):
                room = rooms[index]
                candidates = with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], rooms[index]
            else:
                room, new = seq_length, -(-len(same) // (seq_length // size))
                candidates = numpy.arange(count, count + new)
                count += new
            each = room // size
            used = min(len(candidates), -(-len(same) // each))
            taken = min(len(same), used * each)
            found[same[:taken]] = numpy.repeat(candidates[:used], each)[:taken]
            same = same[taken:]
            in_last = taken - (used - 1) * each
            keep(room, candidates[used:])
            keep(room - each * size, candidates[: used - 1])
            keep(room - in_last * size, candidates[used - 1 : used])
    return found
