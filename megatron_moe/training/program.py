"""What a program brings to a run of its own: samples, a loss, an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.model.loss import TokenLoss

if TYPE_CHECKING:
    from megatron_moe.engine.adam import Adam


class Samples(Protocol):
    """Samples by number: a list, a torch `Dataset` or the like."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


Data = Samples | Iterable[Any]
"""Where samples come from. One sample is S + 1 token ids, or a dict of `tokens` and `labels` [S] with, where wanted,
`loss_mask` and `position_ids` [S]. What has no length is read from its beginning on, again for each evaluation."""


@dataclass(frozen=True)
class ProgramParts:
    """What a program puts in the place of a run's own part; None: nothing."""

    data: Data | None = None
    valid_data: Data | None = None
    loss: TokenLoss | None = None
    optimizer: type[Adam] | None = None

    def check(self, run: Run) -> None:
        """Refuse settings that one of the parts does not go with.

        Raises:
            ConfigError: naming the part and the flag.
        """
        options = run.optimizer
        if run.data.program_data and self.data is None:
            raise ConfigError(
                "--program-data: the samples are those of a program that calls megatron_moe.train(settings, data=...); "
                "drop the flag and name files with --data-path"
            )
        if self.valid_data is not None and self.data is None:
            raise ConfigError("valid_data: needs data, too; name files for both, or hand in both")
        if self.data is not None and self.valid_data is None and run.training.eval_iters:
            raise ConfigError(
                f"--eval-iters {run.training.eval_iters}: there is nothing to evaluate; hand in valid_data, or set "
                "eval_iters to 0"
            )
        if self.loss is not None and run.model.cross_entropy_loss_fusion:
            raise ConfigError("--cross-entropy-loss-fusion: has no logits for a loss of your own to read; drop it")
        if self.optimizer is None:
            return
        for flag, is_set in (
            ("--optimizer muon", options.optimizer == "muon"),
            ("--use-precision-aware-optimizer", options.use_precision_aware_optimizer),
            ("--optimizer-cpu-offload", options.optimizer_cpu_offload),
        ):
            if is_set:
                raise ConfigError(f"{flag}: is another optimizer than {self.optimizer.__name__}; drop one of them")

    def datasets(self, run: Run, trained_on: int, evaluated: int) -> tuple[Dataset, Dataset | None, None] | None:
        """Return the splits of a run with data of the program's, of so many samples; None: it has none."""
        if self.data is None:
            return None
        valid = None
        if self.valid_data is not None and evaluated:
            valid = ProgramSamples(self.valid_data, "valid_data", run, evaluated)
        return ProgramSamples(self.data, "data", run, trained_on), valid, None


class ProgramSamples(Dataset):
    """A program's samples as the run reads them: dicts of int64 `tokens`, `labels`, `loss_mask`, `position_ids` [S].

    Samples with a length are repeated in their order where the run reads more.
    """

    def __init__(self, data: Data, name: str, run: Run, count: int) -> None:
        """Prepare to read `count` samples; `name` is the argument's, for messages.

        Raises:
            ConfigError: the data has a length of 0.
        """
        self._data, self._name, self._count = data, name, count
        self._width = run.model.seq_length
        self._stream: Iterator[Any] | None = None
        self._read = 0
        numbered: Any = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else None
        self._size = None if numbered is None else len(numbered)
        if self._size == 0:
            raise ConfigError(f"{name}: has no samples")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self._size is not None:
            return self._sample(self._data[number % self._size], number)  # type: ignore[index]
        return self._sample(self._streamed(number), number)

    def _streamed(self, number: int) -> Any:
        """Return a sample of a stream, which is read from its beginning on where it has gone past it."""
        if self._stream is None or number < self._read:
            stream = iter(self._data)
            if stream is self._stream:
                raise ValueError(
                    f"{self._name}: is an iterator, which cannot be read again from sample {number}; hand in an object "
                    "whose __iter__ begins anew"
                )
            self._stream, self._read = stream, 0
        sample = None
        for sample in self._stream:
            self._read += 1
            if self._read == number + 1:
                return sample
        raise ValueError(f"{self._name}: ended after {self._read} samples; the run reads {self._count}")

    def _sample(self, sample: Any, number: int) -> dict[str, Tensor]:
        if isinstance(sample, Mapping):
            missing = {"tokens", "labels"} - sample.keys()
            if missing:
                raise ValueError(f"{self._name}: sample {number} has no {' and no '.join(sorted(missing))}")
            columns = {name: self._column(sample[name], name, number, self._width) for name in sample}
        else:
            ids = self._column(sample, "ids", number, self._width + 1)
            columns = {"tokens": ids[:-1], "labels": ids[1:]}
        columns.setdefault("loss_mask", torch.ones(self._width, dtype=torch.int64))
        columns.setdefault("position_ids", torch.arange(self._width))
        return columns

    def _column(self, values: Sequence[int] | Tensor, name: str, number: int, width: int) -> Tensor:
        column = torch.as_tensor(values)
        whole = column.to(torch.int64)
        if column.shape != (width,) or not torch.equal(whole.to(column.dtype), column):
            raise ValueError(
                f"{self._name}: {name} of sample {number} are {column.dtype} {list(column.shape)}; they have to be "
                f"whole numbers [{width}], for --seq-length {self._width}"
            )
        return whole
