"""Micro-batches: which samples they take, which rank reads them, and how they reach every rank that needs them.

Every micro-batch takes, over all data-parallel ranks, the next B x DP samples of the dataset, and data-parallel rank r
the r-th B of them. A global batch therefore consists of the next consecutive samples, whatever DP, the micro-batch size
or a growing global batch size are, and a resumed run needs one number to continue.

TP rank 0 reads (`Reader`) and sends to its tensor-parallel group (`Receiver`). Pipeline stages between the first and
the last need no tokens and get a micro-batch of Nones. `BatchIterator` ties the parts together and hashes what was
read.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_moe import platform
from megatron_moe.config.pipeline_layout import Stage
from megatron_moe.config.schema import Run
from megatron_moe.data.mixture import Mixture
from megatron_moe.parallel.sequence import balanced_places, context_parallel_slice
from megatron_moe.platform.hardware import on_device
from megatron_moe.platform.protocols import ProcessGroups

KEYS = ("tokens", "labels", "loss_mask", "position_ids")
DOCUMENTS, PLACES, HOST_DOCUMENTS = "documents", "places", "documents on the host"
"""Of each token the place in its sequence of its document's first one, -1 for padding, where documents do not see each
other; with ranks that share a sequence, the places of their tokens, the same in all sequences of a micro-batch; both
together, [B + CP, S / CP] or [B, S], in the memory of the host, if it has read them."""
SOURCES = "sources"
"""Of K named sources, whether each sequence of a micro-batch is of it: [K, B] bool, on every rank."""
NUMBERS, TOKEN_HASHES = "numbers", "hashes of the tokens on the host"
"""Where routes are recorded or replayed: of each token its number in the run, sample x S + position; and [B] int64 the
`token_hash` of each sample, in the memory of the host, on ranks that read."""
Batch = dict[str, "Tensor | None"]


def keys_of(run: Run) -> tuple[str, ...]:
    """Return the keys of the run's samples and micro-batches, in the order in which they travel."""
    return (*KEYS, DOCUMENTS) if run.data.reset_attention_mask else KEYS


def stage_reads(run: Run, stage: Stage) -> bool:
    """Return whether a stage of the pipeline needs micro-batches.

    Every attention needs to know its documents, and a router whose routes are kept the tokens that they are of.
    """
    return stage.reads_tokens or run.data.reset_attention_mask or run.derived.keeps_routes


def micro_batch_indices(
    consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, num_samples: int
) -> Iterator[list[int]]:
    """Yield the sample numbers of a data-parallel rank's micro-batches, as long as each rank gets a whole one."""
    step = micro_batch_size * dp_size
    for first in range(consumed_samples, num_samples - step + 1, step):
        begin = first + dp_rank * micro_batch_size
        yield list(range(begin, begin + micro_batch_size))


class Reader:
    """A reader of micro-batches, each int64 [K, B, S] in the order of K keys; forked workers read ahead."""

    def __init__(
        self,
        dataset: Dataset,
        indices: Iterator[list[int]],
        vocab_size: int,
        num_workers: int,
        first: int = 0,
        keys: tuple[str, ...] = KEYS,
        sharing: int = 1,
    ) -> None:
        """Start the loader.

        Args:
            first: the position in a round of the first sample that this rank takes.
            sharing: the ranks that share a sequence.
        """
        self._dataset = dataset
        self._first = first
        self._vocab_size = vocab_size
        self._num_samples = len(dataset)  # type: ignore[arg-type]
        self._loader = iter(
            DataLoader(
                dataset,
                batch_sampler=indices,  # type: ignore[arg-type]
                collate_fn=partial(_pack, keys, sharing),
                num_workers=num_workers,
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=lambda _: signal.signal(signal.SIGINT, signal.SIG_IGN),  # type: ignore[arg-type, return-value]
                pin_memory=platform.has_cuda(),
                # A generator of its own: the loader draws a seed, which must not come from the one that dropout uses.
                generator=torch.Generator(),
            )
        )

    def read(self, consumed_samples: int) -> Tensor:
        """Return the next micro-batch.

        Raises:
            IndexError: the dataset has no further full round of micro-batches.
            ValueError: a token id is outside the vocabulary: its file changed after it was checked, or was too large to
                be read at the start (`--data-verify-gb`). The message names file, document and offset.
        """
        packed = next(self._loader, None)
        if packed is None:
            raise IndexError(f"samples after number {consumed_samples} were asked of a dataset of {self._num_samples}")
        lowest, highest = (int(value) for value in packed[:2].aminmax())
        if lowest < 0 or highest >= self._vocab_size:
            bad = ((packed[:2] < 0) | (packed[:2] >= self._vocab_size)).nonzero()[0].tolist()
            is_label, row, column = bad
            sample = consumed_samples + self._first + row
            if hasattr(self._dataset, "blame"):  # a program's own samples
                raise ValueError(self._dataset.blame(int(packed[tuple(bad)]), sample, self._vocab_size))
            where = location_of_token(self._dataset, sample, column, bool(is_label))
            raise ValueError(
                f"token id {int(packed[tuple(bad)])} in sample {sample}, outside the vocabulary of {self._vocab_size} "
                f"ids: {where}; the file changed after it was written, or after the start of the run"
            )
        return packed


