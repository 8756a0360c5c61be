"""One optimizer step as a transaction: gradients, agreement of all ranks, then either everything changes or nothing.

`train_step` goes through a step in this order:

1. It clears the gradients and takes a snapshot of the routers, whose expert_bias moves before it is known whether the
   step is sound.
2. The engine's schedule runs the micro-batches (`run_micro_batches`). At its end it calls `finalize_model_grads`, which
   reduces the gradients over ranks and moves expert_bias.
3. `_own_sums` copies the gradients into the optimizer's fp32 ones, divided by the loss scale, and collects this rank's
   numbers of the step on the device. Nothing but gradients and routers has changed so far.
4. One all-reduce adds the numbers up over all ranks, and the host reads them at once (`StepSums`), so that all of them
   decide alike.
5. A sound step is applied (`_commit`); any other one is taken back by the snapshot.
6. fp16's loss scale moves, and a `StepResult` says what happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import (
    DOCUMENTS,
    HOST_DOCUMENTS,
    NOTHING,
    NUMBERS,
    PLACES,
    SOURCES,
    Batch,
    BatchIterator,
    added,
    words_of,
)
from megatron_moe.engine.cuda_graphs import CudaGraphs
from megatron_moe.engine.optimizer import parts
from megatron_moe.engine.schedules import (
    configure,
    get_attr_wrapped_model,
    get_forward_backward_func,
    get_model_config,
    without_loss_scale,
)
from megatron_moe.model.attention import measured_attentions
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.model.loss import loss_func
from megatron_moe.model.mtp import PredictionMasks
from megatron_moe.moe.grouped_gemm_fp8 import blocks_kept
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.moe.routes import tagged
from megatron_moe.optim.optimizer import additions, optimizer_tensors, shared_loss_scale
from megatron_moe.optim.param_groups import Schedule
from megatron_moe.optim.qk_clip import attention_figures, largest_attention_logits
from megatron_moe.optim.weight_average import WeightAverage
from megatron_moe.parallel.sequence import Documents
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
    local_loss,
    pop_mtp_losses,
    sum_over_ranks,
    wrapped,
)


@dataclass(frozen=True, kw_only=True)
class StepResult(StepSums):
    """Loss and gradient norm of a step, and what it did; the same on every rank but for the stage's `router_update`."""

    learning_rate: float
    """The rate that the step used."""
    next_loss_scale: float
    router_update: RouterUpdate
    overflow: bool = False
    """The step was not committed for what fp16 is expected to do now and then: a smaller loss scale follows."""


ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]
"""A function like `forward_step`."""


