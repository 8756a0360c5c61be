"""What the ranks add up to decide about a step: losses, finite or not, and hashes; each number counted by one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import hex_of
from megatron_moe.engine.schedules import get_attr_wrapped_model, get_model_config
from megatron_moe.platform.hardware import on_device
from megatron_moe.platform.protocols import ProcessGroups, WrappedChunk
from megatron_moe.training.gradients import joint_norm

Model = Sequence[torch.nn.Module]


def wrapped(model: Model) -> list[WrappedChunk]:
    """Return the chunks of a model by the type of their wrapper; torch gives every attribute of a module another."""
    return cast(list[WrappedChunk], list(model))


@dataclass(frozen=True)
class StepSums:
    """The numbers that all ranks decide by about a step: their sums (`OwnSums.over_all_ranks`) and what they share."""

    loss_sum: float
    """The sum of the losses of all tokens in nats; not finite where that of any rank is not."""
    token_sum: float
    """Tokens that count for the loss."""
    non_finite_ranks: float
    """Ranks whose gradients, or the norm of these, are not finite."""
    damaged_ranks: float
    """Ranks whose weights, moments or expert_bias were not finite before the step."""
    sample_words: tuple[float, float]
    """The hash of the samples, in two words, and of expert_bias."""
    bias_words: tuple[float, float]
    mtp_sums: tuple[float, ...]
    """The loss sum and the number of targets of each depth of multi-token prediction in turn."""
    overflows: float
    """Parts of fp16 gradients that are not finite, over all ranks."""
    grad_norm: float
    """The joint norm of all gradients; NaN after an overflow of fp16 on any rank."""
    loss_scale: float
    """The loss scale of the step."""
    gradient_zeros: int | None = None
    """Elements of all gradients that are 0; None where they were not counted and where the step is not committed."""
    max_attention_logit: float | None = None
    """The largest attention logit of any head; None where they were not measured."""
    clipped_heads: int | None = None
    """Heads of all layers with a logit above the threshold of QK-clip, whose weights are scaled; None without QK-clip
    and where the step is not committed."""
    attended_pairs: float = 0.0
    """Pairs of a query and a key that it sees; 0 where documents see each other, and where batches are not a run's."""
    padding: int = 0
    """Positions that are padding, under the same condition."""
    source_sums: tuple[float, ...] = ()
    """The loss sums of all named sources, then their tokens that count for the loss."""

    @property
    def decided(self) -> bool:
        """Whether nothing is in doubt: a sum of finite numbers, by which the first look goes, may overflow."""
        return not self.damaged and (self.non_finite_ranks == 0 or self.overflows > 0)

    @property
    def sound(self) -> bool:
        """Whether the loss, all gradients and the state before the step are finite."""
        return self.non_finite_ranks == 0 and not self.damaged and math.isfinite(self.loss_sum)

    @property
    def empty(self) -> bool:
        """No token of the global batch counts for the loss: not committed, and fp16's loss scale stays too."""
        return self.sound and self.token_sum == 0

    @property
    def committed(self) -> bool:
        """Whether the step is applied; weights, moments, expert_bias and the learning-rate schedule stay otherwise."""
        return self.sound and not self.empty

    @property
    def damaged(self) -> bool:
        """Whether the state was not finite before the step, which no later step heals: not committed."""
        return self.damaged_ranks > 0

    @property
    def tokens(self) -> int:
        """Tokens of the global batch that count for the loss."""
        return int(self.token_sum)

    @property
    def loss(self) -> float:
        """The mean loss per token of the global batch, in nats; NaN without tokens."""
        return self.loss_sum / self.token_sum if self.token_sum else math.nan

    @property
    def data_hash(self) -> str | None:
        """The hash of the step's samples (`data/batches.py`); None where the batches are not a run's own."""
        return hex_of(*self.sample_words)

    @property
    def expert_bias_hash(self) -> str | None:
        """The hash of every layer's expert_bias after the step; None where there is none, or no step was committed."""
        return hex_of(*self.bias_words) if self.committed else None

    @property
    def mtp_losses(self) -> tuple[float, ...]:
        """The mean loss per target of each depth of multi-token prediction, unweighted; NaN without targets."""
        found = []
        for total, count in zip(self.mtp_sums[::2], self.mtp_sums[1::2]):
            found.append(total / count if count else math.nan)
        return tuple(found)


