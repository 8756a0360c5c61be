"""Checks at intervals: the dtypes of model and optimizer, the audit of one step, and the replicas of each weight.

Every copy of a weight and of expert_bias has the same bits on all its ranks. A bit that flips in one rank's memory, or
a collective that goes wrong on one of them, makes replicas drift apart silently: from then on the ranks train different
models. The ranks that have a copy of a tensor compare its hash; the tensor itself is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.checkpoint.state import TrainState
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.io.texts import listed
from megatron_moe.model.fully_sharded import local
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.state_checks import global_names, named_expert_biases
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import sum_over_ranks

StepAudit = Callable[[Run, list[torch.nn.Module], Callable[[str], None]], AbstractContextManager[None]]
"""What `--audit-precision` puts around a step: from the run, its model and the reporter's message, a context."""


class PrecisionCheck(Callback):
    """Checks all dtypes of model and optimizer at the end of each `--check-precision-interval`."""

    def after_step(self, step: Step, result: StepResult) -> None:
        """Check the dtypes where that is due.

        Raises:
            PrecisionError: on this rank only: the launcher ends the others.
        """
        interval = self.trainer.run.precision.check_precision_interval
        if interval and step.iteration % interval == 0:
            self.trainer.check_precision("training")


class PrecisionAudit(Callback):
    """Traces the second step of the process: what a process does once is done in the first."""

    def __init__(self, audit: StepAudit | None) -> None:
        self._audit = audit
        self._iteration = 0

    def notes(self) -> Sequence[str]:
        """Say where the run ends before its second step."""
        self._iteration = self.trainer.progress.iteration + 2
        if not self.trainer.run.precision.audit_precision:
            self._audit = None
        if self._audit is None or self._iteration <= (self.trainer.run.training.train_iters or 0):
            return ()
        return ["--audit-precision traces the second step of a process, and only one is left: no audit"]

    def before_step(self, step: Step) -> None:
        """Trace the step from here on."""
        if self._audit is not None and step.iteration == self._iteration:
            trainer = self.trainer
            step.contexts.enter_context(self._audit(trainer.run, list(trainer.trained.model), trainer.reporter.message))


# Odd, so that a changed bit changes the sum modulo 2^64 whatever it is multiplied with; 2^64 over the golden ratio.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """Return the sum modulo 2^64 of the elements' bits, each times an odd number of its own: int64, on the device.

    Any single element that differs changes it; of tensors that differ in more, one in 2^60 or so escapes.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=tensor.device)
        # Twice anything plus one is odd; the shift brings high bits down, where neighbours differ.
        weight = index * _ODD
        total += (part * (2 * (weight ^ (weight >> 29)) + 1)).sum()
    return total


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose copies differ: its name, and (rank, hash) of each rank of its group."""

    name: str
    hashes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        ranks_of: dict[int, list[int]] = {}
        for rank, value in self.hashes:
            ranks_of.setdefault(value, []).append(rank)
        groups = sorted(ranks_of.values(), key=len, reverse=True)
        every = [rank for rank, _ in self.hashes]
        if len(groups) > 1 and len(groups[0]) > len(groups[1]):
            odd = [rank for rank in every if rank not in groups[0]]
            whose = f"those of ranks {listed(odd, 8)} differ"
            if len(odd) == 1:
                whose = f"that of rank {odd[0]} differs"
            return f"{self.name}: of {len(every)} copies (ranks {listed(every, 8)}) {whose} from the others"
        halves = " and ".join(listed(group, 8) for group in groups)
        return f"{self.name}: the copies of ranks {halves} differ, with no majority"


class Replicas(Callback):
    """Compares all replicas every `--check-weight-hash-across-dp-replicas-interval`, before a step changes a weight."""

    def before_update(self, step: Step) -> None:
        """Compare the replicas where that is due. Collective over all ranks.

        Raises:
            RunFault: on every rank, naming the first tensors and the ranks whose copy differs from the others'.
        """
        interval = self.trainer.run.faults.check_weight_hash_across_dp_replicas_interval
        if not interval or step.iteration % interval:
            return
        found = compare_replicas(self.trainer.trained)
        if not sum_over_ranks(torch.tensor([len(found)], device=platform.device()))[0]:
            return
        # Every rank of a group found the same.
        differences = list(dict.fromkeys(chain.from_iterable(all_gather_object(found))))
        shown = "; ".join(map(str, differences[:4]))
        if len(differences) > 4:
            shown += f"; and {len(differences) - 4} more tensors"
        raise RunFault(
            f"iteration {step.iteration}: replicas differ: {shown}. The ranks train different models: continue from a "
            "checkpoint before the last comparison that was well; a rank that is named again has bad memory"
        )


def compare_replicas(trained: TrainState) -> list[ReplicaDifference]:
    """Compare all replicas that this rank has a copy of; return those that differ. Collective over all ranks.

    Parameters have to be gathered. Dense weights are compared over data and context parallel ranks, those that tensor
    parallelism does not split over its ranks too; experts over theirs; expert_bias over every rank of the stage; a
    tied embedding between the first and the last stage.
    """
    found: list[ReplicaDifference] = []
    for group, named in _by_group(trained):
        if group is None or group.size() == 1 or not named:
            continue
        own = torch.stack([bit_hash(tensor).to(platform.device()) for _, tensor in named])
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own, group=group)
        table = torch.stack(every)
        ranks = dist.get_process_group_ranks(group)
        for column in (table != table[0]).any(dim=0).nonzero().flatten().tolist():
            found.append(ReplicaDifference(named[column][0], tuple(zip(ranks, table[:, column].tolist()))))
    return found


def _by_group(trained: TrainState) -> Iterator[tuple[Any, list[tuple[str, Tensor]]]]:
    """Yield each group of ranks that have copies, with the tensors copied, in the same order on all of its ranks."""
    groups = trained.pg_collection
    split: list[tuple[str, Tensor]] = []
    whole, experts, biases, tied, shards = split[:], split[:], split[:], split[:], split[:]
    for chunk in trained.model:
        shown = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            entry = (shown[name], local(parameter))
            if isinstance(parameter, DTensor):
                # Data-parallel ranks have different shards, tensor-parallel ones the same of what they all hold.
                if getattr(parameter, "allreduce", True) and not getattr(parameter, "tensor_model_parallel", False):
                    shards.append(entry)
            elif not getattr(parameter, "allreduce", True):
                experts.append(entry)
            elif getattr(parameter, "tensor_model_parallel", False):
                split.append(entry)
            else:
                whole.append(entry)
            if getattr(parameter, "shared_embedding", False):
                tied.append(("the tied embedding", local(parameter)))
        for name, bias in named_expert_biases(chunk, shown):
            biases.append((f"{name}.expert_bias", bias))
    yield groups.dp_cp, split
    yield groups.tp_dp_cp, whole + biases
    yield groups.expt_dp, experts
    yield groups.tp, shards
    if trained.pg_collection.pp.size() > 1:
        yield groups.embd, tied[:1]
