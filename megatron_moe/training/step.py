"""One optimizer step as a transaction: gradients, agreement of all ranks, then either everything changes or nothing.

`train_step` goes through a step in this order:

1. `_prepare` clears the gradients and takes a snapshot of the routers, whose expert_bias moves before it is known
   whether the step is sound.
2. `_forward_and_backward` has the engine's schedule run the micro-batches (`run_micro_batches`). At its end the
   schedule calls `finalize_model_grads`, which reduces the gradients over ranks and moves expert_bias.
3. `_unscaled_gradients` copies the gradients into the optimizer's fp32 ones, divided by the loss scale, and takes their
   norm. Nothing but gradients and routers has changed so far.
4. `_own_sums` collects this rank's numbers of the step on the device; one all-reduce adds them up over all ranks, and
   the host reads them at once (`StepSums`), so that all of them decide alike.
5. A sound step is applied (`_commit`); any other one is taken back by the snapshot.
6. `_update_loss_scale` moves fp16's loss scale, and a `StepResult` says what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import NOTHING, Batch, BatchIterator, hex_of
from megatron_moe.engine.schedules import (
    configure,
    get_attr_wrapped_model,
    get_forward_backward_func,
    get_model_config,
    without_loss_scale,
)
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.model.loss import loss_func
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.optim.optimizer import additions, optimizer_tensors, shared_loss_scale
from megatron_moe.optim.param_groups import Schedule
from megatron_moe.optim.qk_clip import attention_figures, forget_attention_logits, largest_attention_logits
from megatron_moe.optim.weight_average import WeightAverage
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.platform.numerics import without_autocast
from megatron_moe.platform.protocols import EngineOptimizer, ProcessGroups
from megatron_moe.training.finalize_model_grads import RouterUpdate, finalize_model_grads
from megatron_moe.training.global_batch import prepare_global_batch
from megatron_moe.training.gradients import (
    all_finite,
    clip_gradients,
    count_zeros,
    grad_norm_squares,
    main_gradients,
    prepare_gradients,
)
from megatron_moe.training.step_sums import (
    Model,
    OwnSums,
    StepSums,
    copied_biases,
    local_bias_words,
    local_loss,
    local_mtp_sums,
    pop_mtp_losses,
    sum_over_ranks,
)
from megatron_moe.training.timers import timed


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank, but for `router_update`, which is that of the pipeline stage."""

    committed: bool
    """False where a loss or a gradient was not finite, and where the step is `empty`: weights, moments, expert_bias and
    the learning-rate schedule are then as they were."""
    loss: float
    """In nats per token over `tokens` tokens of the global batch."""
    tokens: int
    grad_norm: float
    """The joint norm of all parameters before clipping."""
    learning_rate: float
    """The rate that the step used."""
    loss_scale: float
    """The scale that the step used."""
    next_loss_scale: float
    router_update: RouterUpdate
    mtp_losses: tuple[float, ...] = ()
    """The loss of each depth of multi-token prediction, unweighted, in nats per target."""
    data_hash: str | None = None
    """The hash of the step's samples (`data/batches.py`); None where the batches are not a run's own."""
    expert_bias_hash: str | None = None
    """The hash of every layer's expert_bias after the step; None where there is none or the step was not committed."""
    overflow: bool = False
    """The step was not committed for what fp16 is expected to do now and then: a smaller loss scale follows."""
    damaged: bool = False
    """A weight, moment or expert_bias was not finite before the step, which no later step heals: not committed."""
    gradient_zeros: int | None = None
    """Elements of all gradients that are 0; None where they were not counted and where the step was not committed."""
    max_attention_logit: float | None = None
    """The largest attention logit of any head; None where they were not measured."""
    clipped_heads: int | None = None
    """Heads of all layers with a logit above the threshold of QK-clip, whose weights were scaled; None without QK-clip
    and where the step was not committed."""
    empty: bool = False
    """No token of the global batch counts for the loss, which is NaN, a mean of nothing: not committed, and fp16's loss
    scale stays too."""


