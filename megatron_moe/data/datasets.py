"""Samples: the engine's GPT datasets, built from the run's data flags, with index caches that are verified.

A sample is a dict of tensors [S]: `tokens` and `labels` int64 (labels are the tokens one further), `loss_mask` float32,
`position_ids` int64. The order of samples is a function of the data and the seed; it depends neither on ranks or
micro-batches nor on the number of samples that a run takes (`EpochsOfSamples`).

Where documents are kept apart, a sample also has `documents` (`_finish`). Samples contain no padding unless `--packing`
fills them with whole documents: then `documents` is -1 there, which `training/global_batch.py` counts. The engine pads
in two cases that do not occur here: the last, partial sequence of the validation data, which it drops by default
(`drop_last_partial_validation_sequence`), and an index of None, with which Megatron-LM's sampler fills a last batch.

Other files of this project reach `megatron.core.datasets` through this one.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import DOCUMENTS, stage_reads
from megatron_moe.data.checks import SPLITS, Blend, cache_folder, hashing, require_sequence, sources_of
from megatron_moe.data.index_file import MASK, read_sidecar
from megatron_moe.data.mixture import Mixture, Named, ValidationSet
from megatron_moe.data.packing import Packing, pack, part_sizes
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import replace_json
from megatron_moe.parallel.groups import host_group
from megatron_moe.platform.protocols import ProcessGroups

_SAMPLES_OF_A_SMALL_EPOCH = 1 << 18
"""Whose order takes some milliseconds and megabytes."""
_FEWEST_DOCUMENTS, _DOCUMENTS_PER_POSITION = 2000, 25
"""Of made-up data; each of the three splits has a third of the documents."""


@dataclass
class SampleConfig(GPTDatasetConfig):
    """The engine's configuration of a dataset, and what it does not have."""

    packing: str = "none"
    document_boundaries: str = "index"
    documents_apart: bool = False
    positions_restart: bool = False


class SampleFacts(NamedTuple):
    """What the samples of an epoch hold: parts of documents and positions of padding, both per sample."""

    documents: float
    padding: float


def _finish(sample: dict[str, Tensor], firsts: Tensor, crosses: Tensor, end: int, config: SampleConfig) -> None:
    """Add a sample's `documents` and what follows from them, in place.

    `documents` [S] int64 has for each token the position in the sample of its document's first token that is there, and
    -1 for padding. A label that is another document's first token has no loss.

    Args:
        firsts, crosses: [S] bool, whether a document begins at a token, and whether one begins at its label.
        end: where the padding begins.
    """
    places = torch.arange(config.sequence_length)
    documents = torch.where(firsts, places, 0).cummax(0).values
    sample["loss_mask"] = sample["loss_mask"] * ~crosses
    sample[DOCUMENTS] = torch.where(places < end, documents, -1)
    if config.positions_restart:
        sample["position_ids"] = torch.where(places < end, places - documents, 0)


class _DocumentsKnown(GPTDataset):
    """A mixin for the engine's datasets, whose samples also say which document a token is of: see `_finish`."""

    config: SampleConfig

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        sample, length = super().__getitem__(idx), self.config.sequence_length
        begins = torch.zeros(length + 1, dtype=torch.bool)  # at a token, or at the last label
        begins[0] = True
        if self.config.document_boundaries == "eod":
            begins[1:] = sample["tokens"] == self.config.tokenizer.eod
        else:
            at = self.shuffle_index[idx or 0]
            (first, offset), (last, _) = self.sample_index[at], self.sample_index[at + 1]
            lengths = self.dataset.sequence_lengths[self.document_index[first:last]]
            begins[torch.from_numpy(lengths.cumsum(dtype=numpy.int64)) - int(offset)] = True
        _finish(sample, begins[:-1], begins[1:], length, self.config)
        return sample

    def facts(self) -> SampleFacts:
        """Return the facts of the epoch, by the documents of the index."""
        firsts, (lasts, ends) = self.sample_index[:-1, 0], self.sample_index[1:].T
        return SampleFacts(float((lasts - firsts + (ends > 0)).mean()), 0.0)


