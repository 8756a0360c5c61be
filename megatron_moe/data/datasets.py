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
from megatron_moe.data.checks import SPLITS, Blend, cache_folder, hashing, read_sources, require_sequence
from megatron_moe.data.index_file import MASK, read_sidecar
from megatron_moe.data.packing import Packing, pack, part_sizes
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import replace_json
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

    The dataset has at least `num_samples` samples, or one whole epoch where that is None. It takes GPTDataset's place
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
        if number > 0 and not self._are_cached:
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
    sources = read_sources(run.data)
    if not sources.mock:
        for split in range(len(SPLITS)):
            if samples[split] > 0:
                require_sequence(sources, split, run.model.seq_length)
    per_split = cache = None
    if sources.per_split is not None:
        per_split = [_engine_blend(blend) if count > 0 else None for blend, count in zip(sources.per_split, samples)]
    if not sources.mock:
        cache = os.path.join(cache_folder(run, sources), name_of_cache(sources.prefixes()))
    config = SampleConfig(
        random_seed=run.training.seed,
        sequence_length=run.model.seq_length,
        blend=_engine_blend(sources.blend),
        blend_per_split=per_split,
        split=sources.split,
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
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    caches = config.path_to_cache if is_first else None
    with verified_caches(caches), _quiet(_ENGINE_LOG if sources.mock else None):
        builder = BlendedMegatronDatasetBuilder(
            EpochsOfMockSamples if sources.mock else EpochsOfSamples,
            list(samples),
            lambda: reads_data(run, pg_collection),
            config,
        )
        train, valid, test = builder.build()
    return train, valid, test


def _engine_blend(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
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