@dataclass(frozen=True)
class BackwardResult:
    """The results of a step's forward and backward passes on this rank, in addition to the gradients."""

    losses: list[dict[str, Tensor]]
    """The schedule's result, see `local_loss`."""
    router_update: RouterUpdate
    attention_logits: Tensor | None
    """See `largest_attention_logits`."""


class StepProbe(Protocol):
    """A measurement of a step that does not change it, such as `training/callbacks/reporting.py`'s or the doctor's."""

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which forward and backward of all micro-batches run."""

    def see_gradients(self, optimizer: EngineOptimizer) -> None:
        """Measure the reduced gradients before they are clipped; called on all ranks, not after an overflow."""

    def watching_update(self, optimizer: EngineOptimizer) -> AbstractContextManager[None]:
        """Return the context in which a step that is committed updates the weights, its gradients clipped."""


def connect(model: Model, optimizer: EngineOptimizer) -> None:
    """Set how the engine's schedules scale the loss and what they do from micro-batch to micro-batch.

    Call it once per run.
    """
    configure(model, grad_scale_func=optimizer.scale_loss)
    if model[0].ddp_config.overlap_grad_reduce or isinstance(model[0], FullyShardedDataParallel):
        no_sync = [chunk.no_sync for chunk in model]
        configure(model, no_sync_func=no_sync if len(no_sync) > 1 else no_sync[0])


def train_step(
    model: Model,
    optimizer: EngineOptimizer,
    scheduler: Schedule,
    batches: Sequence[Iterator[Batch]],
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroups,
    average: WeightAverage | None = None,
    probe: StepProbe | None = None,
    before_update: Callable[[], None] | None = None,
    zeros_counted: bool = False,
) -> StepResult:
    """Run one global batch through forward, backward, reduction and update, in the order of the module's docstring.

    Args:
        model: wrapped model chunks, one per virtual pipeline stage.
        batches: one iterator of micro-batches per chunk, all at the same position; `num_micro_batches` are this rank's.
        average: follows the weights of committed steps. probe: measures the step, where this one is to be measured.
        before_update: called on all ranks when the backward pass is done and nothing has changed yet.
        zeros_counted: whether to count the zeros of the gradients, which is one more pass over them.
    """
    snapshot = _prepare(model, optimizer)
    sizes = dict(num_micro_batches=num_micro_batches, micro_batch_size=micro_batch_size, seq_length=seq_length)
    micro_batches = partial(run_micro_batches, **sizes, pg_collection=pg_collection)
    backward = _forward_and_backward(model, batches, micro_batches, probe, pg_collection)
    if before_update is not None:
        before_update()
    used_lr = scheduler.base_rate
    biases = copied_biases(backward.router_update, pg_collection)
    gradients = _unscaled_gradients(optimizer, probe, zeros_counted)
    own = _own_sums(model, optimizer, batches[0], backward, gradients, biases, snapshot, pg_collection)
    sums = _decided_sums(own, optimizer, gradients, snapshot)
    if sums.committed:
        _commit(model, optimizer, average, probe, sums.grad_norm, backward.attention_logits)
        scheduler.advance(num_micro_batches * micro_batch_size * pg_collection.dp.size())
    else:
        snapshot.restore()
    overflow, next_scale = _update_loss_scale(optimizer, sums)
    return StepResult(
        committed=sums.committed,
        loss=sums.loss,
        tokens=int(sums.tokens),
        grad_norm=sums.grad_norm,
        learning_rate=used_lr,
        loss_scale=sums.loss_scale,
        next_loss_scale=next_scale,
        router_update=backward.router_update,
        mtp_losses=sums.mtp_losses,
        data_hash=hex_of(*sums.sample_words),
        expert_bias_hash=hex_of(*sums.bias_words) if sums.committed else None,
        overflow=overflow,
        damaged=sums.damaged_ranks > 0,
        gradient_zeros=sums.gradient_zeros if sums.committed else None,
        max_attention_logit=sums.max_attention_logit,
        clipped_heads=sums.clipped_heads if sums.committed else None,
        empty=sums.empty,
    )


def _prepare(model: Model, optimizer: EngineOptimizer) -> RouterSnapshot:
    """Clear gradients and attention logits; return what routers are put back to where the step is not applied."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    forget_attention_logits(model)
    return RouterSnapshot.capture(model)