class DocumentSamples(_DocumentsKnown, GPTDataset):
    """Samples of files that know their documents."""


class MockDocumentSamples(_DocumentsKnown, MockGPTDataset):
    """Samples of made-up documents that know these."""


class PackedSamples(MegatronDataset):
    """The samples of one epoch as `packing.pack` packs them, with padding at their end.

    Of conversations the trained tokens alone have a loss.

    The constructor, the samples and the caches are otherwise those of the engine's GPTDataset.
    """

    config: SampleConfig
    numel_low_level_dataset = staticmethod(GPTDataset.numel_low_level_dataset)
    build_low_level_dataset = staticmethod(GPTDataset.build_low_level_dataset)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config, folder = self.config, self.config.path_to_cache
        self._lengths = self.dataset.sequence_lengths
        # Of conversations: for each token of the data 1 if it is trained.
        trained = f"{self.dataset_path}{MASK}"
        self._trained = numpy.memmap(trained, dtype=numpy.uint8, mode="r") if os.path.exists(trained) else None
        paths = []
        if folder:
            name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}-{config.packing}"
            paths = [os.path.join(folder, f"{name}-{part}.npy") for part in Packing._fields]
        if paths and all(map(os.path.isfile, paths)):
            self._packing = Packing(*(numpy.load(path, mmap_mode="r", allow_pickle=False) for path in paths))
            return
        length, seed = config.sequence_length, config.random_seed
        self._packing = pack(self._lengths, self.indices, length, seed, config.packing)
        if paths and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
            os.makedirs(folder, exist_ok=True)
            for path, array in zip(paths, self._packing):
                numpy.save(path, array, allow_pickle=False)

    def __len__(self) -> int:
        return len(self._packing.begins) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config, length, eod = self.config, self.config.sequence_length, self.config.tokenizer.eod
        tokens, labels, loss_mask = torch.zeros((3, length), dtype=torch.int64)
        firsts, end = torch.zeros(length, dtype=torch.bool), 0
        parts = self._packing.parts[self._packing.begins[index] : self._packing.begins[index + 1]]
        for (document, first), size in zip(parts.tolist(), part_sizes(self._lengths, parts, length).tolist()):
            ids = torch.from_numpy(self.dataset.get(document, offset=first, length=size + 1).astype(numpy.int64))
            begin, end = end, end + size
            tokens[begin:end], labels[begin:end] = ids[:-1], ids[1:]
            firsts[begin] = True
            loss_mask[begin:end] = 1
            if self._trained is not None:
                label = int(self.dataset.index.sequence_pointers[document]) // self.dataset.index.dtype_size + first + 1
                loss_mask[begin:end] = torch.from_numpy(self._trained[label : label + size].astype(numpy.int64))
        if config.eod_mask_loss:
            loss_mask[tokens == eod] = 0
        crosses = torch.zeros_like(firsts)  # the label of a part's last token is of the same document
        if config.document_boundaries == "eod":
            crosses[:end] = tokens[:end] == eod
            firsts[1:end] |= crosses[: end - 1]
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask.float()}
        sample["position_ids"] = torch.arange(length)
        _finish(sample, firsts, crosses, end, config)
        return sample

    def facts(self) -> SampleFacts:
        """Return the facts of the epoch."""
        parts, places = self._packing.parts, len(self) * self.config.sequence_length
        filled = int(part_sizes(self._lengths, parts, self.config.sequence_length).sum())
        return SampleFacts(len(parts) / len(self), 1 - filled / places)