class StepProbe(Protocol):
    """A measurement of a step that does not change it, such as `training/callbacks/reporting.py`'s or the doctor's."""

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which forward and backward of all micro-batches run."""

    def following(self, forward_step: ForwardStep) -> ForwardStep:
        """Return `forward_step`, or a function in its place that is called for each micro-batch."""

    def see_gradients(self, optimizer: EngineOptimizer) -> None:
        """Measure the reduced gradients before they are clipped; called on all ranks, not after an overflow."""

    def watching_update(self, optimizer: EngineOptimizer) -> AbstractContextManager[None]:
        """Return the context in which a step that is committed updates the weights, its gradients clipped."""


def connect(model: Model, optimizer: EngineOptimizer) -> None:
    """Set how the engine's schedules scale the loss and what they do from micro-batch to micro-batch.

    Call it once per run.
    """
    configure(model, grad_scale_func=optimizer.scale_loss)
    if wrapped(model)[0].ddp_config.overlap_grad_reduce or isinstance(model[0], FullyShardedDataParallel):
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
    graphs: CudaGraphs | None = None,
) -> StepResult:
    """Run one global batch through forward, backward, reduction and update, in the order of the module's docstring.

    Args:
        model: wrapped model chunks, one per virtual pipeline stage.
        batches: one iterator of micro-batches per chunk, all at the same position; `num_micro_batches` are this rank's.
        average: follows the weights of committed steps. probe: measures the step, where this one is to be measured.
        before_update: called on all ranks when the backward pass is done and nothing has changed yet.
        zeros_counted: whether to count the zeros of the gradients, which is one more pass over them.
        graphs: those of the model, which are not replayed in a step that is measured; None: it has none.
    """
    for chunk in wrapped(model):
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    for attention in measured_attentions(model):
        if attention.largest_logits is not None:
            attention.largest_logits.fill_(-math.inf)  # they belong to no step, or to one that has ended
    snapshot = RouterSnapshot.capture(model)
    updates: list[RouterUpdate] = []

    def finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        updates.append(finalize_model_grads(chunks, num_tokens, **options))

    # The gradients are reduced over ranks and expert_bias has moved when this returns.
    with (
        nullcontext() if probe is None else probe.watching(),
        nullcontext() if graphs is None else graphs.step(eager=probe is not None),
    ):
        losses = run_micro_batches(
            model,
            batches,
            finalize,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
            pg_collection=pg_collection,
            probe=probe,
        )
    router_update, logits = updates[0], largest_attention_logits(model, pg_collection)
    if before_update is not None:
        before_update()
    used_lr = float(scheduler.get_lr({}))  # of parameters that no flag sets apart
    scale = shared_loss_scale(optimizer)
    own = _own_sums(
        model, optimizer, batches[0], losses, router_update, logits, snapshot, probe, zeros_counted, pg_collection
    )
    sums = own.over_all_ranks()
    if not sums.decided:  # what the first look leaves in doubt is looked at exactly
        sums = replace(own, **_all_finite(optimizer, snapshot, exactly=True)).over_all_ranks()
    if sums.committed:
        _commit(model, optimizer, average, probe, sums.grad_norm, logits)
        scheduler.advance(num_micro_batches * micro_batch_size * pg_collection.dp.size())
    else:
        snapshot.restore()
    overflow, next_scale = False, sums.loss_scale
    if scale is not None:
        finite_but_gradients = sums.non_finite_ranks > 0 and not sums.damaged and math.isfinite(sums.loss_sum)
        overflow, used = finite_but_gradients and sums.loss_scale > scale.floor, scale.scale
        if not sums.empty:
            scale.commit(found_inf=not sums.committed)
        # The engine replaces the tensor where it changes the scale: there alone it has to be read.
        if scale.scale is not used:
            next_scale = float(scale.scale)
    return StepResult(
        **vars(sums), learning_rate=used_lr, next_loss_scale=next_scale, router_update=router_update, overflow=overflow
    )


def _own_sums(
    model: Model,
    optimizer: EngineOptimizer,
    batches: Iterator[Batch],
    losses: list[dict[str, Tensor]],
    router_update: RouterUpdate,
    logits: Tensor | None,
    snapshot: RouterSnapshot,
    probe: StepProbe | None,
    zeros_counted: bool,
    pg_collection: ProcessGroups,
) -> OwnSums:
    """Put the gradients into the optimizer's fp32 ones, divided by the loss scale; return what this rank adds.

    Collective over all ranks. The host reads nothing from the device but the expert biases, and for a probe.
    """
    # One rank of the stage hashes the expert_bias of all layers, from one copy that is started here.
    biases, copied = {}, None
    if pg_collection.tp.rank() == 0 and pg_collection.dp_cp.rank() == 0:
        for number, bias in zip(router_update.layer_numbers, router_update.expert_bias):
            if bias is not None:
                biases[number] = bias
    if biases:
        copied = HostCopy(torch.cat(list(biases.values())))
    overflows = prepare_gradients(optimizer)
    squares = grad_norm_squares(optimizer)
    zeros = count_zeros(optimizer) if zeros_counted else squares.new_empty(0, dtype=torch.float64)
    if probe is not None and sum_over_ranks(overflows.view(1))[0] == 0:
        probe.see_gradients(optimizer)
    # Loss sum and targets of each depth of multi-token prediction in turn, counted as the loss is.
    mtp_sums = pop_mtp_losses(model)
    if mtp_sums is None or pg_collection.tp.rank() != 0:
        depths = get_model_config(model[-1]).mtp_num_layers or 0
        mtp_sums = torch.zeros(2 * depths, dtype=torch.float64, device=platform.device())
    sample_words, of_documents, source_sums = NOTHING, (0, 0), None
    if isinstance(batches, BatchIterator):
        sample_words, of_documents = batches.take_sample_words(), batches.take_pairs_and_padding()
        if batches.num_sources:
            source_sums = local_loss(losses, pg_collection, batches.num_sources).flatten()
    own = OwnSums(
        loss=local_loss(losses, pg_collection),
        **_all_finite(optimizer, snapshot, exactly=False),
        overflows=overflows,
        mtp_sums=mtp_sums.flatten(),
        source_sums=source_sums,
        sample_words=sample_words,
        pairs_and_padding=of_documents,
        bias_words=NOTHING,
        grad_norm_squares=squares,
        loss_scale=optimizer.get_loss_scale(),
        gradient_zeros=zeros,
        attention=attention_figures(additions(optimizer).qk_clip, logits),
    )
    if copied is None:
        return own
    # The device has all of the above to do while the host waits for expert_bias.
    on_host = copied.result().split(list(map(len, biases.values())))
    return replace(
        own, bias_words=added(words_of(number, bias.numpy().tobytes()) for number, bias in zip(biases, on_host))
    )


def _all_finite(optimizer: EngineOptimizer, snapshot: RouterSnapshot, exactly: bool) -> dict[str, Any]:
    """Return whether gradients and state of this rank are finite; see `all_finite`."""
    return {
        "gradients_finite": all_finite(chain.from_iterable(map(main_gradients, parts(optimizer))), exactly),
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
    timers = get_model_config(model[0]).timers
    if timers is not None:
        timers("optimizer", log_level=1).start()
    beside = additions(optimizer)
    clip_gradients(optimizer, grad_norm)
    if beside.qk_clip is not None and logits is not None:
        beside.qk_clip.begin(logits)
    with nullcontext() if probe is None else probe.watching_update(optimizer):
        if beside.orthogonalizer is not None:
            beside.orthogonalizer.apply()
        optimizer.step_with_ready_grads()
    if average is not None:
        average.update()
    if timers is not None:
        timers("optimizer").stop()


def run_micro_batches(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    finalize: Callable[..., object] | None,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroups,
    probe: StepProbe | None = None,
) -> list[dict[str, Tensor]]:
    """Run forward and backward of a global batch; gradients are added to those in the buffers.

    finalize: called by the schedule after the last micro-batch, see below; None: gradients stay this rank's own.
    What it returns is for `local_loss`.
    """
    # The flags say in which dtype a run computes, an autocast around it does not; and the scale of the auxiliary losses
    # that the schedule sets is this step's, whatever was left in this process, and nobody's afterwards.
    # Weights in FP8 are shared by micro-batches; ZeRO stage 3 has no weight between its uses.
    shared = num_micro_batches > 1 and not isinstance(model[0], FullyShardedDataParallel)
    with without_autocast(platform.device().type), without_loss_scale(platform.device()), blocks_kept(shared):
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
            forward_step_func=forward_step if probe is None else probe.following(forward_step),
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
    # Attention is causal by construction; what the engine calls its mask are the documents, if these are kept apart.
    # Only for the logs of multi-token prediction: that loss goes with its target's, see model/mtp.py.
    mask: dict[str, Any] = {"loss_mask": batch["loss_mask"]} if get_model_config(chunk).mtp_num_layers else {}
    if get_attr_wrapped_model(chunk, "routers_know_documents"):
        mask["padding_mask"] = batch[DOCUMENTS]
    rows_of = get_attr_wrapped_model(chunk, "rows_of_step")
    if rows_of is not None and chunk.training:
        mask["padding_mask"] = tags = tagged(rows_of(batch[NUMBERS]), mask.get("padding_mask"))
        if "loss_mask" in mask:
            mask["loss_mask"] = PredictionMasks(mask["loss_mask"], tags)
    run = chunk.build_schedule_plan if return_schedule_plan else chunk
    documents, positions = batch.get(DOCUMENTS), batch["position_ids"]
    if documents is not None and positions is not None:
        documents = Documents(documents, positions, batch.get(PLACES)).as_mask(batch.get(HOST_DOCUMENTS))
    output = run(batch["tokens"], positions, documents, labels=batch["labels"], **mask)
    # A loss per token is divided at the end of the step, by the tokens of the whole global batch.
    per_token = get_model_config(chunk).calculate_per_token_loss
    shared_by = None if per_token else get_attr_wrapped_model(chunk, "pg_collection").cp
    loss_mask: Any = batch["loss_mask"]  # a tensor wherever the schedule calls the loss function
    return output, partial(loss_func, loss_mask, shared_by=shared_by, sources=batch.get(SOURCES))
