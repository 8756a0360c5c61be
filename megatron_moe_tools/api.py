"""The Python interface: `Settings`, `train`, `load_model` and `save_hf`, which `megatron_moe` offers under its own name.

    import megatron_moe as mm

    settings = mm.Settings.from_preset("tiny", mock_data=True, vocab_size=1000, train_iters=20)
    result = mm.train(settings)
    print(result.steps[-1].loss, result.model.generate([1, 2, 3], max_new_tokens=5))

What the command line refuses raises `ConfigError` here, with the same message; a run that cannot go on raises
`RunFault`. Under torchrun every rank calls the same functions with the same arguments.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config import command_line
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.launch import launched_world, local_world_size
from megatron_moe.config.schema import Run, flatten
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.model.generate import Sampling, continuation
from megatron_moe.parallel import groups
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.sink import Sink
from megatron_moe.training.callback import Callback
from megatron_moe.training.program import Data, ProgramParts, TokenLoss
from megatron_moe.training.run import pretrain
from megatron_moe.training.trainer import Trainer
from megatron_moe_tools import compat
from megatron_moe_tools.pretrain import load_audit, page_sink, parse

if TYPE_CHECKING:
    from megatron_moe.engine.adam import Adam


@dataclass(frozen=True)
class Settings:
    """The settings of a run, checked for names and types; `train` checks that they go together.

    Attributes:
        command: the words of the command line that means the same.
        run: the settings by section, as `settings.run.moe.moe_router_topk`.
    """

    command: tuple[str, ...]
    run: Run = field(repr=False, compare=False)

    @classmethod
    def from_flags(cls, flags: str | Sequence[str], **changes: Any) -> Settings:
        """Return the settings of a command line of pretrain_moe.py, as one text or as words.

        Args:
            flags: ours, Megatron-LM's, or both.
            changes: flags by name, which win: `train_iters=20`, `bf16=True`, `lr=None` for a flag to unset.

        Raises:
            ConfigError: a name or a value is not known.
        """
        words = shlex.split(flags) if isinstance(flags, str) else [str(word) for word in flags]
        fields = compat.parser().fields_by_flag()
        kept: list[str] = []
        for group in command_line.groups(words):
            name = fields.get(command_line.parts(group)[0])
            if name not in changes:
                kept += group
        for name, value in changes.items():
            kept += _words(name, value)
        return cls(tuple(kept), parse(kept, launched_world()[1]))

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Settings:
        """Return the settings of a preset with changes, see `from_flags`."""
        return cls.from_flags(["--preset", name], **changes)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Settings:
        """Return the settings of a file for `--config` with changes, see `from_flags`."""
        return cls.from_flags(["--config", str(path)], **changes)

    def replace(self, **changes: Any) -> Settings:
        """Return the settings with changes, see `from_flags`."""
        return self.from_flags(self.command, **changes)

    def flat(self) -> dict[str, Any]:
        """Return every setting by its name."""
        return flatten(self.run)


def _words(name: str, value: Any) -> list[str]:
    """Return the words of the command line that set a flag."""
    flag = f"--{name.replace('_', '-')}"
    known = all_fields().get(name)
    if known is not None and known.is_bool and isinstance(value, bool):
        return [known.flag if value else known.negative_flag]
    if value is None:
        return [flag, "none"]
    if isinstance(value, (list, tuple)) and (known is None or known.repeated):
        return [flag, *map(str, value)]
    return [flag, str(value)]


class Model(torch.nn.Module):
    """A language model that is whole in this process.

    Attributes:
        settings: of the model, by section.
        tokenizer: the one that came with it; None where there is none.
    """

    def __init__(self, chunk: torch.nn.Module, settings: Run, vocab_size: int, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.chunk = chunk
        self.settings = settings
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V] in the model's dtype, without padding, for token ids [B, S]; it can be trained."""
        _join(self.settings)
        tokens = tokens.to(platform.device())
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.chunk(tokens, positions, None)[..., : self.vocab_size]

    @torch.no_grad()
    def logits(self, text: str | Sequence[int]) -> Tensor:
        """Return the logits [S, V] fp32 of a text or of token ids, in evaluation mode; row i is of the token after i."""
        with self._evaluating():
            return self(torch.tensor([self._ids(text)]))[0].float()

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """Continue a prompt with a key/value cache, up to the end of the document.

        Returns:
            The new text for a text, the new ids for ids.
        """
        _join(self.settings)
        ids = self._ids(prompt)
        end = () if self.tokenizer is None else (self.tokenizer.eod,)
        with self._evaluating():
            new = list(
                continuation(
                    self.chunk,
                    ids,
                    max_new_tokens,
                    vocab_size=self.vocab_size,
                    sampling=Sampling(temperature, top_k, top_p),
                    seed=seed,
                    end_ids=end,
                )
            )
        if not isinstance(prompt, str):
            return new
        assert self.tokenizer is not None
        return self.tokenizer.detokenize([token for token in new if token not in end])

    def _ids(self, text: str | Sequence[int]) -> list[int]:
        if not isinstance(text, str):
            return [int(token) for token in text]
        if self.tokenizer is None:
            raise ConfigError("a text needs a tokenizer, and the model came without one; hand in token ids")
        return self.tokenizer.tokenize(text) or [self.tokenizer.eod]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        settings: what it was started with.
        summary: as in `--summary-file`.
        steps: the metrics of each step of this process, on rank 0.
        evaluations: likewise.
        checkpoint: the step that has the last weights; None without `save`.
    """

    settings: Settings
    summary: dict[str, Any]
    steps: list[StepRecord]
    evaluations: list[EvalRecord]
    checkpoint: Path | None
    _trainer: Trainer | None = field(repr=False)
    _tokenizer: Tokenizer | None = field(repr=False)

    @property
    def model(self) -> Model:
        """The trained model, for a run of one process that shards nothing.

        Raises:
            ConfigError: the model is split over ranks.
        """
        ...


class _Records(Sink):
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvalRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self.evaluations.append(record)