@dataclass(frozen=True)
class OwnSums:
    """What one rank contributes to `StepSums`: tensors on the device, and the words of hashes from the host."""

    loss: Tensor
    """[2] fp64, see `local_loss`."""
    gradients_finite: Tensor
    state_finite: Tensor
    overflows: Tensor
    mtp_sums: Tensor
    sample_words: tuple[float, float]
    bias_words: tuple[float, float]
    pairs_and_padding: tuple[int, int]
    grad_norm_squares: Tensor
    """[N] fp32, summed already over the ranks that share them."""
    loss_scale: Tensor
    """[1] fp32, the same on every rank."""
    gradient_zeros: Tensor
    """[1] fp64, summed already over the ranks that share them, or [0] where they are not counted."""
    attention: Tensor
    """fp64, the same on every rank, see `qk_clip.attention_figures`."""
    source_sums: Tensor | None = None
    """[2 K] fp64, see `local_loss`; None: sources have no names."""

    def over_all_ranks(self) -> StepSums:
        """Return the sums over all ranks. Collective over all ranks: one all-reduce, and one read from the device."""
        norm_finite = (self.overflows == 0) & self.grad_norm_squares.isfinite().all()
        flags = torch.stack([~(self.gradients_finite & norm_finite), ~self.state_finite]).double()
        words = on_device((*self.sample_words, *self.bias_words, *map(float, self.pairs_and_padding)), torch.float64)
        parts = [self.loss, flags, words, self.overflows.double().view(1), self.mtp_sums.double()]
        if self.source_sums is not None:
            parts.append(self.source_sums)
        added = torch.cat(parts)
        scale_and_squares = torch.cat([self.loss_scale.view(1), self.grad_norm_squares]).double()
        shared = torch.cat([scale_and_squares, self.gradient_zeros, self.attention])
        numbers = sum_over_ranks(added, shared)
        loss_sum, tokens, non_finite, damaged, *found, overflows = numbers[:11]
        mtp_end = 11 + len(self.mtp_sums)
        loss_scale, *rest = numbers[len(added) :]
        norms, counts = len(self.grad_norm_squares), len(self.gradient_zeros)
        squares, zeros, attention = rest[:norms], rest[norms : norms + counts], rest[norms + counts :]
        sums = StepSums(
            loss_sum=loss_sum,
            token_sum=tokens,
            non_finite_ranks=non_finite,
            damaged_ranks=damaged,
            sample_words=(found[0], found[1]),
            bias_words=(found[2], found[3]),
            mtp_sums=tuple(numbers[11:mtp_end]),
            source_sums=tuple(numbers[mtp_end : len(added)]),
            overflows=overflows,
            attended_pairs=found[4],
            padding=int(found[5]),
            grad_norm=math.nan if overflows > 0 else joint_norm(squares),
            loss_scale=loss_scale,
            gradient_zeros=int(zeros[0]) if zeros else None,
            max_attention_logit=attention[0] if attention else None,
            clipped_heads=int(attention[1]) if attention[1:] else None,
        )
        return sums if sums.committed else replace(sums, gradient_zeros=None, clipped_heads=None)


def local_loss(losses: list[dict[str, Tensor]], pg_collection: ProcessGroups, num_sources: int = 0) -> Tensor:
    """Return loss sum and token count of this rank's micro-batches (under context parallelism of its part of them).

    They are counted by one TP rank of the last stage; the others return zeros, or NaN where their loss is not finite.

    Args:
        losses: the schedule's result, one of `loss_func`'s per micro-batch; empty before the last stage.
        num_sources: K, to return those of each source; 0: of all together.

    Returns:
        [2] fp64 on the device; of sources [2, K].
    """
    name, shape = ("source losses", (2, num_sources)) if num_sources else ("lm loss", (2,))
    nothing = torch.zeros(shape, dtype=torch.float64, device=platform.device())
    if not losses:
        return nothing
    total = torch.stack([entry[name].double() for entry in losses]).sum(dim=0)
    if pg_collection.tp.rank() != 0:  # a copy of the first one's, but for a fault
        nothing[0] = torch.where(total[0].isfinite(), 0.0, math.nan)
        return nothing
    return total


def pop_mtp_losses(model: Model) -> Tensor | None:
    """Take [D, 2] loss sum and targets of each depth of multi-token prediction since the last call.

    They are those of this rank's tokens; None without such depths, and on every stage but the last.
    """
    if not get_model_config(model[-1]).mtp_num_layers:
        return None
    return get_attr_wrapped_model(model[-1], "pop_mtp_losses")()


def max_over_ranks(*values: float) -> list[float]:
    """Return each value's largest on any rank. Collective over all ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=platform.device())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def sum_over_ranks(values: Tensor, shared: Tensor | None = None) -> list[float]:
    """Return each value's sum over all ranks, in fp64; a NaN on any rank makes the sum NaN. One read from the device.

    Args:
        values: [N] on the device.
        shared: [M] fp64, numbers that are read along, as they are.
    """
    total = values.to(torch.float64, copy=True)
    torch.distributed.all_reduce(total)
    if shared is not None:
        total = torch.cat([total, shared])
    return total.tolist()
