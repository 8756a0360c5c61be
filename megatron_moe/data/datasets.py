"""Samples: the engine's GPT datasets, built from the run's data flags. With `epochs.py` the door to
`megatron.core.datasets`.

A sample is a dict of tensors [S]: `tokens` and `labels` int64 (labels are the tokens one further), `loss_mask` float32,
`position_ids` int64. The order of samples is a function of the data and the seed: it knows nothing of ranks or
micro-batches, and not how many samples a run takes (`epochs.py`).

No sample holds padding. The engine pads in two cases that do not exist here: the last, partial sequence of the
validation data, which it drops by default (`drop_last_partial_validation_sequence`), and an index of None, by which
Megatron-LM's sampler fills up a last batch and ours never asks. So every position is a token that is routed, which
`training/global_batch.py` relies on; tokens without a loss are another matter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.data import Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.checks import cache_folder, require_sequence
from megatron_moe.data.epochs import EpochsOfMadeUpSamples, EpochsOfSamples
from megatron_moe.data.index_cache import name_of_cache, verified_caches
from megatron_moe.data.sources import SPLITS, Blend, Sources, read_sources
from megatron_moe.data.tokenizers import Tokenizer

_ENGINE_LOG = "megatron.core.datasets.gpt_dataset"


def dataset_builder(bin_path: str, dtype: numpy.dtype) -> IndexedDatasetBuilder:
    """The engine's writer of one `.bin`, and of its `.idx` on `finalize`."""
    return IndexedDatasetBuilder(bin_path, dtype=dtype.type)


def open_dataset(prefix: str, *, mmap: bool = True) -> IndexedDataset:
    """The engine's reader of `PREFIX.bin` and `PREFIX.idx`: one int array per document."""
    return IndexedDataset(prefix, mmap=mmap)


def reads_data(pg_collection: ProcessGroupCollection | None) -> bool:
    """Whether this rank reads samples from disk: TP rank 0 of the first and of the last pipeline stage."""
    if pg_collection is None:
        return True
    stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
    return pg_collection.tp.rank() == 0 and stage in (0, stages - 1)


def build_datasets(
    run: Run,
    tokenizer: Tokenizer,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The datasets of the train, valid and test split, each of at least as many samples as asked for.

    A split of which 0 samples are asked for is None, and so is every split on a rank that reads no data (`reads_data`).
    Data is repeated where it has fewer samples. All ranks must call this together: rank 0 writes the index caches, the
    others wait and map them. Torch's process group must be there where more than one prefix is blended.

    Args:
        pg_collection: None: this process reads everything.

    Raises:
        ConfigError: bad data flags, or a split without a full sequence.
    """
    samples = (train_samples, valid_samples, test_samples)
    sources = read_sources(run.data)
    if not sources.mock:
        for split in range(len(SPLITS)):
            if samples[split] > 0:
                require_sequence(sources, split, run.model.seq_length)
    config = _engine_config(run, tokenizer, sources, samples)
    caches = config.path_to_cache if _global_rank() == 0 else None
    with verified_caches(caches), _quiet(_ENGINE_LOG if sources.mock else None):
        builder = BlendedMegatronDatasetBuilder(
            EpochsOfMadeUpSamples if sources.mock else EpochsOfSamples,
            list(samples),
            lambda: reads_data(pg_collection),
            config,
        )
        train, valid, test = builder.build()
    return train, valid, test


def _engine_config(run: Run, tokenizer: Tokenizer, sources: Sources, samples: tuple[int, int, int]) -> GPTDatasetConfig:
    per_split = None
    if sources.per_split is not None:
        per_split = [_engine_blend(blend) if count > 0 else None for blend, count in zip(sources.per_split, samples)]
    cache = None
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
        # An unused split may hold no document at all, over which the engine's count of epochs never ends.
        config.split_matrix = [part if count > 0 else None for part, count in zip(config.split_matrix, samples)]
        for split, part in enumerate(config.split_matrix):
            if part is None and samples[split] > 0:
                raise ConfigError(
                    f"--split {sources.split} gives nothing to {SPLITS[split]}, of which {samples[split]} "
                    "samples are needed"
                )
    return config


def _engine_blend(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    if blend is None:
        return None
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


def _global_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextmanager
def _quiet(logger_name: str | None) -> Iterator[None]:
    """No warnings of one logger: the engine warns for each split of mock data that it keeps no cache of it."""
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
