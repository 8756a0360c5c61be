"""What the ranks add up to decide about a step: losses, finite or not, and hashes; each number counted by one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import NOTHING, added, words_of
from megatron_moe.training.finalize_model_grads import RouterUpdate

Model = Sequence[torch.nn.Module]


@dataclass(frozen=True)
class StepSums:
    """The numbers that ranks add up to decide about a step: one rank's own, or the sums after `over_all_ranks`."""

    loss_sum: float
    """The sum of the losses of all tokens in nats; not finite where that of any rank is not."""
    tokens: float
    """Tokens that count for the loss."""
    non_finite_ranks: float
    """Ranks whose gradients, or the norm of these, are not finite."""
    damaged_ranks: float
    """Ranks whose weights, moments or expert_bias were not finite before the step."""
    sample_words: tuple[float, ...]
    """The hash of the samples, in two words."""
    bias_words: tuple[float, ...]
    """The hash of expert_bias, in two words."""
    mtp_sums: tuple[float, ...]
    """The loss sum and the number of targets of each depth of multi-token prediction in turn."""

    def over_all_ranks(self) -> StepSums:
        """Return the sums over all ranks. Collective over all ranks: one all-reduce of all fields."""
        own = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(self).items()}
        sums = iter(sum_over_ranks(*itertools.chain.from_iterable(own.values())))
        added_up: dict[str, Any] = {}
        for name, numbers in own.items():
            total = tuple(itertools.islice(sums, len(numbers)))
            added_up[name] = total if isinstance(getattr(self, name), tuple) else total[0]
        return StepSums(**added_up)

    @property
    def sound(self) -> bool:
        """Whether the loss, all gradients and the state before the step are finite."""
        return self.non_finite_ranks == 0 and self.damaged_ranks == 0 and math.isfinite(self.loss_sum)

    @property
    def empty(self) -> bool:
        """Whether nothing but a lack of tokens keeps the step from being applied."""
        return self.sound and self.tokens == 0

    @property
    def committed(self) -> bool:
        """Whether the step is applied."""
        return self.sound and not self.empty

    @property
    def overflowed(self) -> bool:
        """Whether gradients, and nothing else, are not finite."""
        return self.non_finite_ranks > 0 and self.damaged_ranks == 0 and math.isfinite(self.loss_sum)

    @property
    def loss(self) -> float:
        """The mean loss per token; NaN without tokens."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def mtp_losses(self) -> tuple[float, ...]:
        """The mean loss per target of each depth; NaN without targets."""
        by_depth = zip(self.mtp_sums[::2], self.mtp_sums[1::2])
        return tuple(total / count if count else math.nan for total, count in by_depth)


def local_loss(losses: list[dict[str, Tensor]], pg_collection: ProcessGroupCollection) -> tuple[float, float]:
    """Return loss sum and token count of this rank's micro-batches (under context parallelism of its part of them).

    They are counted by one TP rank of the last stage; the others return zeros, or NaN where their loss is not finite.

    Args:
        losses: the schedule's result, one {"lm loss": [sum, tokens]} per micro-batch; empty before the last stage.
    """
    if not losses:
        return 0.0, 0.0
    total = torch.stack([entry["lm loss"].double() for entry in losses]).sum(dim=0)
    if pg_collection.tp.rank() != 0:  # a copy of the first one's, but for a fault
        return 0.0 if math.isfinite(total[0]) else math.nan, 0.0
    return float(total[0]), float(total[1])


def local_bias_words(update: RouterUpdate, pg_collection: ProcessGroupCollection) -> tuple[float, float]:
    """Return the hash of the `expert_bias` of this stage's layers, counted by one rank of the stage."""
    biases = [(n, bias) for n, bias in zip(update.layer_numbers, update.expert_bias) if bias is not None]
    if not biases or pg_collection.tp.rank() or pg_collection.dp_cp.rank():
        return NOTHING
    sizes = [len(bias) for _, bias in biases]
    on_host = torch.cat([bias for _, bias in biases]).cpu().split(sizes)  # one copy from the device for all layers
    return added(words_of(number, bias.numpy().tobytes()) for (number, _), bias in zip(biases, on_host))


def take_further_losses(model: Model) -> Tensor | None:
    """Take [D, 2] loss sum and targets of each depth of multi-token prediction since the last call.

    They are those of this rank's tokens; None without such depths, and on every stage but the last.
    """
    if not get_model_config(model[-1]).mtp_num_layers:
        return None
    return get_attr_wrapped_model(model[-1], "take_further_losses")()


def local_mtp_sums(model: Model, pg_collection: ProcessGroupCollection) -> list[float]:
    """Return loss sum and targets of each depth in turn, equally many numbers on every rank, counted as the loss is."""
    taken = take_further_losses(model)
    if taken is None or pg_collection.tp.rank() != 0:
        return [0.0, 0.0] * (get_model_config(model[-1]).mtp_num_layers or 0)
    return taken.flatten().tolist()


def sum_over_ranks(*values: float) -> list[float]:
    """Return each value's sum over all ranks, in fp64; a NaN on any rank makes the sum NaN."""
    tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()
