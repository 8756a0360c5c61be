"""What a process does beside the steps: Python's garbage collection by hand, and profiles of some steps.

`--manual-gc`: by itself Python collects when enough objects were made, on each rank at another time, and each time all
ranks wait for one. By hand all ranks collect between the same steps.

`--profile`: each station of docs/internals/journey.md is a range in the profile, around a function or a module of the
run, entered within the profiled steps alone.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_moe import platform
from megatron_moe.config.run_flags import TrainingConfig
from megatron_moe.engine.patching import replaced
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer


class GarbageCollection(Callback):
    """Turns Python's collector off while the run trains, and collects at intervals, with `--manual-gc`."""

    _was_on = False

    def before_training(self) -> None:
        """Collect once and turn the collector off."""
        if self.trainer.run.training.manual_gc:
            self._was_on = gc.isenabled()
            gc.disable()
            gc.collect()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Collect at the end of each `--manual-gc-interval`."""
        options = self.trainer.run.training
        if options.manual_gc and options.manual_gc_interval and step.iteration % options.manual_gc_interval == 0:
            gc.collect()

    def close(self) -> None:
        """Turn the collector on again."""
        if self._was_on:
            gc.enable()


@contextmanager
def collected(options: TrainingConfig) -> Iterator[None]:
    """Collect before the block, an evaluation, and what is young after it, unless `--no-manual-gc-eval` is given."""
    by_hand = options.manual_gc and options.manual_gc_eval
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        gc.collect(generation=0)


FUNCTIONS = {
    "megatron_moe.data.batches:BatchIterator.__next__": "batch",
    "megatron_moe.moe.dispatch:LocalDispatcher.dispatch": "dispatch",
    "megatron_moe.moe.dispatch:LocalDispatcher.combine": "combine",
    "megatron_moe.moe.dispatch:AllToAllDispatcher.dispatch": "dispatch",
    "megatron_moe.moe.dispatch:AllToAllDispatcher.combine": "combine",
    "megatron_moe.moe.dispatch:AllGatherDispatcher.dispatch": "dispatch",
    "megatron_moe.moe.dispatch:AllGatherDispatcher.combine": "combine",
    "megatron_moe.training.step:loss_func": "loss",
    "megatron_moe.training.step:finalize_model_grads": "bias step",
    "megatron_moe.training.step:_own_sums": "check",
    "megatron_moe.training.step:_commit": "commit",
}
"""Function -> the station that it is. The bias step's has the reduction of gradients too."""
MODULES = {
    "ExactEmbedding": "embedding",
    "LatentAttention": "attention",
    "Attention": "attention",
    "RMSNorm": "norms",
    "TopKRouter": "route",
    "LocalExperts": "experts",
    "SharedExperts": "shared expert",
    "MLP": "dense MLP",
    "OutputLayer": "output layer",
}
"""Class of a module, or of one that it derives from -> its station; the first that fits, in the order of the class."""
PREFIX = "station: "


class Profiler(Callback):
    """Profiles the steps that `--profile` names, on the ranks of `--profile-ranks`.

    With `--use-pytorch-profiler` the rank writes a Chrome trace. Else CUDA's profiler is started and stopped, for a
    program around the process that waits for it (nsys).
    """

    def attach(self, trainer: Trainer) -> None:
        """Find out which steps are profiled, and where their trace is written."""
        super().attach(trainer)
        options, rank = trainer.run.logging, trainer.rank_facts.rank
        self._first, self._last = options.profile_step_start + 1, options.profile_step_end
        self._is_profiled = options.profile and rank in options.profile_ranks
        folder = Path(options.tensorboard_dir or Path(trainer.run.checkpoint.save or "") / "profile")
        self._trace = folder / f"rank{rank}.steps{self._first}-{self._last}.pt.trace.json"
        self._open: ExitStack | None = None
        self._recorded: profile | None = None

    def before_step(self, step: Step) -> None:
        """Start with the first step to profile."""
        if self._is_profiled and step.iteration == self._first:
            self._open = ExitStack()
            if self.trainer.run.logging.use_pytorch_profiler:
                self._recorded = self._open.enter_context(profile(activities=activities()))
                self._open.enter_context(profiler_ranges())
            else:
                self._open.enter_context(platform.cuda_profile())

    def after_step(self, step: Step, result: StepResult) -> None:
        """Stop after the last step to profile."""
        if step.iteration >= self._last:
            self.close()

    def close(self) -> None:
        """Stop where a profile has begun."""
        if self._open is not None:
            self._open.close()
            self._open = None
        if self._recorded is not None:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._recorded.export_chrome_trace(str(self._trace))
            self._recorded = None
            self.trainer.reporter.message(f"wrote {self._trace}")


def activities() -> list[ProfilerActivity]:
    """Return what torch's profiler records on this machine."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.has_cuda() else [])]


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Put a range around every station within the block."""
    open_ranges: list[tuple[torch.nn.Module, Any]] = []

    def enter(module: torch.nn.Module, _: object) -> None:
        station = next((MODULES[one.__name__] for one in type(module).__mro__ if one.__name__ in MODULES), None)
        if station is not None:
            named = record_function(PREFIX + station)
            named.__enter__()
            open_ranges.append((module, named))

    def leave(module: torch.nn.Module, *_: Any) -> None:
        if open_ranges and open_ranges[-1][0] is module:
            open_ranges.pop()[1].__exit__(None, None, None)

    with ExitStack() as stack:
        for path, station in FUNCTIONS.items():
            stack.enter_context(_with_range(path, station))
        for handle in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)):
            stack.callback(handle.remove)
        yield


def _with_range(path: str, station: str) -> Any:
    """Return a context in which the function at `path` ("module:name" or "module:Class.name") is a range."""
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def ranged(*args: Any, **named: Any) -> Any:
        with record_function(PREFIX + station):
            return function(*args, **named)

    return replaced([owner], **{name: ranged})
