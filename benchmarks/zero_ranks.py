"""What one rank of `benchmarks.zero` measures: bytes held, bytes sent, gradients."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.apps.plan.meta_tracer import LiveBytes, storage_bytes
from megatron_moe.config.schema import Run, build
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizers import build_tokenizer
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import local
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.optimizer import build_optimizer, build_scheduler, owned_part, parts
from megatron_moe.training.step import connect, train_step

# Function of torch.distributed -> (what is measured, the tensor whose bytes are moved: 0 output, 1 input)
_COLLECTIVES = {
    "all_gather_single": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "all_to_all_single": ("all-to-all", 1),
}


def measure(argument: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of a run on this rank and return what it held and sent in the last one.

    Args:
        argument: flags, steps, per_machine (ranks), gradients (a path to write rank 0's to, or None).
    """
    run, chunks = build(argument["flags"]), []
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        with LiveBytes() as live:
            chunks = build_model(run, pg_collection, run.derived.padded_vocab_size(run.model.vocab_size or 0))
            step, optimizer = _stepper(run, chunks, pg_collection)
            for _ in range(argument["steps"]):
                step()
            live.restart_peak()
            sent: Counter[str] = Counter()
            with counted(sent, argument["per_machine"]):
                step()
            peak = live.peak
        if argument["gradients"] is not None:
            gradients = _gradients(chunks[0], optimizer)
            if dist.get_rank() == 0:
                torch.save(gradients, argument["gradients"])
        return {**_held(chunks, optimizer), "peak": peak, "sent": dict(sent)}
    finally:
        chunks.clear()
        gc.collect()
        groups.destroy()


def _stepper(run: Run, chunks: list[torch.nn.Module], pg_collection: Any) -> tuple[Callable[[], None], Any]:
    optimizer = build_optimizer(run, chunks, pg_collection)
    scheduler = build_scheduler(run, optimizer)
    connect(chunks, optimizer)
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    dataset, *_ = build_datasets(run, tokenizer, 200, 0, 0, pg_collection=pg_collection)
    batches = batch_iterators(dataset, run, pg_collection=pg_collection)

    def step() -> None:
        train_step(
            chunks,
            optimizer,
            scheduler,
            batches,
            num_micro_batches=run.derived.num_microbatches(dist.get_world_size()),
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=pg_collection,
        )

    return step, optimizer


def _held(chunks: list[torch.nn.Module], optimizer: Any) -> dict[str, int]:
    """Return the bytes of this rank's weights, gradients, masters and moments; shards are weights and masters."""
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    own = {local(weight).untyped_storage().data_ptr() for weight in weights}
    masters = [master for part in parts(optimizer) for master in part.get_parameters()]
    states = [value for part in parts(optimizer) for state in part.optimizer.state.values() for value in state.values()]
    return {
        "weights": storage_bytes(local(weight) for weight in weights),
        "gradients": storage_bytes(weight.main_grad for weight in weights),
        "masters": storage_bytes(m for m in masters if m.untyped_storage().data_ptr() not in own),
        "moments": storage_bytes(value for value in states if isinstance(value, Tensor)),
    }


def _gradients(chunk: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the dense weights' reduced gradients, whole, on every rank: those of experts may be another rank's."""
    whole = {}
    for name, parameter in chunk.named_parameters():
        found = torch.zeros(parameter.shape)
        own = owned_part(optimizer, parameter).of(found)
        mine: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        own.copy_(mine.view_as(own) if mine.numel() == own.numel() else own_of(mine, parameter, optimizer))
        if own.numel() < found.numel():
            dist.all_reduce(found)
        whole[name.removeprefix("module.").removeprefix("module.")] = found
    return whole


def own_of(gradient: Tensor, parameter: torch.nn.Parameter, optimizer: Any) -> Tensor:
    """Return the part of a whole gradient that this rank's optimizer uses."""
    return owned_part(optimizer, parameter).of(gradient)


@contextmanager
def counted(sent: Counter[str], per_machine: int) -> Iterator[None]:
    """Count the bytes that this rank sends to others in the block, by collective, and those that leave its machine.

    Of a gather or reduction each other rank's share counts once, as in a ring.
    """

    def counting(kind: str, moved: int, call: Any) -> Any:
        def counted_call(*tensors: Tensor, group: Any = None, **named: Any) -> Any:
            both = (*tensors, *(named[key] for key in ("output", "input") if key in named))
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            others = [rank for rank in ranks if rank != dist.get_rank()]
            away = [rank for rank in others if rank // per_machine != dist.get_rank() // per_machine]
            sent[kind] += both[moved].nbytes * len(others) // len(ranks)
            sent[f"{kind}, away"] += both[moved].nbytes * len(away) // len(ranks)
            return call(*tensors, group=group, **named)

        return counted_call

    with ExitStack() as stack:
        for name, (kind, moved) in _COLLECTIVES.items():
            stack.enter_context(mock.patch.object(dist, name, counting(kind, moved, getattr(dist, name))))
        yield
