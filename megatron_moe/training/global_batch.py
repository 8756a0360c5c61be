"""Announce a global batch to the routers before its first micro-batch: its tokens, and what each of them weighs.

Auxiliary losses are per token of the global batch. Without `--calculate-per-token-loss` that follows from the numbers
of the step. With it, the engine divides all gradients by the tokens that have a loss, which only the loss masks of the
whole global batch say; and a `global_aux_loss` over several micro-batches needs the choices of all of them. Then, and
where some tokens may be padding, the step's micro-batches are read ahead, and kept until they are trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.data.batches import DOCUMENTS, Batch
from megatron_moe.engine.layers import get_cuda_rng_tracker
from megatron_moe.engine.schedules import configured, get_attr_wrapped_model, get_forward_backward_func
from megatron_moe.moe.load_balance import GlobalBatch
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import announce_global_batch, counting_ahead
from megatron_moe.platform.protocols import ProcessGroups


def prepare_global_batch(
    model: Sequence[torch.nn.Module],
    batches: Sequence[Iterator[Batch]],
    forward_step: Callable[..., Any],
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
    pg_collection: ProcessGroups,
) -> Sequence[Iterator[Batch]]:
    """Announce the coming step to the routers. Collective over all ranks where something has to be read ahead.

    The options are those of the model, which every pipeline stage has, also one without an MoE layer. Every position is
    a token that is routed, but for the padding that a batch's `documents` may mark.

    Returns:
        The iterators to train from, which begin with what was read ahead.
    """
    options: MoEOptions | None = get_attr_wrapped_model(model[0], "moe_options")
    if options is None:
        return batches
    num_tokens = num_micro_batches * micro_batch_size * seq_length * pg_collection.dp.size()
    weight: float | Tensor = num_micro_batches * pg_collection.dp.size() / num_tokens
    may_pad: bool = get_attr_wrapped_model(model[0], "routers_know_documents")
    weighs_by_mask = options.per_token_loss and bool(options.aux_losses or options.z_loss_coeff)
    # What all tokens of the step choose is counted by running its micro-batches forward once.
    is_global = "global_aux_loss" in dict(options.aux_losses) and options.global_counts == "batch"
    counts_ahead, counted = is_global and num_micro_batches > 1, None
    if weighs_by_mask or counts_ahead or may_pad:
        read = [list(itertools.islice(chunk, num_micro_batches)) for chunk in batches]
        if weighs_by_mask or may_pad:
            # Tokens with a loss, and padding. Counted by one TP rank of the first stage; stages in between have no
            # loss masks.
            tokens = torch.zeros(2, dtype=torch.float64, device=platform.device())
            if pg_collection.pp.rank() == 0 and pg_collection.tp.rank() == 0:
                for batch in read[0]:
                    mask, documents = batch["loss_mask"], batch.get(DOCUMENTS)
                    assert mask is not None, "the first stage has batches"
                    tokens[0] += mask.double().sum()
                    if documents is not None:
                        tokens[1] += (documents < 0).sum()
            torch.distributed.all_reduce(tokens)
            if may_pad:
                num_tokens -= int(tokens[1])
                weight = num_micro_batches * pg_collection.dp.size() / num_tokens
            if weighs_by_mask:
                weight = tokens[0] / num_tokens
        if counts_ahead:
            iterators = list(map(iter, read))
            with same_random_states(), configured(model, timers=None), counting_ahead(model) as counted:
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iterators if len(iterators) > 1 else iterators[0],
                    model=list(model),
                    num_microbatches=num_micro_batches,
                    seq_length=seq_length,
                    micro_batch_size=micro_batch_size,
                    forward_only=True,
                )
        batches = list(map(iter, read))
    announce_global_batch(model, GlobalBatch(num_tokens, weight), counted)
    return batches


RandomStates = tuple[Tensor, Tensor | None, dict[str, Tensor]]
"""Of torch's generators, the CPU's and the device's, and of the engine's."""


def random_states() -> RandomStates:
    """Return the states of the random generators."""
    tracked = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    device = torch.get_device_module(platform.device()).get_rng_state() if platform.has_cuda() else None
    return torch.get_rng_state(), device, tracked


def set_random_states(states: RandomStates) -> None:
    """Set the states of the random generators."""
    host, device, tracked = states
    torch.set_rng_state(host)
    if device is not None:
        torch.get_device_module(platform.device()).set_rng_state(device)
    get_cuda_rng_tracker().set_states({name: state.clone() for name, state in tracked.items()})


@contextmanager
def same_random_states() -> Iterator[None]:
    """Restore the states of the random generators after the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
