"""What a program brings to a run of its own: samples, a loss, an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import DOCUMENTS, keys_of
from megatron_moe.model.loss import TokenLoss

if TYPE_CHECKING:
    from megatron_moe.checkpoint.plan import CheckpointPlan
    from megatron_moe.engine.adam import Adam


class Samples(Protocol):
    """Samples by number: a list, a torch `Dataset` or the like."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


Data = Samples | Iterable[Any]
"""Where samples come from. One sample is S + 1 token ids, or a dict of `tokens` and `labels` [S] with, where wanted,
`loss_mask`, `position_ids` and, with `--reset-attention-mask`, `documents` [S]. What has no length is read from its
beginning on, again for each evaluation."""


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
        for name, data in (("data", self.data), ("valid_data", self.valid_data)):
            if data is not None:
                _check_data(name, data, run)
        if self.loss is not None and not callable(self.loss):
            raise ConfigError(f"loss: is {type(self.loss).__name__}; it has to be a function of logits and labels")
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
        from megatron_moe.engine.adam import Adam

        is_class = isinstance(self.optimizer, type) and issubclass(self.optimizer, Adam)
        if not is_class or (self.optimizer is not Adam and self.optimizer.update is Adam.update):
            raise ConfigError(
                f"optimizer: {self.optimizer!r} is no class that overrides `update` of megatron_moe.Adam, with its "
                "state in exp_avg and exp_avg_sq; hand in such a class, not an object"
            )
        for flag, is_set in (
            ("--optimizer muon", options.optimizer == "muon"),
            ("--use-precision-aware-optimizer", options.use_precision_aware_optimizer),
            ("--optimizer-cpu-offload", options.optimizer_cpu_offload),
        ):
            if is_set:
                raise ConfigError(f"{flag}: is another optimizer than {self.optimizer.__name__}; drop one of them")

    def names(self) -> dict[str, str]:
        """Return the names of the loss and of the optimizer, of what is there."""
        parts = {"loss": self.loss, "optimizer": self.optimizer}
        return {
            part: getattr(value, "__qualname__", type(value).__qualname__) for part, value in parts.items() if value
        }

    def check_resume(self, run: Run, start_from: CheckpointPlan) -> None:
        """Refuse to go on from a step that was trained with another loss or optimizer.

        Raises:
            ConfigError: naming both.
        """
        source = start_from.source
        if source is None or run.checkpoint.finetune or source.weights_only or run.training.skip_train:
            return
        saved, now = source.state.get("program", {}), self.names()
        for part in sorted({*saved, *now}):
            if saved.get(part) != now.get(part):
                raise ConfigError(
                    f"--load {source.step}: was trained with {saved.get(part) or 'the default'} as {part}, this run "
                    f"has {now.get(part) or 'the default'}; hand in the same, or take its weights alone: --finetune"
                )

    def datasets(
        self, run: Run, vocab_size: int, trained_on: int, evaluated: int
    ) -> tuple[Dataset, Dataset | None, None] | None:
        """Return the splits of a run with data of the program's, of so many samples; None: it has none."""
        if self.data is None:
            return None
        valid = None
        if self.valid_data is not None and evaluated:
            valid = ProgramSamples(self.valid_data, "valid_data", run, evaluated, vocab_size)
        return ProgramSamples(self.data, "data", run, trained_on, vocab_size), valid, None


def _check_data(name: str, data: Any, run: Run) -> None:
    """Refuse what holds no samples, and a first sample of another form, where it can be looked at."""
    is_numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, (str, bytes, Path, Mapping)) or not (is_numbered or hasattr(data, "__iter__")):
        raise ConfigError(
            f"{name}: is {type(data).__name__}; it has to be a list or a torch Dataset of samples, or a stream; "
            "files are named by data_path"
        )
    if is_numbered:
        try:
            ProgramSamples(data, name, run, 1)[0]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    elif iter(data) is data and run.checkpoint.load is not None:
        raise ConfigError(
            f"{name}: is an iterator, which a run that goes on cannot read from its beginning; hand in an object whose "
            "__iter__ begins anew, or drop --load"
        )


class ProgramSamples(Dataset):
    """A program's samples as the run reads them: dicts of int64 `tokens`, `labels`, `loss_mask`, `position_ids` [S].

    With `--reset-attention-mask` also `documents` [S] (`data.batches.DOCUMENTS`); by default a sample is one document.
    Samples with a length are repeated in their order where the run reads more.
    """

    def __init__(self, data: Data, name: str, run: Run, count: int, vocab_size: int | None = None) -> None:
        """Prepare to read `count` samples; `name` is the argument's, for messages.

        Raises:
            ConfigError: the data has a length of 0.
        """
        self._data, self._name, self._count = data, name, count
        self._width, self.vocab_size = run.model.seq_length, vocab_size
        self._keys, self._restarts = keys_of(run), run.data.reset_position_ids
        self._stream: Iterator[Any] | None = None
        self._read = 0
        numbered: Any = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else None
        self._size = None if numbered is None else len(numbered)
        if self._size == 0:
            raise ConfigError(f"{name}: has no samples")

    def __len__(self) -> int:
        return self._count

    def blame(self, token: int, number: int, vocabulary: int) -> str:
        """Return what is wrong with a sample that has a token id outside the vocabulary."""
        masked = "; what counts for no loss has loss_mask 0" if token == -100 else ""
        return f"{self._name}: sample {number} has token id {token}, and the vocabulary {vocabulary} ids{masked}"

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
            missing, unknown = {"tokens", "labels"} - sample.keys(), sample.keys() - set(self._keys)
            if missing:
                raise ValueError(f"{self._name}: sample {number} has no {' and no '.join(sorted(missing))}")
            if unknown:
                raise ValueError(
                    f"{self._name}: sample {number} has {', '.join(map(repr, sorted(unknown)))}, which is not read; a "
                    f"sample has {', '.join(self._keys)}"
                )
            columns = {name: self._column(sample[name], name, number, self._width) for name in sample}
        else:
            ids = self._column(sample, "ids", number, self._width + 1)
            columns = {"tokens": ids[:-1], "labels": ids[1:]}
        places = torch.arange(self._width)
        columns.setdefault("loss_mask", torch.ones(self._width, dtype=torch.int64))
        if DOCUMENTS in self._keys:
            documents = columns.setdefault(DOCUMENTS, torch.zeros_like(places))
            end = int((documents >= 0).sum())
            begins = torch.where(documents == places, places, 0).cummax(0).values
            if end == 0 or not torch.equal(documents, torch.where(places < end, begins, -1)):
                raise ValueError(
                    f"{self._name}: documents of sample {number} have to be, for each token, the position of its "
                    "document's first token, from 0 on, and -1 for padding behind them all"
                )
            if columns["loss_mask"][end:].any():
                raise ValueError(f"{self._name}: sample {number} has loss_mask 1 where documents has -1, for padding")
            if self._restarts:
                columns.setdefault("position_ids", torch.where(documents < 0, 0, places - documents))
        columns.setdefault("position_ids", places)
        return columns

    def _column(self, values: Sequence[int] | Tensor, name: str, number: int, width: int) -> Tensor:
        try:
            column = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{self._name}: sample {number} is {type(values).__name__}; it has to be {width} token ids, or a dict "
                "of tokens and labels"
            ) from None
        whole = column.to(torch.int64)
        if column.shape != (width,) or not torch.equal(whole.to(column.dtype), column):
            raise ValueError(
                f"{self._name}: {name} of sample {number} are {column.dtype} {list(column.shape)}; they have to be "
                f"whole numbers [{width}], for --seq-length {self._width}"
            )
        return whole
