"""Evaluation: the mean loss of a split per token, exact over all ranks; the model is left as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megatron_moe import platform
from megatron_moe.data.batches import Batch
from megatron_moe.engine.schedules import configured, configured_in_fp32, get_forward_backward_func
from megatron_moe.platform.numerics import without_autocast
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.report.records import EvalRecord
from megatron_moe.training.step import forward_step
from megatron_moe.training.step_sums import Model, local_loss, max_over_ranks, sum_over_ranks, wrapped

_NARROW = (torch.bfloat16, torch.float16)
_ROUND_SECONDS = 1.0


def evaluate(
    model: Model,
    batches: Sequence[Iterator[Batch]],
    *,
    split: str,
    iteration: int,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroups,
    in_fp32: bool = False,
    between: Callable[[], None] | None = None,
) -> EvalRecord:
    """Run `num_micro_batches` micro-batches per rank forward, in evaluation mode and without gradients.

    Every token that the loss mask keeps weighs the same, whichever micro-batch or rank it belongs to. No expert is
    counted, no random number drawn (dropout is off).

    Args:
        batches: one iterator of micro-batches per model chunk.
        in_fp32: see `evaluation_mode`.
        between: called on all ranks together about once a second; what it raises ends the evaluation, and leaves the
            model as it was. None: the micro-batches run as one schedule.
    """
    begin = time.perf_counter()
    losses: list[dict[str, torch.Tensor]] = []
    with evaluation_mode(model, in_fp32):
        for size in _rounds(num_micro_batches, pg_collection.pp.size(), between):
            losses += get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=list(batches) if len(batches) > 1 else batches[0],
                model=list(model),
                num_microbatches=size,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=True,
            )
        loss_sum, tokens = sum_over_ranks(local_loss(losses, pg_collection))
    loss = loss_sum / tokens if tokens else float("nan")
    return EvalRecord(iteration, split, loss, int(tokens), time.perf_counter() - begin)


def _rounds(num_micro_batches: int, stages: int, between: Callable[[], None] | None) -> Iterator[int]:
    """Yield how many micro-batches to run next, and call `between` before each round.

    A round should take `_ROUND_SECONDS` on the slowest rank, judged by the one before. Its size is a multiple
    of the pipeline's stages, as the interleaved schedule needs it.
    """
    if between is None:
        yield num_micro_batches
        return
    done, size = 0, min(stages, num_micro_batches)
    between()
    while True:
        begin = time.perf_counter()
        yield size
        done += size
        if done == num_micro_batches:
            return
        between()  # which waits for the device
        (seconds,) = max_over_ranks(time.perf_counter() - begin)
        fitting = int(_ROUND_SECONDS / max(seconds, 1e-9) * size / stages) * stages
        size = min(max(fitting, stages), num_micro_batches - done)


@contextlib.contextmanager
def evaluation_mode(model: Model, in_fp32: bool = False) -> Iterator[None]:
    """Gather all parameters and run the block in evaluation mode without gradients; restore training mode.

    in_fp32: compute all in fp32, with the model's weights as they are: the loss of an fp32 model of their values.
    """
    with contextlib.ExitStack() as stack:
        for context in (gathered_parameters(model), configured(model, timers=None), torch.no_grad()):
            stack.enter_context(context)
        if in_fp32:  # after the parameters are gathered, of which copies are made
            stack.enter_context(configured_in_fp32(model))
            stack.enter_context(fp32_weights(model))
        stack.enter_context(without_autocast(platform.device().type))
        for chunk in model:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in model:
                chunk.train()


@contextlib.contextmanager
def fp32_weights(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Replace all bf16 and fp16 parameters by fp32 copies in the block; restore the originals, also after an exception.

    The originals are not touched: assigning to `Parameter.data` with another dtype would make autograd forget who
    accumulates its gradient, and data-parallel hooks would be lost silently. A weight that several modules share
    is copied once. Costs 4 bytes per narrow parameter while it lasts.

    Args:
        modules: parts of a model; all modules within are searched.
    """
    copies: dict[int, torch.nn.Parameter] = {}
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for module in modules:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is None or parameter.dtype not in _NARROW:
                        continue
                    if id(parameter) not in copies:
                        wide = parameter.detach().float()
                        copies[id(parameter)] = torch.nn.Parameter(wide, requires_grad=parameter.requires_grad)
                    replaced.append((part, name, parameter))
                    part._parameters[name] = copies[id(parameter)]
        yield
    finally:
        for part, name, parameter in reversed(replaced):
            part._parameters[name] = parameter


@contextlib.contextmanager
def gathered_parameters(model: Model) -> Iterator[None]:
    """Finish what `--overlap-param-gather` left to the next training forward, so that every weight is the new one.

    Without that flag the optimizer step has gathered them already.
    """
    hooked = [chunk for chunk in wrapped(model) if chunk.ddp_config.overlap_param_gather]
    for chunk in hooked:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
