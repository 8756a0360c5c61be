"""One optimizer step as a transaction: gradients, agreement of all ranks, then either everything changes or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import NOTHING, Batch, BatchIterator, added, hex_of, words_of
from megatron_moe.model.loss import loss_func
from megatron_moe.moe.state import RouterSnapshot
from megatron_moe.platform.autocast import without_autocast
from megatron_moe.platform.loss_scale import without_loss_scale
from megatron_moe.training.finalize_model_grads import RouterUpdate, finalize_model_grads
from megatron_moe.training.global_batch import tell_of_global_batch
from megatron_moe.training.optimizer import (
    all_finite,
    clip_gradients,
    learning_rate,
    main_gradients,
    moments_and_masters,
    shared_loss_scale,
)
from megatron_moe.training.timers import timed

Model = Sequence[torch.nn.Module]


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank, but for `router_update`, which is that of the pipeline stage.

    loss is in nats per token over `tokens` tokens of the global batch. grad_norm is the joint norm of all parameters
    before clipping. learning_rate and loss_scale are those the step used, next_loss_scale is the next one's. committed
    is False where a loss or a gradient was not finite, and where the step is `empty`: weights, moments, expert_bias and
    the learning-rate schedule are then as they were. mtp_losses: of each depth of multi-token prediction, unweighted,
    in nats per target. data_hash: of the samples of the step (`data/batches.py`), none where the batches are not a
    run's own. expert_bias_hash: of every layer's expert_bias after the step, none where there is none or the step was
    not committed. overflow: not committed for what fp16 is expected to do now and then: a smaller loss scale follows.
    damaged: not committed because a weight, moment or expert_bias was not finite before it, which no later step heals.
    empty: not committed because no token of the global batch counts for the loss, which is NaN, a mean of nothing;
    fp16's loss scale stays too.
    """

    committed: bool
    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    loss_scale: float
    next_loss_scale: float
    router_update: RouterUpdate
    mtp_losses: tuple[float, ...] = ()
    data_hash: str | None = None
    expert_bias_hash: str | None = None
    overflow: bool = False
    damaged: bool = False
    empty: bool = False


class StepProbe(Protocol):
    """Who looks at a step without changing it: `training/health.py`, and the doctor."""

    def watching(self) -> AbstractContextManager[None]:
        """Forward and backward of all micro-batches run within."""

    def see_gradients(self, optimizer: Any) -> None:
        """Called with the reduced gradients, before they are clipped; on all ranks, not after an overflow."""