def _forward_and_backward(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    micro_batches: Callable[..., list[dict[str, Tensor]]],
    probe: StepProbe | None,
    pg_collection: ProcessGroups,
) -> BackwardResult:
    """Run all micro-batches; the gradients are reduced over ranks and expert_bias has moved when this returns.

    Args:
        micro_batches: `run_micro_batches` with the numbers of the step.
    """
    updates: list[RouterUpdate] = []

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        updates.append(finalize_model_grads(chunks, num_tokens, **options))

    with nullcontext() if probe is None else probe.watching():
        losses = micro_batches(model, batches, finalize)
    return BackwardResult(losses, updates[0], largest_attention_logits(model, pg_collection))


@dataclass(frozen=True)
class GradientSums:
    """The results of `prepare_gradients`, `grad_norm_squares` and, where asked for, `count_zeros`, on the device."""

    overflows: Tensor
    norm_squares: Tensor
    zeros: Tensor


def _unscaled_gradients(optimizer: EngineOptimizer, probe: StepProbe | None, zeros_counted: bool) -> GradientSums:
    """Put the gradients into the optimizer's fp32 ones, divided by the loss scale, and measure their norm.

    Collective over all ranks. Nothing is read from the device, but for a probe.
    """
    overflows = prepare_gradients(optimizer)
    squares = grad_norm_squares(optimizer)
    zeros = count_zeros(optimizer) if zeros_counted else squares.new_empty(0, dtype=torch.float64)
    if probe is not None and sum_over_ranks(overflows.view(1))[0] == 0:
        probe.see_gradients(optimizer)
    return GradientSums(overflows, squares, zeros)


def _own_sums(
    model: Model,
    optimizer: EngineOptimizer,
    batches: Iterator[Batch],
    backward: BackwardResult,
    gradients: GradientSums,
    biases: HostCopy | None,
    snapshot: RouterSnapshot,
    pg_collection: ProcessGroups,
) -> OwnSums:
    """Return what this rank contributes to the decision about the step."""
    own = OwnSums(
        loss=local_loss(backward.losses, pg_collection),
        **_all_finite(optimizer, gradients, snapshot),
        overflows=gradients.overflows,
        mtp_sums=local_mtp_sums(model, pg_collection),
        sample_words=batches.take_sample_words() if isinstance(batches, BatchIterator) else NOTHING,
        bias_words=NOTHING,
        grad_norm_squares=gradients.norm_squares,
        loss_scale=optimizer.get_loss_scale(),
        gradient_zeros=gradients.zeros,
        attention=attention_figures(additions(optimizer).qk_clip, backward.attention_logits),
    )
    # The device has all of the above to do while the host waits for expert_bias.
    return replace(own, bias_words=local_bias_words(backward.router_update, biases))


def _decided_sums(
    own: OwnSums, optimizer: EngineOptimizer, gradients: GradientSums, snapshot: RouterSnapshot
) -> StepSums:
    """Return the sums over all ranks; what the first look leaves in doubt is looked at exactly. Collective."""
    sums = own.over_all_ranks()
    if sums.decided:
        return sums
    return replace(own, **_all_finite(optimizer, gradients, snapshot, exactly=True)).over_all_ranks()


def _all_finite(
    optimizer: EngineOptimizer, gradients: GradientSums, snapshot: RouterSnapshot, exactly: bool = False
) -> dict[str, Tensor]:
    """Return whether gradients and state of this rank are finite; see `all_finite`."""
    norm_finite = (gradients.overflows == 0) & gradients.norm_squares.isfinite().all()
    return {
        "gradients_finite": norm_finite & all_finite(main_gradients(optimizer), exactly),
        "state_finite": all_finite((*optimizer_tensors(optimizer), *snapshot.biases), exactly),
    }