def _pack(keys: tuple[str, ...], sharing: int, samples: list[dict[str, Tensor]]) -> Tensor:
    """Return the samples as int64 [K, B, S]; with documents that `sharing` ranks share [K + 1, B, S], places behind."""
    packed = [torch.stack([sample[key] for sample in samples]).to(torch.int64) for key in keys]
    if DOCUMENTS in keys and sharing > 1:
        places = balanced_places(packed[keys.index(DOCUMENTS)].numpy(), sharing)
        packed.append(torch.from_numpy(places).view(1, -1).expand_as(packed[0]))
    return torch.stack(packed)


class SamplePart(NamedTuple):
    """The tokens that a sample took from one sequence of an indexed dataset."""

    data: Any
    sequence: int
    offset: int
    tokens: int


def location_of_token(dataset: Any, sample: int, position: int, is_label: bool) -> str:
    """Return where a token of a sample, or the label at its position, is stored, for an error message.

    It reads the sample again.

    Args:
        dataset: one of `build_datasets`.
        position: 0 to S - 1.

    Returns:
        The file, the byte offset in it, the document and the token of the document.
    """
    parts: list[SamplePart] = []  # in the order in which the engine asks for them while it reads the sample
    with ExitStack() as stack:
        for member in getattr(dataset, "datasets", [dataset]):
            if hasattr(member, "dataset"):
                stack.enter_context(_recording(member.dataset, parts))
        dataset[sample]
    # A packed part ends with a label, and the next one begins with a token of its own.
    own_label = getattr(getattr(dataset, "config", None), "packing", "none") != "none"
    position += is_label and not own_label
    for part in parts:
        if position < part.tokens - own_label:
            break
        position -= part.tokens - own_label
    else:
        return "in no data file"
    token = part.offset + position + (is_label and own_label)
    if not hasattr(part.data, "index"):  # made-up tokens
        return f"made-up sequence {part.sequence}, token {token}"
    index, marks = part.data.index, part.data.document_indices
    at = int(index.sequence_pointers[part.sequence]) + token * numpy.dtype(index.dtype).itemsize
    document = int(numpy.searchsorted(marks, part.sequence, side="right")) - 1
    inside = int(index.sequence_lengths[int(marks[document]) : part.sequence].sum()) + token
    return f"{part.data.path_prefix}.bin, byte offset {at} (document {document}, token {inside})"