class EpochsOfSamples(MegatronDataset):
    """A dataset of one prefix, or of one split of it, whose order does not depend on the length of the run.

    The engine's GPTDataset is asked for a number of samples, repeats the documents as often as that needs, and shuffles
    over all repetitions at once. A run that is continued with another `--train-iters` would get another order, with
    some samples twice and others not at all. Here the engine shuffles each epoch separately: epoch 0 with the run's
    seed, the others with seeds of their own. Sample i is therefore a function of data, seed and i alone, and in the
    first epoch it is the engine's. Each epoch drops less than one sequence at its end.

    The dataset has at least `num_samples` samples, or one whole epoch where that is None; `sample` goes on beyond its
    end. It takes GPTDataset's place
    in the engine's BlendedMegatronDatasetBuilder. The indices of every epoch are built, and cached as the engine caches
    them, when the dataset is made; one epoch at a time is open. Of small epochs, of which a run may take thousands, the
    first alone is cached: each process builds the others in memory when it comes to them.
    """

    epoch_class: type[GPTDataset] = GPTDataset
    document_class: type[_DocumentsKnown] = DocumentSamples
    config: SampleConfig

    def __init__(
        self,
        dataset: object,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        split: Split,
        config: SampleConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, split, config)
        self._arguments = (dataset, dataset_path, indices, None, split)
        self._number, self._epoch = 0, self._build(0)
        self._per_epoch = len(self._epoch)
        if self._per_epoch < 1 and config.packing != "none":
            raise ConfigError(f"--packing {config.packing}: {dataset_path} has no document of two tokens to pack")
        if self._per_epoch < 1:
            raise ValueError(f"{dataset_path}: fewer tokens than one sequence of {config.sequence_length} and the next")
        self._epochs = max(1, -(-(num_samples or 0) // self._per_epoch))
        self._are_cached = self._per_epoch > _SAMPLES_OF_A_SMALL_EPOCH
        for number in range(1, self._epochs if self._are_cached else 1):
            self._build(number)

    @classmethod
    def numel_low_level_dataset(cls, low_level_dataset: object) -> int:
        """Return the number of documents of the data."""
        return cls.epoch_class.numel_low_level_dataset(low_level_dataset)

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: GPTDatasetConfig) -> object:
        """Open the data."""
        return cls.epoch_class.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self._epochs * self._per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.sample(index)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample of any epoch; after the dataset's own ones this process builds their order in memory."""
        number, inside = divmod(int(index), self._per_epoch)
        if number != self._number:
            self._number, self._epoch = number, self._build(number)
        return self._epoch[inside]

    def facts(self) -> SampleFacts:
        """Return the facts of the open epoch, where documents are kept apart."""
        return self._epoch.facts()

    def _build(self, number: int) -> Any:
        config = copy.copy(self.config)
        config.random_seed = epoch_seed(self.config.random_seed, number)
        if number > 0 and not (self._are_cached and number < self._epochs):
            config.path_to_cache = ""  # None would be a folder next to the data
        epoch_class: Any = self.document_class if config.documents_apart else self.epoch_class
        if config.packing != "none":
            epoch_class = PackedSamples
        with _quiet(None if config.path_to_cache else _ENGINE_LOG):
            return epoch_class(*self._arguments, config)


class MockDocuments(MockGPTLowLevelDataset):
    """The engine's made-up documents, of 1 to 4095 tokens: fewer where samples are short.

    The engine has 100,000 whatever the length. Samples of 16 tokens would be 4 million an epoch and split, whose order
    takes 50 MB and a tenth of a second on every rank before the first step.
    """

    def __init__(self, tokenizer: Tokenizer, sequence_length: int) -> None:
        self.size = min(MockGPTLowLevelDataset.size, max(_FEWEST_DOCUMENTS, _DOCUMENTS_PER_POSITION * sequence_length))
        super().__init__(tokenizer)


class EpochsOfMockSamples(EpochsOfSamples):
    """The same dataset of made-up tokens. An epoch of up to 4096 tokens a sample has more than 16,000 samples."""

    epoch_class = MockGPTDataset
    document_class = MockDocumentSamples

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: GPTDatasetConfig) -> MockDocuments:
        """Make up the documents."""
        return MockDocuments(config.tokenizer, config.sequence_length)


