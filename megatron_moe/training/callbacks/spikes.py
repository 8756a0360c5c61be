"""Loss spikes: where the loss jumps, the batch of that step is written to a file.

A spike is a finite loss of more than median + factor x deviation, both over the last 128 applied steps before it, of
which there have to be 16. The deviation is 1.4826 x the median distance from the median, which is the standard
deviation where losses are normal and hardly moves with a few outliers; at least 0.5 % of the median, for losses that
hardly change. A spike is counted among the steps that follow, so that a level that stays is accepted.
"""

from __future__ import annotations

import json
import math
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.io.files import replacing
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer, fault_folder

WINDOW, LEAST = 128, 16
_NORMAL, _FLOOR = 1.4826, 0.005


class SpikeDetector:
    """A detector of spikes by the running median of the losses and their deviation from it.

    Args:
        factor: `--loss-spike-factor`.
    """

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
        return known if known is not None and loss > known[0] + self._factor * known[1] else None


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

    def _keep(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
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
        losses, tokens = self._per_sequence(step, num_samples)
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
            for position, (total, count) in enumerate(zip(losses, tokens)):
                sample = step.first_sample + position
                # Read again rather than gathered: a sample is the same whoever reads it.
                ids = self.trainer.splits.train[sample]["tokens"].tolist()
                mean = total / count if count else math.nan
                line = {
                    "sample": sample,
                    "loss": mean if math.isfinite(mean) else None,
                    "loss_tokens": int(count),
                    "tokens": ids,
                }
                file.write(json.dumps(line) + "\n")
        self.trainer.reporter.event(
            "fault",
            f"iteration {step.iteration}: the loss jumped to {result.loss:.4f} from a median of {middle:.4f} "
            f"(deviation {deviation:.4f}); its {num_samples} sequences are in {path}; "
            f"{self.count} spikes since the start",
            path=str(path),
        )

    def _per_sequence(self, step: Step, num_samples: int) -> tuple[list[float], list[float]]:
        """Return the sum of losses and the number of tokens with a loss of each sequence of the step, on every rank."""
        sums = torch.zeros(2, num_samples, dtype=torch.float64, device=platform.device())
        dp = self.trainer.trained.pg_collection.dp
        if self._per_token:
            micro_batches = zip(self._per_token, step.micro_batches[-1], strict=True)
            for index, (losses, batch) in enumerate(micro_batches):
                mask = batch["loss_mask"]
                assert mask is not None, "the last stage has batches"
                size = losses.shape[0]
                begin = (index * dp.size() + dp.rank()) * size
                sums[0, begin : begin + size] = (losses.double() * mask.double()).sum(dim=1)
                sums[1, begin : begin + size] = mask.double().sum(dim=1)
        dist.all_reduce(sums)
        return sums[0].tolist(), sums[1].tolist()
