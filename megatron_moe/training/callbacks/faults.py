"""Faults of steps: values that are not finite, with their cause, and jumps of the loss, with their batch.

The check that every step makes says that something is wrong, to all ranks at once. After such a step `NonFinite` looks
for the cause: it names the state and the gradients that are not finite, and runs the step's micro-batches once more
with a hook on every module, router and weight (`NonFiniteHooks`). `--on-nan` says what follows.

A spike is a finite loss of more than median + factor x deviation, both over the last 128 applied steps before it, of
which there have to be 16. The deviation is 1.4826 x the median distance from the median, which is the standard
deviation where losses are normal and hardly moves with a few outliers; at least 0.5 % of the median, for losses that
hardly change. A spike is counted among the steps that follow, so that a level that stays is accepted.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.checkpoint.state import TrainState
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.io.files import replacing
from megatron_moe.io.texts import listed
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.moe.router import TopKRouter, routers
from megatron_moe.moe.routing import RoutedTokens
from megatron_moe.parallel.groups import RankFacts
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.replay import StepReplay
from megatron_moe.training.state_checks import (
    RANKS_SHOWN,
    damage_text,
    global_names,
    is_finite,
    non_finite_state,
    non_finite_text,
)
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer, fault_folder

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, order=True)
class NonFiniteValue:
    """A tensor with an element that is not finite; values are ordered by when they came up in the step.

    phase, micro_batch, stage and order say when: the virtual pipeline stage counts in the direction of the pass.
    """

    phase: int
    micro_batch: int
    stage: int
    order: int
    what: str
    value: str = field(compare=False)


class NonFiniteHooks:
    """Hooks that collect the tensors that are not finite while `watching`.

    pp: pipeline stage of this rank, and how many there are.
    """

    def __init__(self, model: Sequence[torch.nn.Module], num_micro_batches: int, pp: tuple[int, int]) -> None:
        self._model, self._num_micro_batches = model, num_micro_batches
        self._stage, self._stages = pp
        self._order = self._backward_of = 0
        self._micro_batches = [-1] * len(model)
        self.seen: list[NonFiniteValue] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inspect the forward and backward passes of the block, without changing what they compute."""
        with ExitStack() as stack:
            for index, chunk in enumerate(self._model):
                names = global_names(chunk)
                stack.callback(chunk.register_forward_pre_hook(partial(self._begins, index)).remove)
                known: dict[int, str] = {}
                for name, module in chunk.named_modules():
                    known[id(module)] = names[name]
                    hook = partial(self._output, index, names[name])
                    stack.callback(module.register_forward_hook(hook).remove)
                # Of a fully sharded model: the gathered weights, which stay the same objects.
                parameters = chunk.named_parameters()
                if isinstance(chunk, FullyShardedDataParallel):
                    parameters = chunk.gathered()
                for name, parameter in parameters:
                    if parameter.requires_grad:
                        hook = partial(self._gradient, index, None, f"the gradient of {names[name]}")
                        stack.callback(parameter.register_hook(hook).remove)
                for router in routers([chunk]):
                    # The output alone does not show which of these steps went wrong first.
                    stack.enter_context(router.observed_by(partial(self._routed, index, known[id(router)])))
            yield

    def _begins(self, chunk: int, _module: torch.nn.Module, _inputs: object) -> None:
        # A step that counts ahead passes twice over its micro-batches.
        self._micro_batches[chunk] = (self._micro_batches[chunk] + 1) % self._num_micro_batches

    def _output(self, chunk: int, name: str, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        micro_batch = self._micro_batches[chunk]
        what = f"the output of {name}" if name else "the loss per token, or what this stage sends on"
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            self._see_forward(chunk, what, leaf)
            if leaf.requires_grad:
                leaf.register_hook(partial(self._gradient, chunk, micro_batch, f"the gradient of {what}"))

    def _see_forward(self, chunk: int, what: str, tensor: Tensor) -> None:
        self._order += 1
        if not is_finite(tensor):
            stage = chunk * self._stages + self._stage
            when = (FORWARD, self._micro_batches[chunk], stage, self._order)
            self.seen.append(NonFiniteValue(*when, what, non_finite_text(tensor)))

    def _routed(self, chunk: int, name: str, _: TopKRouter, routed: RoutedTokens) -> None:
        self._see_forward(chunk, f"the input of {name}", routed.hidden)
        self._see_forward(chunk, f"the logits of {name}", routed.logits)
        self._see_forward(chunk, f"the scores of {name}", routed.scores)

    def _gradient(self, chunk: int, micro_batch: int | None, what: str, gradient: Tensor) -> None:
        self._order += 1
        # A weight's gradient comes between those of activations, which know their micro-batch.
        if micro_batch is not None:
            self._backward_of = micro_batch
        if not is_finite(gradient):
            stage = -(chunk * self._stages + self._stage)
            when = (BACKWARD, self._backward_of, stage, self._order)
            self.seen.append(NonFiniteValue(*when, what, non_finite_text(gradient)))


SKIPS_IN_A_ROW = 50
"""A run whose steps are all skipped learns nothing. fp16's first loss scale may take forty steps to come down."""


class NonFinite(Callback):
    """Finds the cause of a step that is not finite, and stops the run or goes on, as `--on-nan` says."""

    _skips = 0

    def after_step(self, step: Step, result: StepResult) -> None:
        """Look at the step that was just counted. Collective over all ranks.

        Raises:
            RunFault: it was not applied, and the run is to stop or its state is damaged; or too many in a row were not.
        """
        if result.empty:
            self.trainer.reporter.event(
                "warning",
                f"iteration {step.iteration}: no token of the global batch counts for the loss "
                "(every loss mask is 0): nothing is learnt from it, weights, expert_bias and learning rate "
                "stay as they were",
            )
        elif not result.committed and not result.overflow:
            trainer = self.trainer
            cause, damaged = find_cause(trainer.run, trainer.trained, trainer.rank_facts, step.replay)
            text = f"iteration {step.iteration}: {cause}"
            if result.damaged or damaged:
                raise RunFault(f"{text}; skipping the step does not repair that: continue from the last checkpoint")
            if trainer.run.faults.on_nan == "stop":
                raise RunFault(f"{text}; stopped (--on-nan stop), nothing of the step was applied")
            skipped = trainer.progress.skipped_iterations
            trainer.reporter.event("fault", f"{text}; the step is left out (--on-nan skip), {skipped} so far")
        self._skips += 1
        if result.committed:
            self._skips = 0
        if self._skips == SKIPS_IN_A_ROW:
            what = "a loss or gradients that were not finite"
            remedy = "A smaller --lr, --clip-grad or bf16 instead of fp16 may help."
            if result.empty:
                what = "a global batch without one token that counts for the loss"
                remedy = "Look at the loss masks of the data (--eod-mask-loss, or labels that are all masked)."
            raise RunFault(
                f"{SKIPS_IN_A_ROW} steps in a row up to iteration {step.iteration}, the last with {what}; none was "
                f"applied. {remedy}"
            )


@dataclass(frozen=True)
class FaultReport:
    """What one rank found after a step that is not finite.

    place: the rank and its coordinates, for messages. state, gradients: descriptions of the tensors that are not
    finite. first: the first such value of the replay.
    """

    place: str
    state: list[str]
    gradients: list[str]
    first: NonFiniteValue | None


def find_cause(run: Run, trained: TrainState, place: RankFacts, replay: StepReplay) -> tuple[str, bool]:
    """Return where the step that has just failed went wrong. Collective over all ranks, after `train_step`.

    Returns:
        One sentence, the same on every rank, and whether it is the run's state that is damaged.
    """
    state = [f"{what} holds {non_finite_text(tensor)}" for what, tensor in non_finite_state(trained)]
    gradients = []
    for chunk in trained.model:
        names = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not is_finite(gradient):
                gradients.append(f"the gradient of {names[name]} holds {non_finite_text(gradient)}")
    hooks = NonFiniteHooks(trained.model, len(replay.micro_batches[0]), (place.pp_rank, place.pp_size))
    with hooks.watching():
        replay.run_again(trained.model, micro_batch_size=run.training.micro_batch_size, seq_length=run.model.seq_length)
    reports = all_gather_object(FaultReport(str(place), state, gradients, min(hooks.seen, default=None)))
    if any(map(attrgetter("state"), reports)):
        return damage_text([(report.place, report.state) for report in reports]), True
    # The cause that explains the reports of all ranks: activations, else gradients.
    first = min((report.first for report in reports if report.first is not None), default=None)
    if first is not None:
        where = listed([one.place for one in reports if one.first == first], RANKS_SHOWN, "more ranks")
        of_pass = "backward" if first.phase == BACKWARD else "forward"
        when = f"the first in the {of_pass} pass of micro-batch {first.micro_batch}"
        return f"{first.value} of {first.what}, {when}, on {where}", False
    again = "the same micro-batches, run once more, are finite on all ranks"
    spoiled = [(report.place, report.gradients) for report in reports if report.gradients]
    if not spoiled:
        return f"the loss or the gradients' norm was not finite; {again}: a fault that does not repeat", False
    return f"{damage_text(spoiled)}; {again}: it came about while gradients were reduced, or does not repeat", False


WINDOW, LEAST = 128, 16
_NORMAL, _FLOOR = 1.4826, 0.005


class SpikeDetector:
    """A detector of spikes by the running median of the losses and their deviation from it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def see(self, loss: float) -> tuple[float, float] | None:
        """Add the loss of an applied step; return (median, deviation) of those before it where it is a spike."""
        known = None
        if len(self._losses) >= LEAST:
            middle = median(self._losses)
            spread = _NORMAL * median(abs(past - middle) for past in self._losses)
            known = middle, max(spread, _FLOOR * abs(middle))
        self._losses.append(loss)
        if known is None or not loss > known[0] + self._factor * known[1]:
            return None
        return known


class Spikes(Callback):
    """Writes the batch of every spike of the loss to FOLDER/spike_ITERATION.jsonl, with `--loss-spike-factor`.

    On the last pipeline stage it keeps the step's losses per token, which are computed anyway; nothing is computed for
    a step that is no spike.
    """

    def attach(self, trainer: Trainer) -> None:
        """Have the losses per token kept."""
        super().attach(trainer)
        factor = trainer.run.faults.loss_spike_factor
        self._detector = None if factor is None else SpikeDetector(factor)
        self._per_token: list[Tensor] = []
        self.count = 0
        groups = trainer.trained.pg_collection
        if factor is not None and groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0:
            trainer.trained.model[-1].register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, _inputs: object, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._per_token.append(output.detach())

    def before_step(self, step: Step) -> None:
        """Forget the losses of the last step."""
        self._per_token.clear()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Write the batch of an applied step if its loss is a spike. Collective over all ranks in that case."""
        if self._detector is None or not result.committed:
            return
        known = self._detector.see(result.loss)
        if known is None:
            return
        self.count += 1
        num_samples = self.trainer.progress.consumed_samples - step.first_sample
        # Of each sequence of the step the sum of losses, and the number of tokens with a loss, on every rank.
        sums = torch.zeros(2, num_samples, dtype=torch.float64, device=platform.device())
        dp = self.trainer.trained.pg_collection.dp
        for index, (losses, batch) in enumerate(zip(self._per_token, step.micro_batches[-1])):
            mask = batch["loss_mask"]
            assert mask is not None, "the last stage has batches"
            size = losses.shape[0]
            begin = (index * dp.size() + dp.rank()) * size
            sums[0, begin : begin + size] = (losses.double() * mask.double()).sum(dim=1)
            sums[1, begin : begin + size] = mask.double().sum(dim=1)
        dist.all_reduce(sums)
        if self.trainer.rank_facts.rank != 0:
            return
        middle, deviation = known
        head = {
            "iteration": step.iteration,
            "loss": result.loss,
            "median": middle,
            "deviation": deviation,
            "factor": self.trainer.run.faults.loss_spike_factor,
            "first_sample": step.first_sample,
            "sequences": num_samples,
        }
        folder = fault_folder(self.trainer.run)
        assert folder is not None, "rules.faults.spikes_have_a_folder"
        path = folder / f"spike_{step.iteration:07d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(head) + "\n")
            for position, (total, count) in enumerate(sums.T.tolist()):
                sample = step.first_sample + position
                # Read again rather than gathered: a sample is the same whoever reads it.
                ids = self.trainer.splits.train[sample]["tokens"].tolist()
                line = {"sample": sample, "loss": None, "loss_tokens": int(count), "tokens": ids}
                if count and math.isfinite(total / count):
                    line["loss"] = total / count
                file.write(json.dumps(line) + "\n")
        self.trainer.reporter.event(
            "fault",
            f"iteration {step.iteration}: the loss jumped to {result.loss:.4f} from a median of {middle:.4f} "
            f"(deviation {deviation:.4f}); its {num_samples} sequences are in {path}; "
            f"{self.count} spikes since the start",
            path=str(path),
        )