def _commit(
    model: Model,
    optimizer: EngineOptimizer,
    average: WeightAverage | None,
    probe: StepProbe | None,
    grad_norm: float,
    logits: Tensor | None,
) -> None:
    """Clip the gradients, and update the weights, clipped by their logits, and their average."""
    with timed(model, "optimizer"):
        added = additions(optimizer)
        clip_gradients(optimizer, grad_norm)
        if added.qk_clip is not None and logits is not None:
            added.qk_clip.begin(logits)
        with nullcontext() if probe is None else probe.watching_update(optimizer):
            if added.orthogonalizer is not None:
                added.orthogonalizer.apply()
            optimizer.step_with_ready_grads()
    if average is not None:
        with timed(model, "optimizer"):
            average.update()


def _update_loss_scale(optimizer: EngineOptimizer, sums: StepSums) -> tuple[bool, float]:
    """Count the step for fp16's loss scale.

    Returns:
        Whether it was an overflow that a smaller scale answers, and the scale of the next step.
    """
    scale = shared_loss_scale(optimizer)
    if scale is None:
        return False, sums.loss_scale
    overflow, used = sums.overflowed and scale.can_fall(sums.loss_scale), scale.scale
    if not sums.empty:
        scale.commit(found_inf=not sums.committed)
    # The engine replaces the tensor where it changes the scale: there alone it has to be read.
    return overflow, sums.loss_scale if scale.scale is used else float(scale.scale)


def run_micro_batches(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    finalize: Callable[..., None] | None,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroups,
) -> list[dict[str, Tensor]]:
    """Run forward and backward of a global batch; gradients are added to those in the buffers.

    Args:
        finalize: called by the schedule after the last micro-batch, see below; None: gradients stay this rank's own.

    Returns:
        See `local_loss`.
    """
    # The flags say in which dtype a run computes, an autocast around it does not; and the scale of the auxiliary losses
    # that the schedule sets is this step's, whatever was left in this process, and nobody's afterwards.
    with without_autocast(platform.device().type), without_loss_scale():
        batches = prepare_global_batch(
            model,
            batches,
            forward_step,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            pg_collection=pg_collection,
        )
        pop_mtp_losses(model)  # of a pass that was no step
        # The one jump that a reader cannot see: the schedule below runs all micro-batches and then, before it returns,
        # calls `finalize`, which reduces the gradients over ranks and moves the expert bias. The schedule finds its
        # groups where `parallel.groups.initialize` put them: given a collection, it would want a communicator of ours.
        configure(model, finalize_model_grads_func=finalize)
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(batches) if len(batches) > 1 else batches[0],
            model=list(model),
            num_microbatches=num_micro_batches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )


def forward_step(
    batches: Iterator[Batch], chunk: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch through one model chunk; also return the loss function that the last stage applies to it.

    It is the callback of the engine's schedule. The one that runs two micro-batches at a time asks for the plan of the
    pass instead (`model/overlap.py`), and gives the chunk without its wrappers.

    tokens, labels and loss_mask are [B, S / CP]; a stage that holds neither end of the pipeline ignores them.
    """
    batch = next(batches)
    # No attention mask: attention is causal by construction.
    # Only for the logs of multi-token prediction: that loss goes with its target's, see model/mtp.py.
    mask = {"loss_mask": batch["loss_mask"]} if get_model_config(chunk).mtp_num_layers else {}
    run = chunk.build_schedule_plan if return_schedule_plan else chunk
    output = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **mask)
    # A loss per token is divided at the end of the step, by the tokens of the whole global batch.
    per_token = get_model_config(chunk).calculate_per_token_loss
    shared_by = None if per_token else get_attr_wrapped_model(chunk, "pg_collection").cp
    return output, partial(loss_func, batch["loss_mask"], shared_by=shared_by)
