"""An order of samples that does not know how long a run is: epoch after epoch, each shuffled by itself.

The engine's GPTDataset is asked for a number of samples, repeats the documents as often as that needs, and shuffles
over all the repetitions at once. A run that is continued with another `--train-iters` would meet another order, and
see some samples twice and others never. Here the engine shuffles one epoch at a time: epoch 0 with the run's seed, the
others with seeds of their own. Sample i is therefore a function of data, seed and i alone, and in the first epoch it is
the engine's. Each epoch drops less than one sequence at its end.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset


class EpochsOfSamples(MegatronDataset):
    """At least `num_samples` samples of one prefix, or of one split of it; one whole epoch where that is None.

    A drop-in for GPTDataset in the engine's BlendedMegatronDatasetBuilder. The indices of every epoch are built, and
    cached as the engine caches them, when the dataset is made; one epoch at a time is open.
    """

    epoch_class: type[GPTDataset] = GPTDataset

    def __init__(
        self, dataset: Any, dataset_path: str | None, indices: Any, num_samples: int | None, split: Any, config: Any
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, split, config)
        self._arguments = (dataset, dataset_path, indices, None, split)
        self._number, self._epoch = 0, self._build(0)
        self._per_epoch = len(self._epoch)
        if self._per_epoch < 1:
            raise ValueError(f"{dataset_path}: fewer tokens than one sequence of {config.sequence_length} and the next")
        self._epochs = max(1, -(-(num_samples or 0) // self._per_epoch))
        for number in range(1, self._epochs):
            self._build(number)

    @classmethod
    def numel_low_level_dataset(cls, low_level_dataset: Any) -> int:
        """Documents of the data."""
        return cls.epoch_class.numel_low_level_dataset(low_level_dataset)

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: Any) -> Any:
        """The data itself, opened."""
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
        return self.epoch_class(*self._arguments, config)


class EpochsOfMadeUpSamples(EpochsOfSamples):
    """The same of the engine's made-up tokens."""

    epoch_class = MockGPTDataset


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch's order, 0 to 2^32 - 1: the run's own for epoch 0, so that neighbouring seeds of runs do
    not share their epochs the others are drawn from a hash."""
    if epoch == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
