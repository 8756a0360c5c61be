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
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.io.files import replacing
from megatron_moe.training.replay import StepReplay
from megatron_moe.training.trainer import Trainer

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


class SpikeWatch:
    """Checks the loss of every step of a run and writes the batches of spikes to FOLDER/spike_ITERATION.jsonl.

    On the last pipeline stage it keeps the step's losses per token, which are computed anyway; nothing is computed for
    a step that is no spike.

    Args:
        trainer: the run.
        replay: has the micro-batches of the step.
        folder: where the files are written.
    """

    def __init__(self, trainer: Trainer, replay: StepReplay, folder: Path) -> None:
        assert trainer.run.faults.loss_spike_factor is not None
        self._detector = SpikeDetector(trainer.run.faults.loss_spike_factor)
        self._trainer, self._replay, self._folder = trainer, replay, folder
        self._per_token: list[Tensor] = []
        self.count = 0
        groups = trainer.trained.pg_collection
        if groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0:
            trainer.trained.model[-1].register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._per_token.append(output.detach())

    def begin(self) -> None:
        """Forget the losses of the last step."""
        self._per_token.clear()

    def see(self, loss: float, first_sample: int) -> None:
        """Write the batch of an applied step if its loss is a spike. Collective over all ranks in that case.

        Args:
            loss: over the global batch, the same on every rank.
            first_sample: number of the step's first sequence, as the run counts them.
        """
        known = self._detector.see(loss)
        if known is None:
            return
        self.count += 1
        num_samples = self._trainer.progress.consumed_samples - first_sample
        losses, tokens = self._per_sequence(num_samples)
        if self._trainer.rank_facts.rank != 0:
            return
        middle, deviation = known
        iteration = self._trainer.progress.iteration
        head = {
            "iteration": iteration,
            "loss": loss,
            "median": middle,
            "deviation": deviation,
            "factor": self._trainer.run.faults.loss_spike_factor,
            "first_sample": first_sample,
            "sequences": num_samples,
        }
        path = self._folder / f"spike_{iteration:07d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(head) + "\n")
            for position, (total, count) in enumerate(zip(losses, tokens)):
                sample = first_sample + position
                # Read again rather than gathered: a sample is the same whoever reads it.
                ids = self._trainer.splits.train[sample]["tokens"].tolist()
                mean = total / count if count else math.nan
                line = {
                    "sample": sample,
                    "loss": mean if math.isfinite(mean) else None,
                    "loss_tokens": int(count),
                    "tokens": ids,
                }
                file.write(json.dumps(line) + "\n")
        self._trainer.reporter.event(
            "fault",
            f"iteration {iteration}: the loss jumped to {loss:.4f} from a median of {middle:.4f} (deviation "
            f"{deviation:.4f}); its {num_samples} sequences are in {path}; {self.count} spikes since the start",
            path=str(path),
        )

    def _per_sequence(self, num_samples: int) -> tuple[list[float], list[float]]:
        """Return the sum of losses and the number of tokens with a loss of each sequence of the step, on every rank."""
        sums = torch.zeros(2, num_samples, dtype=torch.float64, device=platform.device())
        dp = self._trainer.trained.pg_collection.dp
        if self._per_token:
            micro_batches = zip(self._per_token, self._replay.micro_batches[-1], strict=True)
            for index, (losses, batch) in enumerate(micro_batches):
                mask = batch["loss_mask"]
                assert mask is not None, "the last stage has batches"
                size = losses.shape[0]
                begin = (index * dp.size() + dp.rank()) * size
                sums[0, begin : begin + size] = (losses.double() * mask.double()).sum(dim=1)
                sums[1, begin : begin + size] = mask.double().sum(dim=1)
        dist.all_reduce(sums)
        return sums[0].tolist(), sums[1].tolist()