@contextmanager
def _recording(data: Any, parts: list[SamplePart]) -> Iterator[None]:
    """Append what is read from an indexed dataset within the block to `parts`."""
    get = data.get

    def recorded(idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        tokens = get(idx, offset, length)
        parts.append(SamplePart(data, int(idx), offset, len(tokens)))
        return tokens

    data.get = recorded
    try:
        yield
    finally:
        del data.get


class Receiver:
    """A callable that turns what the reader packed (None on a rank that does not read) into this rank's micro-batch."""

    def __init__(self, run: Run, pg_collection: ProcessGroups | None) -> None:
        self._keys = keys_of(run)
        if DOCUMENTS in self._keys and run.parallel.context_parallel_size > 1:
            self._keys = (*self._keys, PLACES)
        self._shape = (len(self._keys), run.training.micro_batch_size, run.model.seq_length)
        self._numbered = run.derived.keeps_routes
        self._tp = None if pg_collection is None or pg_collection.tp.size() == 1 else pg_collection.tp
        self._cp = None if pg_collection is None or pg_collection.cp.size() == 1 else pg_collection.cp
        self._device = platform.device()

    def __call__(self, packed: Tensor | None, first_sample: int = 0) -> Batch:
        on_host, keys = None, self._keys
        if packed is None:
            packed = torch.empty(self._shape, dtype=torch.int64, device=self._device)
        else:
            if DOCUMENTS in self._keys:
                first = self._keys.index(DOCUMENTS)
                own, places = self._own(packed[first:])
                on_host = own[0] if places is None else torch.cat((own[0], places))
            packed = packed.to(self._device, non_blocking=True)
        if self._tp is not None:
            # One message for all keys: the loss mask is 0 or 1, exact as an integer.
            torch.distributed.broadcast(packed, torch.distributed.get_process_group_ranks(self._tp)[0], group=self._tp)
        if self._numbered:  # cut as the tokens are
            _, samples, length = self._shape
            numbers = torch.arange(first_sample * length, (first_sample + samples) * length, device=self._device)
            packed = torch.cat((numbers.view(1, samples, length), packed))
            keys = (NUMBERS, *keys)
        packed, places = self._own(packed)
        batch: Batch = dict(zip(keys, packed.unbind()))
        if places is not None:
            batch[PLACES] = places
        if on_host is not None:
            batch[HOST_DOCUMENTS] = on_host
        batch["loss_mask"] = packed[keys.index("loss_mask")].float()
        return batch

    def _own(self, packed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part [..., S / CP] of what is packed, and the places [CP, S / CP] of all ranks."""
        if self._cp is None:
            return packed, None
        if PLACES in self._keys:
            places = packed[-1, 0].view(self._cp.size(), -1)
            return packed[..., places[self._cp.rank()]], places
        return context_parallel_slice(packed, self._cp.rank(), self._cp.size()), None


# The hash of the samples that a step read, as 64 bits: it is the same for the same samples at the same positions,
# whatever the layout. Each sample's hash covers its number in the run's order and all that the model sees of it; those
# of a step are added, so that every rank can add its own. Sums are stored as two halves of 32 bits, whose sums are
# exact in fp64.

NOTHING = (0.0, 0.0)


def sample_words(number: int, sample: Tensor) -> tuple[float, float]:
    """Return the two halves of one sample's hash. sample: int64, all that is read of it, on the CPU."""
    return words_of(number, sample.contiguous().numpy().tobytes())


def words_of(number: int, content: bytes) -> tuple[float, float]:
    """Return the two halves, as integers below 2^32, of the 64-bit BLAKE2b hash of a number and its content."""
    digest = hashlib.blake2b(number.to_bytes(8, "little", signed=True) + content, digest_size=8).digest()
    return float(int.from_bytes(digest[:4], "little")), float(int.from_bytes(digest[4:], "little"))


def token_hash(number: int, tokens: Tensor) -> int:
    """Return the hash of a sample's number in the run's order and its tokens [S] int64, on the CPU, as an int64."""
    low, high = sample_words(number, tokens)
    return ((int(high) << 32 | int(low)) + (1 << 63)) % (1 << 64) - (1 << 63)


def added(words: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of some hashes; it is exact for fewer than two million of them."""
    low, high = NOTHING
    for first, second in words:
        low, high = low + first, high + second
    return low, high


def hex_of(low: float, high: float) -> str | None:
    """Return sums of halves as 16 hex digits; None where nothing was added."""
    return None if (low, high) == NOTHING else f"{int(high) % (1 << 32):08x}{int(low) % (1 << 32):08x}"


def pairs_and_padding(documents: Tensor) -> tuple[int, int]:
    """Return the number of pairs of a query and a key it sees, and of positions that are padding.

    documents: int64 [B, S], on the CPU; -1: padding.
    """
    ends, inside = torch.arange(1, documents.shape[-1] + 1), documents >= 0
    return int((ends - documents)[inside].sum()), int((~inside).sum())


class BatchIterator:
    """An endless iterator over the micro-batches of one rank and model chunk.

    A micro-batch is a dict of `tokens`, `labels`, `position_ids` int64 [B, S] and `loss_mask` float32 [B, S] on the
    run's device, with `documents` int64 [B, S] where these do not see each other; of Nones where the rank needs none.
    With named sources it has `SOURCES`, too.

    Attributes:
        consumed_samples: samples that all data-parallel ranks together have taken, from the dataset's beginning.
        num_sources: named sources, 0 without names.
        observer: a function that is called with every micro-batch before it is used.
    """

    def __init__(
        self,
        reader: Reader | None,
        receive: Receiver | None,
        consumed_samples: int,
        samples_per_round: int,
        first: int = 0,
        hashes: bool = False,
        hashed_keys: int = len(KEYS),
        size: int = 0,
        mixture: Mixture | None = None,
        hashes_tokens: bool = False,
    ) -> None:
        """Initialise it.

        Args:
            first: this rank's first place in a round.
            hashes: whether it hashes what it reads.
            hashed_keys: how many keys are hashed; those behind them depend on the layout.
            size: samples of a micro-batch, whose sources `mixture` knows.
            hashes_tokens: whether micro-batches have `TOKEN_HASHES`.
        """
        self._reader = reader
        self._receive = receive
        self._samples_per_round = samples_per_round
        self._first, self._hashes, self._hashed_keys = first, hashes, hashed_keys
        self._hashes_tokens = hashes_tokens
        self._words, self._pairs, self._padding = NOTHING, 0, 0
        self._mixture, self._size = mixture, size
        self.num_sources = 0 if mixture is None else len(mixture.sources)
        self.consumed_samples = consumed_samples
        self.observer: Callable[[Batch], None] | None = None

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        batch: Batch = dict.fromkeys(KEYS)
        first = self.consumed_samples + self._first
        if self._receive is not None:
            packed = None if self._reader is None else self._reader.read(self.consumed_samples)
            if packed is not None and self._hashes:
                samples = packed[: self._hashed_keys]
                words = (sample_words(first + row, samples[:, row]) for row in range(samples.shape[1]))
                self._words = added((self._words, *words))
                if self._hashed_keys > len(KEYS):
                    pairs, padding = pairs_and_padding(packed[len(KEYS)])
                    self._pairs, self._padding = self._pairs + pairs, self._padding + padding
            batch = self._receive(packed, first)
            if packed is not None and self._hashes_tokens:
                hashes = [token_hash(first + row, tokens) for row, tokens in enumerate(packed[0])]
                batch[TOKEN_HASHES] = torch.tensor(hashes, dtype=torch.int64)
        if self._mixture is not None:
            sources = [self._mixture.at(first + row)[0] for row in range(self._size)]
            members = [source == number for number in range(self.num_sources) for source in sources]
            batch[SOURCES] = on_device(members, torch.bool).view(self.num_sources, len(sources))
        self.consumed_samples += self._samples_per_round
        if self.observer is not None:
            self.observer(batch)
        return batch

    def take_sample_words(self) -> tuple[float, float]:
        """Return this rank's share of the hash of the samples that were read since the last call."""
        words, self._words = self._words, NOTHING
        return words

    def take_pairs_and_padding(self) -> tuple[int, int]:
        """Return this rank's share of `pairs_and_padding` of what was read since the last call; zeros if not apart."""
        found = self._pairs, self._padding
        self._pairs = self._padding = 0
        return found


def batch_iterators(
    dataset: Dataset | None, run: Run, *, consumed_samples: int = 0, pg_collection: ProcessGroups | None = None
) -> list[BatchIterator]:
    """Return the micro-batches of each model chunk of this rank, beginning after the first `consumed_samples` samples.

    The stages with the embedding, with multi-token prediction and with the loss need tokens, the others do not. For an
    evaluation make new ones with consumed_samples 0: they begin at the first sample.

    Args:
        dataset: one of `build_datasets`; None where this rank reads none.
        pg_collection: the process groups; with None, one process does everything.
    """
    size, dp_rank, dp_size, reads = run.training.micro_batch_size, 0, 1, True
    needs = [(True, True)]  # for each chunk whether it needs tokens, and whether this rank hashes them
    if pg_collection is not None:
        dp_rank, dp_size = pg_collection.dp.rank(), pg_collection.dp.size()
        reads = pg_collection.tp.rank() == 0
        hashes = reads and pg_collection.cp.rank() == 0
        stages = run.derived.chunks_of_pipeline_rank(pg_collection.pp.rank())
        needs = [(stage_reads(run, stage), stage.embedding and hashes) for stage in stages]
    found = []
    for wanted, hashed in needs:
        reader = None
        if wanted and reads:
            if dataset is None:
                raise ValueError(
                    "this rank reads data, but its dataset is None; build_datasets was given other process groups"
                )
            count = len(dataset)  # type: ignore[arg-type]
            indices = micro_batch_indices(consumed_samples, size, dp_rank, dp_size, count)
            vocab_size = run.model.vocab_size
            if vocab_size is None:
                vocab_size = getattr(dataset, "vocab_size", None) or dataset.config.tokenizer.vocab_size  # type: ignore
            sharing = run.parallel.context_parallel_size
            reader = Reader(dataset, indices, vocab_size, run.data.num_workers, dp_rank * size, keys_of(run), sharing)
        receiver = Receiver(run, pg_collection) if wanted else None
        iterator = BatchIterator(
            reader,
            receiver,
            consumed_samples,
            size * dp_size,
            first=dp_rank * size,
            hashes=hashed,
            hashed_keys=len(keys_of(run)),
            size=size,
            mixture=getattr(dataset, "mixture", None),
            hashes_tokens=run.derived.keeps_routes,
        )
        found.append(iterator)
    return found