class SourceSamples:
    """The samples of a named source or validation set, without end: sample i is a function of data, seed and i."""

    def __init__(self, datasets: list[EpochsOfSamples], seed: int) -> None:
        self.datasets, self._seed = datasets, seed
        self._ends = numpy.cumsum([len(dataset) for dataset in datasets])
        self._open = -1

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, len(self))
        if len(self.datasets) == 1:
            return self.datasets[0].sample(index)
        if epoch != self._open:
            random = numpy.random.RandomState(epoch_seed(self._seed, epoch))
            self._order, self._open = random.permutation(numpy.arange(len(self), dtype=numpy.uint32)), epoch
        place = int(self._order[place])
        file = int(numpy.searchsorted(self._ends, place, side="right"))
        dataset = self.datasets[file]
        return dataset.sample(epoch * len(dataset) + place - int(self._ends[file]) + len(dataset))


class MixtureSamples(Dataset):
    """The first `count` samples of a run with named sources; on ranks that read no data it knows their order alone."""

    def __init__(self, mixture: Mixture, members: list[SourceSamples], count: int) -> None:
        self.mixture, self._members, self._count = mixture, members, count
        self.datasets = list(chain.from_iterable(member.datasets for member in members))
        self.weights: list[float] = []
        """The shares of the datasets at the start, which sum to no particular number."""
        for source, member in zip(mixture.sources, members):
            weight = source.weight.at(mixture.first * mixture.seq_length)
            self.weights += [weight * len(dataset) / len(member) for dataset in member.datasets]

    @property
    def config(self) -> SampleConfig:
        """The configuration of the first dataset: all but the seed is the same in all."""
        return self.datasets[0].config

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        source, index = self.mixture.at(number)
        return self._members[source][index]


