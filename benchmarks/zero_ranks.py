"""What one rank of `benchmarks.zero` measures: bytes held, bytes sent, gradients."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.schema import Run, build
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.engine.optimizer import parts
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import local
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.parallel.quantized_collectives import BLOCK, QuantizedAllGather, QuantizedReduceScatter
from megatron_moe.training.step import connect, train_step
from megatron_moe_tools.plan.meta_tracer import LiveBytes, storage_bytes

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
        argument: flags, steps, per_machine (ranks), and errors: whether each quantised collective is compared, in all
            steps, with the same one in fp64.
    """
    run, chunks = build(argument["flags"]), []
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        with LiveBytes() as live:
            chunks = build_model(run, pg_collection, run.derived.padded_vocab_size(run.model.vocab_size or 0))
            step, optimizer = _stepper(run, chunks, pg_collection)
            worst: dict[str, float] = {}
            with errors_measured(worst) if argument["errors"] else nullcontext():
                for _ in range(argument["steps"]):
                    step()
            live.restart_peak()
            sent: Counter[str] = Counter()
            with counted(sent, argument["per_machine"]):
                step()
            peak = live.peak
        return {**_held(chunks, optimizer), "peak": peak, "sent": dict(sent), "errors": worst}
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


@contextmanager
def errors_measured(worst: dict[str, float]) -> Iterator[None]:
    """Compare each quantised gather and reduction in the block with the same one in fp64.

    worst gets: "weights" and "gradients", the largest error of a unit's numbers relative to their norm; "weights of
    bound" and "gradients of bound", the largest error of a number over what roundings to half a step allow; "nearest"
    and "stochastic", the largest relative error of what a rank sends, rounded in these ways.
    """

    def note(kind: str, got: Tensor, exact: Tensor, bound: Tensor) -> None:
        error = (got.double() - exact).abs()
        relative = float(error.norm() / exact.norm().clamp_min(1e-300))
        allowed = bound + 1e-6 * exact.abs().max()  # fp32's own rounding, and that of the gathered dtype below
        if got.dtype != torch.float32:
            allowed = allowed + torch.finfo(got.dtype).eps * exact.abs()
        worst[kind] = max(worst.get(kind, 0.0), relative)
        worst[f"{kind} of bound"] = max(worst.get(f"{kind} of bound", 0.0), float((error / allowed).nan_to_num().max()))

    def gather(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        own = input_tensor.clone()  # it is a part of the output
        real_gather(self, output_tensor, input_tensor, group, async_op)
        if group.size() == self._ranks:
            half = half_steps(self._segments(), own.view(1, -1), 8)
            exact, bound = (_gathered(one, group) for one in (own.double(), half[0]))
            note("weights", output_tensor, exact, bound)

    def reduce(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **more: Any) -> None:
        rows = input_tensor.view(group.size(), -1).clone()
        real_reduce(self, output_tensor, input_tensor, group, op, **more)
        half = half_steps(self._segments(), rows, self._bits)
        # A machine's sum is at most as large as its ranks' numbers with their errors: its half steps add up to that.
        twice = 1.0 + 1.0 / (2 * (2 ** (self._bits - 1) - 1))
        bound = half * (1.0 + (twice if self._inside is not None else 0.0))
        steps = torch.where(half > 0, 2 * half, torch.inf)
        for name, drawn in (("nearest", 0.5), ("stochastic", torch.rand_like(half))):
            rounded = torch.where(half > 0, (rows / steps + drawn).floor() * 2 * half, rows.double())
            error = float((rounded - rows).norm() / rows.double().norm().clamp_min(1e-300))
            worst[name] = max(worst.get(name, 0.0), error)
        exact, allowed = (_reduced(one, group) for one in (rows.double(), bound))
        note("gradients", output_tensor, exact, allowed)

    real_gather, real_reduce = QuantizedAllGather.__call__, QuantizedReduceScatter.__call__
    with (
        mock.patch.object(QuantizedAllGather, "__call__", gather),
        mock.patch.object(QuantizedReduceScatter, "__call__", reduce),
    ):
        yield


def half_steps(segments: Any, rows: Tensor, bits: int) -> Tensor:
    """Return half a step of each number's block, fp64, 0 for what is sent as it is."""
    found = torch.zeros(rows.shape, dtype=torch.float64)
    parts = zip(found.split(segments.lengths, dim=1), rows.double().split(segments.lengths, dim=1), segments.quantized)
    for half, values, quantized in parts:
        for start in range(0, values.shape[1] if quantized else 0, BLOCK):
            block = values[:, start : start + BLOCK]
            half[:, start : start + BLOCK] = block.abs().amax(dim=1, keepdim=True) / (2 * (2 ** (bits - 1) - 1))
    return found


def _gathered(own: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return torch.cat(every)


def _reduced(rows: Tensor, group: Any) -> Tensor:
    dist.all_reduce(rows, group=group)
    return rows[group.rank()]


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
