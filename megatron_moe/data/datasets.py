"""Samples: the engine's GPT datasets, built from the run's data flags, with index caches that are verified.

A sample is a dict of tensors [S]: `tokens` and `labels` int64 (labels are the tokens one further), `loss_mask` float32,
`position_ids` int64. The order of samples is a function of the data and the seed; it depends neither on ranks or
micro-batches nor on the number of samples that a run takes (`EpochsOfSamples`).

Samples contain no padding. The engine pads in two cases that do not occur here: the last, partial sequence of the
validation data, which it drops by default (`drop_last_partial_validation_sequence`), and an index of None, with which
Megatron-LM's sampler fills a last batch and ours does not. So every position is a token that is routed, which
`training/global_batch.py` relies on; tokens without a loss are another matter.

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
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import DOCUMENTS, stage_reads
from megatron_moe.data.checks import SPLITS, Blend, cache_folder, hashing, read_sources, require_sequence
from megatron_moe.data.index_file import read_sidecar
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import replace_json
from megatron_moe.platform.protocols import ProcessGroups

_SAMPLES_OF_A_SMALL_EPOCH = 1 << 18
"""Whose order takes some milliseconds and megabytes."""
_FEWEST_DOCUMENTS, _DOCUMENTS_PER_POSITION = 2000, 25
"""Of made-up data; each of the three splits has a third of the documents."""


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

    def __init__(
        self,
        dataset: object,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, split, config)
        self._arguments = (dataset, dataset_path, indices, None, split)
        self._number, self._epoch = 0, self._build(0)
        self._per_epoch = len(self._epoch)
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

    def _build(self, number: int) -> GPTDataset:
        config = copy.copy(self.config)
        config.random_seed = epoch_seed(self.config.random_seed, number)
        if number > 0 and not self._are_cached:
            config.path_to_cache = ""  # None would be a folder next to the data
        with _quiet(None if config.path_to_cache else _ENGINE_LOG):
            return self.epoch_class(*self._arguments, config)


class _DocumentsApart(GPTDataset):
    """A mixin for the engine's datasets, whose samples also say which document a token is of.

    `documents` [S] int64 has the position in the sample of the document's first token that is there. A label that is
    another document's first token has no loss.
    """

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        at = self.shuffle_index[idx or 0]
        (first, offset), (last, end) = self.sample_index[at], self.sample_index[at + 1]
        lengths = self.dataset.sequence_lengths[self.document_index[first : last + 1]].astype(numpy.int64)
        lengths[-1] = end + 1  # the label of the last token
        lengths[0] -= offset
        begins = lengths.cumsum() - lengths
        begins_of_all = torch.from_numpy(numpy.repeat(begins, lengths))
        sample[DOCUMENTS] = begins_of_all[:-1].contiguous()
        sample["loss_mask"] = sample["loss_mask"] * (begins_of_all[1:] == begins_of_all[:-1])
        return sample


class DocumentSamples(_DocumentsApart, GPTDataset):
    """Samples of files whose documents do not see each other."""


class MockDocumentSamples(_DocumentsApart, MockGPTDataset):
    """Samples of made-up documents that do not see each other."""


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

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: GPTDatasetConfig) -> MockDocuments:
        """Make up the documents."""
        return MockDocuments(config.tokenizer, config.sequence_length)


class EpochsOfDocumentSamples(EpochsOfSamples):
    """The dataset of samples whose documents do not see each other."""

    epoch_class = DocumentSamples


class EpochsOfMockDocumentSamples(EpochsOfMockSamples):
    """The dataset of samples of made-up documents that do not see each other."""

    epoch_class = MockDocumentSamples


_CLASSES = {
    (False, False): EpochsOfSamples,
    (False, True): EpochsOfDocumentSamples,
    (True, False): EpochsOfMockSamples,
    (True, True): EpochsOfMockDocumentSamples,
}
"""By whether the data is made up, and whether documents do not see each other."""


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
    config = GPTDatasetConfig(
        random_seed=run.training.seed,
        sequence_length=run.model.seq_length,
        blend=_engine_blend(sources.blend),
        blend_per_split=per_split,
        split=sources.split,
        path_to_cache=cache,
        mmap_bin_files=not run.data.no_mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=run.data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=run.data.eod_mask_loss,
        create_attention_mask=False,
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
            _CLASSES[sources.mock, run.data.reset_attention_mask],
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
