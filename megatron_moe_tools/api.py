"""The Python interface: `Settings`, `train`, `load_model` and `save_hf`, which `megatron_moe` has in its own namespace.

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
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.folder import STATE
from megatron_moe.config import command_line, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.launch import launched_world, local_world_size, require_rendezvous
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.hf.folder import CERTIFICATE, HFFolder
from megatron_moe.model.generate import Sampling, continuation
from megatron_moe.parallel import groups
from megatron_moe.report.metric import StepRecord
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.sink import Sink
from megatron_moe.training.callback import Callback
from megatron_moe.training.plan import check_start
from megatron_moe.training.program import Data, ProgramParts, TokenLoss
from megatron_moe.training.run import pretrain
from megatron_moe.training.trainer import Trainer
from megatron_moe_tools import compat
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert import cli as convert
from megatron_moe_tools.convert.hugging_face import HuggingFaceSource
from megatron_moe_tools.convert.native import MemorySource, NativeSink, NativeSource
from megatron_moe_tools.convert.pipeline import ConversionOptions, ConversionSource
from megatron_moe_tools.convert.pipeline import convert as conversion
from megatron_moe_tools.convert.workspace import Workspace
from megatron_moe_tools.models.load_model import open_model, saved_tensors
from megatron_moe_tools.models.source import PRECISION_FLAGS, ModelSource, locate, tokenizer_of_model
from megatron_moe_tools.pretrain import load_audit, page_sink, parse

if TYPE_CHECKING:
    from megatron_moe.engine.adam import Adam


@dataclass(frozen=True, init=False)
class Settings:
    """The settings of a run, checked for names and types; `train` checks that they go together.

    `Settings(load_hf="models/qwen", bf16=True)` has flags by name, `from_preset` and `from_yaml` begin with others.

    Attributes:
        command: the words of the command line that means the same.
        run: the settings by section, as `settings.run.moe.moe_router_topk`.
    """

    command: tuple[str, ...]
    run: Run = field(repr=False, compare=False)

    def __init__(self, **flags: Any) -> None:
        words: list[str] = []
        for name, value in flags.items():
            words += _words(name, value)
        self._set(tuple(words))

    def _set(self, command: tuple[str, ...]) -> None:
        object.__setattr__(self, "command", command)
        object.__setattr__(self, "run", parse(list(command), launched_world()[1]))

    @classmethod
    def from_flags(cls, flags: str | Sequence[str], **changes: Any) -> Settings:
        """Return the settings of a command line of pretrain_moe.py, as one text or as words.

        Args:
            flags: ours, Megatron-LM's, or both.
            changes: flags by name, which win: `train_iters=20`, `bf16=True`, `save=None` for a flag to unset.

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
        settings = cls.__new__(cls)
        settings._set(tuple(kept))
        return settings

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

    def __init__(
        self, chunk: torch.nn.Module, settings: Run, tokenizer: Tokenizer | None, source: ModelSource | None
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.settings = settings
        self.tokenizer = None if tokenizer is None or tokenizer.name == "NullTokenizer" else tokenizer
        self._trained_with, self._source = tokenizer, source
        bare: Any = getattr(chunk, "module", chunk)  # without what runs it in half precision
        self.vocab_size: int = bare.output_layer.vocab_size

    def as_source(self) -> MemorySource:
        """Return the weights as what a conversion reads."""
        options = ConversionOptions(no_optim=True)
        like: ConversionSource | None = None
        if self._source is not None:
            if (self._source.path / STATE).is_file():
                like = NativeSource(self._source.path, options)
            else:
                like = HuggingFaceSource(HFFolder.open(self._source.path), options)
        run = replace(self.settings, vocab_size=self.vocab_size)
        bare = getattr(self.chunk, "module", self.chunk)
        tokenizer = {} if self._trained_with is None else self._trained_with.facts()
        return MemorySource(run, saved_tensors(bare), tokenizer, like)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V] in the model's dtype, without padding, for token ids [B, S]; it can be trained."""
        _join(self.settings)
        tokens = tokens.to(platform.device())
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.chunk(tokens, positions, None)[..., : self.vocab_size]

    @torch.no_grad()
    def logits(self, text: str | Sequence[int]) -> Tensor:
        """Return logits [S, V] fp32 of a text or of token ids, in evaluation mode; row i is of the token after i."""
        with self._evaluating():
            return self(torch.tensor([self._ids(text)]))[0].float()

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """Continue a prompt with a key/value cache, up to the end of the document.

        Args:
            max_new_tokens: default: 64, or as many as the model has positions for.

        Returns:
            The new text for a text, the new ids for ids.
        """
        _join(self.settings)
        ids = self._ids(prompt)
        end = []
        if self._trained_with is not None and self._trained_with.eos is not None:
            end.append(self._trained_with.eos)
        left = self.settings.derived.max_position_embeddings - len(ids)
        new_tokens = min(64, left) if max_new_tokens is None else max_new_tokens
        if not 1 <= new_tokens <= left:
            raise ConfigError(
                f"max_new_tokens {new_tokens}: the prompt has {len(ids)} tokens, which leaves {left} positions"
            )
        with self._evaluating():
            new = list(
                continuation(
                    self.chunk,
                    ids,
                    new_tokens,
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
        steps, evaluations: the metrics of this process's steps and evaluations, on rank 0.
        checkpoint: the step that has the last weights; None without `save`.
    """

    settings: Settings
    summary: dict[str, Any]
    steps: list[StepRecord] = field(repr=False)
    evaluations: list[EvalRecord] = field(repr=False)
    checkpoint: Path | None
    _chunk: torch.nn.Module | None = field(repr=False)

    @property
    def model(self) -> Model:
        """The trained model, of a run of one process.

        Raises:
            ConfigError: ranks share the model, or there is none.
        """
        if self._chunk is None:
            raise ConfigError(
                "the model is spread over ranks or sharded (or this was a dry run): save it, and load_model(result."
                "checkpoint) in one process; a callback has its parts while it trains"
            )
        run, source = self.settings.run, None
        if self.checkpoint is not None or run.checkpoint.load_hf is not None:  # what it came with is exported with it
            source = locate(Path(self.checkpoint or run.checkpoint.load_hf or ""))
        tokenizer: Tokenizer | None = build_tokenizer(run.data, run.model.vocab_size)
        if source is not None and tokenizer is not None and tokenizer.name == "NullTokenizer":
            with contextlib.suppress(ConfigError):
                tokenizer = tokenizer_of_model(source)
        return Model(self._chunk, run, tokenizer, source).eval()


class _Records(Sink):
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvalRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self.evaluations.append(record)


class _KeepsModel(Callback):
    """Keeps the model of a run of one process, without the wrapper for data parallelism."""

    chunk: torch.nn.Module | None = None

    def attach(self, trainer: Trainer) -> None:
        wrapper: Any = trainer.trained.model[0]
        if trainer.run.derived.zero_stage < 2:
            self.chunk = wrapper.module


def train(
    settings: Settings,
    *,
    data: Data | None = None,
    valid_data: Data | None = None,
    loss: TokenLoss | None = None,
    optimizer: type[Adam] | None = None,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
) -> RunResult:
    """Train as the settings say. Under torchrun every rank calls this with the same arguments.

    Args:
        data: samples of your own in place of files: anything with a length and numbered samples, or a stream. A sample
            is seq_length + 1 token ids, or a dict of `tokens` and `labels` with, where wanted, `loss_mask`,
            `position_ids` and, with `reset_attention_mask`, `documents`, each of seq_length whole numbers. Sample i of
            a global batch is the same on every layout.
        valid_data: the same, for evaluations.
        loss: logits [B, S, V] fp32 and labels [B, S] -> a loss for each token [B, S], in place of cross entropy.
        optimizer: a subclass of `Adam` that overrides `update`.
        callbacks: see `Callback`. sinks: see `megatron_moe.report.Sink`.

    An error in data or loss on one rank is raised there as it is, and on the others as a RunFault that names the rank.
    A rank that has not left `train` after 30 s, in C code say, is ended. After an error SIGTERM is ignored until the
    next call: torchrun sends it to all ranks when the first one ends, and SIGKILL 30 s later.

    Raises:
        ConfigError: a mistake in settings, data or folders, found before anything is allocated.
        RunFault: the run cannot go on.
        KeyboardInterrupt: Ctrl-C.
    """
    _check_arguments(settings, callbacks)
    if _running:
        raise ConfigError("train: a run goes on in this process, and there is one at a time; call it after that")
    if data is not None:
        settings = settings.replace(program_data=True)
    run, (_, world_size) = settings.run, launched_world()
    for name in ("print_precision", "list_advisories", "log_legend"):
        if settings.flat()[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: prints a table and trains nothing; use the command line")
    rules.check(run, world_size)
    check_start(run, world_size, local_world_size(world_size))
    if not dist.is_initialized():
        require_rendezvous(world_size)
    _leave()
    records, kept = _Records(), _KeepsModel()
    _running.append(run)
    hook = sys.excepthook  # torch puts the rank before each line of a traceback, once more in each run
    try:
        summary = pretrain(
            run,
            also=[records, *sinks],
            audit=load_audit() if run.precision.audit_precision else None,
            callbacks=[*callbacks, kept] if world_size == 1 else callbacks,
            page_sink=page_sink,
            parts=ProgramParts(data, valid_data, loss, optimizer),
            ends_process=False,
        )
    finally:
        _running.clear()
        sys.excepthook = hook
    saved = summary.get("checkpoint")
    return RunResult(
        settings=settings,
        summary=summary,
        steps=records.steps,
        evaluations=records.evaluations,
        checkpoint=None if saved is None else Path(saved),
        _chunk=kept.chunk,
    )


def _check_arguments(settings: object, callbacks: object) -> None:
    """Refuse arguments of another type, and a call where no run can be."""
    if not isinstance(settings, Settings):
        raise ConfigError(
            f"settings: is {type(settings).__name__}; make one with Settings.from_preset, from_flags or from_yaml"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train: handles signals, and has to be called in the main thread")
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(one, Callback) for one in callbacks):
        raise ConfigError(f"callbacks: {callbacks!r} is no list of objects of subclasses of megatron_moe.Callback")
    for one in callbacks:
        for name in dir(type(one)):
            if name.startswith(("on_", "before_", "after_")) and not hasattr(Callback, name):
                hooks = ", ".join(hook for hook in vars(Callback) if not hook.startswith("_") and hook != "trainer")
                raise ConfigError(f"callbacks: {type(one).__name__}.{name} is never called; the methods are {hooks}")


def load_model(path: str | Path, *, dtype: str = "float32", ckpt_step: int | None = None) -> Model:
    """Load a model into this process: a run's folder, one step of it, or a Hugging Face folder.

    Args:
        dtype: float32, bfloat16 or float16. Weights are widened exactly, or rounded; the routers' biases stay fp32.
        ckpt_step: which step of a run's folder; default: the newest sound one.

    Raises:
        ConfigError: there is no model, it is damaged, or this machine has too little memory.
    """
    if dtype not in PRECISION_FLAGS:
        raise ConfigError(f"dtype {dtype}: choose one of {', '.join(PRECISION_FLAGS)}")
    source = locate(Path(path), ckpt_step)
    _leave()
    if dist.is_initialized():
        raise ConfigError(
            f"load_model({str(path)!r}): this process is in a run, which has its process groups; load after it"
        )
    try:
        found = open_model(source, getattr(torch, dtype))
    except BaseException:
        groups.destroy()
        raise
    _joined.append(found.run)
    try:
        tokenizer: Tokenizer | None = tokenizer_of_model(source)
    except ConfigError:  # a model without one takes ids
        tokenizer = None
    return Model(found.model, found.run, tokenizer, source).eval()


def save_hf(model: Model | str | Path, folder: str | Path) -> Path:
    """Write a model as a Hugging Face folder, as `megatron-moe convert --to hf` does, and return its path.

    Args:
        model: one in memory, with its present weights; or a run's folder or a step of it.
        folder: a folder that is empty or not there yet.

    Raises:
        ConfigError: the model belongs to no family, its tokenizer is gone, or the folder is not empty.
    """
    target = Path(folder).absolute()
    if not isinstance(model, (Model, str, Path)):
        raise ConfigError(
            f"save_hf: {type(model).__name__} is neither a model of load_model or train(...).model nor a path"
        )
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"save_hf: {target} is not empty, and nothing is overwritten; name another folder")
    if not isinstance(model, Model):
        convert.run(["--from", "native", "--to", "hf", "--load", str(model), "--save", str(target)])
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        sink = NativeSink(model.as_source())
        workspace = Workspace(Path(scratch) / "steps", sink.identity())
        with workspace.open():
            certificate.write(workspace.output / CERTIFICATE, conversion(sink, workspace))
            workspace.publish()
        convert.run(["--from", "native", "--to", "hf", "--load", str(workspace.target), "--save", str(target)])
    return target


_running: list[Run] = []
_joined: list[Run] = []
"""The run that the process groups of this process were made for, while a model of one process has some."""


def _join(run: Run) -> None:
    """Make the process groups of one process, which a forward pass needs, where there are none."""
    if not dist.is_initialized():
        groups.initialize(run)
        _joined.append(run)


def _leave() -> None:
    """Remove the groups that `_join` made: a run makes its own."""
    if _joined:
        groups.destroy()
        _joined.clear()