class EvaluatedSamples(Dataset):
    """The first `count` samples of a validation set, and then samples without loss until whole rounds are full.

    A round is a micro-batch of every rank, in interleaved schedules one for every stage.
    """

    def __init__(self, member: SourceSamples | None, count: int, samples_per_round: int) -> None:
        self._member, self.count = member, count
        self._padded = -(-count // samples_per_round) * samples_per_round
        self.datasets = [] if member is None else member.datasets

    @property
    def config(self) -> SampleConfig:
        """The configuration of the first dataset."""
        return self.datasets[0].config

    def __len__(self) -> int:
        return self._padded

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        assert self._member is not None, "this rank reads data"
        sample = self._member[number if number < self.count else 0]
        if number >= self.count:
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample


def named_seed(seed: int, name: str) -> int:
    """Return the seed of a named source's order, 0 to 2^32 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch's order, 0 to 2^32 - 1.

    Epoch 0 has the run's seed. Those of the others are taken from a hash, so that runs with neighbouring seeds do not
    share epochs.
    """
    if epoch == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


# The engine's index caches store the order of samples between runs. The engine accepts any file of the right name: one
# that a kill truncated, one with a flipped bit, one of other data, and it would run a pickle in it. So rank 0 writes
# the SHA-256 of each to `verified.json` in the same folder, and removes what does not agree before the engine reads it.
# What is missing is built again, and is the same for the same data.

LISTED = "verified.json"
_LOCK = ".lock"
_SAMPLED = 1 << 24  # bytes


def name_of_cache(prefixes: list[str]) -> str:
    """Return the folder name of these datasets' caches, the same on every rank; it changes when any is written again.

    The engine keys its caches by path, so that new data under an old path would get the old order. The order follows
    from the `.idx` files, so each is identified by the hash in its sidecar, or else by size, time of the last change
    and the first and last 16 MiB.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None:
            identity = sidecar.idx_sha256
        else:
            about = os.stat(f"{prefix}.idx")
            with open(f"{prefix}.idx", "rb") as file:
                content = file.read(_SAMPLED)
                if about.st_size > _SAMPLED:
                    file.seek(max(_SAMPLED, about.st_size - _SAMPLED))
                    content += file.read(_SAMPLED)
            identity = f"{about.st_size} {about.st_mtime_ns} {hashlib.sha256(content).hexdigest()}"
        digest.update(f"{os.path.abspath(prefix)} {identity} {os.path.getsize(f'{prefix}.bin')}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def verified_caches(folder: str | None) -> Iterator[None]:
    """Run the block, in which the engine builds its caches, with caches that are as they were written.

    Before it, caches that have changed are removed; after it, those that are there are listed with their hashes. Other
    runs with the same data wait. Call it in the process that writes.

    Args:
        folder: the caches'; with None there are no caches, and nothing is done.
    """
    if folder is None:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, _LOCK), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        known, kept = _listed(folder), {}
        for name in _arrays(folder):
            path = os.path.join(folder, name)
            if name in known and hashing(path) == known[name] and _is_array(path):
                kept[name] = known[name]
            else:
                os.unlink(path)
        yield
        now = {name: kept.get(name) or hashing(os.path.join(folder, name)) for name in _arrays(folder)}
        if now != _listed(folder):
            replace_json(Path(folder) / LISTED, now, sole_writer=True)


def _is_array(path: str) -> bool:
    """Return whether a file is an array of numbers. The engine would unpickle any other, and so run what is in it."""
    try:
        numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    return True


def _listed(folder: str) -> dict[str, str]:
    """Return file name -> SHA-256; empty where the list is missing or unreadable: then all caches are built again."""
    try:
        with open(os.path.join(folder, LISTED), encoding="utf-8") as file:
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _arrays(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".npy"))


EngineBlend = tuple[list[str], list[float] | None]
"""Prefixes, and their weights if they have any."""
_ENGINE_LOG = "megatron.core.datasets.gpt_dataset"


def reads_data(run: Run, pg_collection: ProcessGroups | None) -> bool:
    """Return whether this rank reads samples from disk: TP rank 0 of pipeline stages with tokens or labels."""
    if pg_collection is None:
        return True
    stages = run.derived.chunks_of_pipeline_rank(pg_collection.pp.rank())
    return pg_collection.tp.rank() == 0 and any(stage_reads(run, stage) for stage in stages)


def build_datasets(
    run: Run,
    tokenizer: Tokenizer,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    *,
    pg_collection: ProcessGroups | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Build the datasets of the train, valid and test split, each of at least as many samples as asked for.

    A split of which 0 samples are asked for is None, and so is every split on a rank that reads no data (`reads_data`).
    Data is repeated where it has fewer samples. All ranks must call this together: rank 0 writes the index caches, the
    others wait and map them. torch's process group must exist where more than one prefix is blended.

    Args:
        pg_collection: None: this process reads everything.

    Raises:
        ConfigError: the data flags are wrong, or a split has no full sequence.
    """
    samples = (train_samples, valid_samples, test_samples)
    sources = sources_of(run)
    if not sources.mock:
        for split in range(len(SPLITS)):
            if samples[split] > 0:
                require_sequence(sources, split, run.model.seq_length)
    per_split = cache = None
    if sources.per_split is not None:
        per_split = [_engine_blend(blend) if count > 0 else None for blend, count in zip(sources.per_split, samples)]
    if not sources.mock:
        cache = os.path.join(cache_folder(run, sources), name_of_cache(sources.prefixes()))
    config = _sample_config(
        run,
        tokenizer,
        cache,
        blend=_engine_blend(sources.blend),
        blend_per_split=per_split,
        split=sources.split,
    )
    if config.split_matrix is not None:
        # An unused split may have no document at all, for which the engine would count epochs without end.
        config.split_matrix = [part if count > 0 else None for part, count in zip(config.split_matrix, samples)]
        for split, part in enumerate(config.split_matrix):
            if part is None and samples[split] > 0:
                raise ConfigError(
                    f"--split {sources.split} gives nothing to {SPLITS[split]}, of which {samples[split]} "
                    "samples are needed"
                )
    train, valid, test = _built(run, config, list(samples), pg_collection)
    return train, valid, test


def build_named(
    run: Run,
    tokenizer: Tokenizer,
    train_samples: int,
    batch_samples: int,
    samples_per_round: int,
    *,
    first: int = 0,
    saved: dict[str, dict[str, Any]] | None = None,
    pg_collection: ProcessGroups | None = None,
) -> tuple[MixtureSamples | None, dict[str, EvaluatedSamples]]:
    """Build the training data and the validation sets of `--data-config`, as `build_datasets` does those of paths.

    Args:
        train_samples: how many samples the whole run reads; 0: training has no dataset.
        batch_samples: the samples of a global batch of evaluations; 0: nothing is evaluated.
        samples_per_round: see `EvaluatedSamples`.
        first: samples that the run has read before.
        saved: what the checkpoint keeps of the sources there (`Mixture.state`).
    """
    named = sources_of(run).named
    assert named is not None, "there is a file of --data-config"
    wanted: list[Named] = [*(named.sources if train_samples else ())]
    wanted += named.validation if batch_samples else ()
    members: list[SourceSamples] = []
    for one in wanted:
        cache = os.path.join(cache_folder(run, sources_of(run)), name_of_cache(list(one.prefixes)))
        seed = named_seed(run.training.seed, one.name)
        part = int(isinstance(one, ValidationSet) and one.split is not None)
        found = []
        for prefix in one.prefixes:
            blend = _engine_blend(Blend((prefix,), None))
            config = _sample_config(run, tokenizer, cache, blend=blend, split=one.split or "1,0,0", seed=seed)
            sizes: list[int | None] = [0, 0, 0]
            sizes[part] = None
            config.split_matrix = [each if i == part else None for i, each in enumerate(config.split_matrix)]
            found.append(_built(run, config, sizes, pg_collection)[part])
        if found[0] is not None:
            members.append(SourceSamples(found, seed))
    counts = [list(map(len, members))]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(counts, src=0, group=host_group())
    train, split_at = None, len(named.sources) if train_samples else 0
    if train_samples:
        mixture = Mixture(named.sources, counts[0][:split_at], run.model.seq_length, first, saved)
        train = MixtureSamples(mixture, members[:split_at], train_samples)
    sets = {}
    for place, one in enumerate(wanted[split_at:], split_at):
        assert isinstance(one, ValidationSet)
        count = counts[0][place] if one.batches is None else min(one.batches * batch_samples, counts[0][place])
        member = members[place] if members else None
        sets[f"valid/{one.name}"] = EvaluatedSamples(member, count, samples_per_round)
    return train, sets


def _sample_config(
    run: Run,
    tokenizer: Tokenizer,
    cache: str | None,
    *,
    blend: EngineBlend | None,
    split: str | None,
    blend_per_split: list[EngineBlend | None] | None = None,
    seed: int | None = None,
) -> SampleConfig:
    """Return the engine's configuration of datasets; the run's seed by default."""
    return SampleConfig(
        random_seed=run.training.seed if seed is None else seed,
        sequence_length=run.model.seq_length,
        path_to_cache=cache,
        mmap_bin_files=not run.data.no_mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=False,  # the engine would restart them after each eod
        reset_attention_mask=False,
        eod_mask_loss=run.data.eod_mask_loss,
        create_attention_mask=False,
        packing=run.data.packing,
        document_boundaries=run.data.document_boundaries,
        documents_apart=run.data.reset_attention_mask,
        positions_restart=run.data.reset_position_ids,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
    )


def _built(run: Run, config: SampleConfig, samples: list, pg_collection: ProcessGroups | None) -> list[Any]:
    """Return the engine's datasets of the three splits. Collective: rank 0 writes the index caches."""
    is_mock = run.data.mock_data
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    caches = config.path_to_cache if is_first else None
    with verified_caches(caches), _quiet(_ENGINE_LOG if is_mock else None):
        builder = BlendedMegatronDatasetBuilder(
            EpochsOfMockSamples if is_mock else EpochsOfSamples, samples, lambda: reads_data(run, pg_collection), config
        )
        return builder.build()


def _engine_blend(blend: Blend | None) -> EngineBlend | None:
    if blend is None:
        return None
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


@contextmanager
def _quiet(logger_name: str | None) -> Iterator[None]:
    """Silence the warnings of one logger: the engine warns of each dataset that it does not cache."""
    if logger_name is None:
        yield
        return
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