def connect(model: Model, optimizer: MegatronOptimizer) -> None:
    """Tell the engine's schedules how to scale the loss and when to hold back gradient reduction. Once per run."""
    overlap = model[0].ddp_config.overlap_grad_reduce
    for chunk in model:
        config = get_model_config(chunk)
        config.grad_scale_func = optimizer.scale_loss
        if overlap:
            no_sync = [part.no_sync for part in model]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def train_step(
    model: Model,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Sequence[Iterator[Batch]],
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroupCollection,
    probe: StepProbe | None = None,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Run one global batch through forward, backward, reduction and update.

    Args:
        model: wrapped model chunks, one per virtual pipeline stage.
        batches: one iterator of micro-batches per chunk, all at the same position.
        num_micro_batches: micro-batches of this rank.
        probe: measures the step, where this one is to be measured.
        before_update: called on all ranks when the backward pass is done and nothing has changed yet.
    """
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    snapshot = RouterSnapshot.capture(model)
    source = batches[0]
    updates: list[RouterUpdate] = []

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        updates.append(finalize_model_grads(chunks, num_tokens, **options))

    with nullcontext() if probe is None else probe.watching():
        losses = run_micro_batches(
            model,
            batches,
            finalize,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            pg_collection=pg_collection,
        )
    if before_update is not None:
        before_update()

    used_lr, used_scale = learning_rate(optimizer), float(optimizer.get_loss_scale().item())
    overflow = optimizer.prepare_grads()  # main gradients in fp32, divided by the loss scale
    if shared_loss_scale(optimizer) is not None:
        # The engine asks the ranks that share parts of one model; replicas may differ, and have to go one way.
        overflow = sum_over_job(float(overflow))[0] > 0
    grad_norm = math.nan if overflow else float(optimizer.get_grad_norm())
    if probe is not None and not overflow:
        probe.see_gradients(optimizer)
    loss_sum, tokens, bad_ranks, damaged_ranks, low, high, bias_low, bias_high, *further = sum_over_job(
        *local_loss(losses, pg_collection),
        0.0 if math.isfinite(grad_norm) and all_finite(main_gradients(optimizer)) else 1.0,
        0.0 if all_finite((*moments_and_masters(optimizer), *snapshot.biases)) else 1.0,
        *(source.take_sample_words() if isinstance(source, BatchIterator) else NOTHING),
        *local_bias_words(updates[0], pg_collection),
        *local_further_losses(model, pg_collection),
    )
    sound = bad_ranks == 0 and damaged_ranks == 0 and math.isfinite(loss_sum)
    empty = sound and tokens == 0
    committed = sound and not empty
    if committed:
        with timed(model, "optimizer"):
            clip_gradients(optimizer, grad_norm)
            optimizer.step_with_ready_grads()
        scheduler.step(increment=1)
    else:
        snapshot.restore()
    overflow = False
    if (scale := shared_loss_scale(optimizer)) is not None:
        overflow = bad_ranks > 0 and damaged_ranks == 0 and math.isfinite(loss_sum) and scale.can_fall
        if not empty:
            scale.commit(found_inf=not committed)
    next_scale = used_scale if scale is None else float(scale.scale.item())
    loss = loss_sum / tokens if tokens else math.nan
    mtp_losses = tuple(total / count if count else math.nan for total, count in zip(further[::2], further[1::2]))
    return StepResult(
        committed,
        loss,
        int(tokens),
        grad_norm,
        used_lr,
        used_scale,
        next_scale,
        updates[0],
        mtp_losses,
        hex_of(low, high),
        hex_of(bias_low, bias_high) if committed else None,
        overflow,
        damaged_ranks > 0,
        empty,
    )


def run_micro_batches(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    finalize: Callable[..., None] | None,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroupCollection,
) -> list[dict[str, Tensor]]:
    """Forward and backward of a global batch; gradients are added to those that the buffers hold.

    Args:
        finalize: called by the schedule after the last micro-batch, see below; None: gradients stay this rank's own.

    Returns:
        See `local_loss`.
    """
    # The flags say in which dtype a run computes, an autocast around it does not; and the scale of the auxiliary losses
    # that the schedule sets is this step's, whatever was left in this process, and nobody's afterwards.
    with without_autocast(platform.device().type), without_loss_scale():
        batches = tell_of_global_batch(
            model,
            batches,
            forward_step,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            pg_collection=pg_collection,
        )
        take_further_losses(model)  # of a pass that was no step
        # The one jump that a reader cannot see: the schedule below runs all micro-batches and then, before it returns,
        # calls `finalize`, which reduces the gradients over ranks and moves the expert bias. The schedule finds its
        # groups where `parallel.groups.initialize` put them: given a collection, it would want a communicator of ours.
        for chunk in model:
            get_model_config(chunk).finalize_model_grads_func = finalize
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(batches) if len(batches) > 1 else batches[0],
            model=list(model),
            num_microbatches=num_micro_batches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )


def forward_step(batches: Iterator[Batch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """The schedule's callback: one micro-batch through one model chunk; the loss function it applies on the last stage.

    tokens, labels and loss_mask are [B, S / CP]; a stage that holds neither end of the pipeline ignores them.
    """
    batch = next(batches)
    # No attention mask: attention is causal by construction.
    # Only for the logs of multi-token prediction: that loss goes with its target's, see model/mtp.py.
    mask = {"loss_mask": batch["loss_mask"]} if get_model_config(chunk).mtp_num_layers else {}
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **mask)
    # A loss per token is divided at the end of the step, by the tokens of the whole global batch.
    per_token = get_model_config(chunk).calculate_per_token_loss
    shared_by = None if per_token else get_attr_wrapped_model(chunk, "pg_collection").cp
    return output, partial(loss_func, batch["loss_mask"], shared_by=shared_by)


def local_loss(losses: list[dict[str, Tensor]], pg_collection: ProcessGroupCollection) -> tuple[float, float]:
    """Loss sum and token count of this rank's micro-batches (under context parallelism of its part of them), counted
    by one TP rank of the last stage and no other; not finite where that of any of them is not.

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
    """The hash of the `expert_bias` of this stage's layers, counted by one rank of the stage."""
    biases = [(n, bias) for n, bias in zip(update.layer_numbers, update.expert_bias) if bias is not None]
    if not biases or pg_collection.tp.rank() or pg_collection.dp_cp.rank():
        return NOTHING
    sizes = [len(bias) for _, bias in biases]
    on_host = torch.cat([bias for _, bias in biases]).cpu().split(sizes)  # one copy from the device for all layers
    return added(words_of(number, bias.numpy().tobytes()) for (number, _), bias in zip(biases, on_host))


def take_further_losses(model: Model) -> Tensor | None:
    """[D, 2] loss sum and targets of each depth of multi-token prediction since they were last taken, of this rank's
    tokens; None without such depths, and on every stage but the last."""
    if not get_model_config(model[-1]).mtp_num_layers:
        return None
    return get_attr_wrapped_model(model[-1], "take_further_losses")()


def local_further_losses(model: Model, pg_collection: ProcessGroupCollection) -> list[float]:
    """Loss sum and targets of each depth in turn, as many numbers on every rank, counted as `local_loss` counts."""
    taken = take_further_losses(model)
    if taken is None or pg_collection.tp.rank() != 0:
        return [0.0, 0.0] * (get_model_config(model[-1]).mtp_num_layers or 0)
    return taken.flatten().tolist()


def sum_over_job(*values: float) -> list[float]:
    """Sums over all ranks, in fp64; a NaN of any rank is everyone's."""
    tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()
