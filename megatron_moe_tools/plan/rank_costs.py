"""What a traced rank needs and sends: memory of a step and of a save, traffic, and what Muon adds to both."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_moe.checkpoint.optimizer import piece_numel
from megatron_moe.config.schema import Run
from megatron_moe.model.fully_sharded import Sharding
from megatron_moe.optim.matrix_exchange import ROUND_NUMEL
from megatron_moe.optim.muon import DTYPES
from megatron_moe_tools.plan.buffers import Buffer, GatheredUnit
from megatron_moe_tools.plan.tracing import RankTrace

# ---- memory


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of a rank, in bytes.

    Attributes:
        weights: the engine's parameter buffers, padding included; the fp32 shards of a fully sharded model, which are
            its masters too.
        gradients: the engine's gradient buffers, padding included.
        optimizer: masters and moments.
        activations: peak above these three during the forward and backward passes of a step, with the weights that a
            fully sharded model gathers.
        in_flight: micro-batches (of one chunk each) that wait for their backward pass at once.
        logits: peak of the logits in one micro-batch, part of the activations.
        dispatch: peak of the dispatch buffers in one micro-batch, part of the activations.
        update: peak above weights, gradients and optimizer during the update, when the activations are freed.
        saving: what `--save` takes on the device, between steps.
        host: moments in a device's host memory, with `--optimizer-cpu-offload`; from ZeRO's stage 2 on main weights
            and gradients, too.
        host_activations: activations there, of all micro-batches in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    logits: int
    dispatch: int
    update: int
    saving: int
    host: int = 0
    host_activations: int = 0

    @property
    def peak(self) -> int:
        """The peak of all parts together."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update, self.saving)


def rank_memory(run: Run, trace: RankTrace, world_size: int) -> PlannedMemory:
    """Return the memory of a rank, for the data-parallel rank that holds most of the optimizer."""
    micro_batches = run.derived.num_microbatches(world_size)
    flight = _in_flight(run, trace, micro_batches)
    weights, activations = trace.weights, flight.peak
    gradients = optimizer = host = 0
    update = muon_bytes(run, trace)
    if trace.units:  # what a fully sharded model gathers and reduces is among the activations
        shards = sum(unit.share for unit in trace.units)
        moments = run.derived.moment_bytes(shards, sum(unit.matrices for unit in trace.units))
        moments += run.derived.average_bytes(shards)
        if trace.offloaded:
            weights = 0
            host = 8 * shards + moments
        else:
            weights = gradients = 4 * shards
            optimizer = moments
            if micro_batches == 1:  # the gradients come about during its backward pass
                activations = max(activations - gradients, 0)
    for buffer in trace.buffers:
        gradients += buffer.numel * buffer.gradient_bytes
        share, matrices = buffer.used, buffer.matrices
        if run.derived.zero_stage == 1:
            share, matrices = buffer.numel // len(buffer.ranks), buffer.fewest_matrices
        main_params = run.derived.main_weight_bytes(share, buffer.parameter_bytes)
        moments = run.derived.moment_bytes(share, matrices) + run.derived.average_bytes(share)
        if not trace.offloaded:
            optimizer += main_params + moments
        elif run.derived.packs_main_weights:  # the low bits are with the moments
            host += main_params + moments
        else:
            optimizer += main_params
            host += moments
        if buffer.gradient_bytes < 4:
            update += 4 * share  # gradients are widened for the update
    return PlannedMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        in_flight=flight.most_waiting,
        logits=max(chunk.logits for chunk in trace.chunks),
        dispatch=max(chunk.dispatch for chunk in trace.chunks),
        update=update,
        saving=gathering_bytes(run, trace),
        host=host,
        host_activations=flight.host,
    )


@dataclass(frozen=True)
class _InFlight:
    """The peak bytes of activations on the device and in host memory, and the most passes that wait at a time."""

    peak: int
    host: int
    most_waiting: int


ROUNDS = 3
"""Rounds of `stages` micro-batches after which nothing new waits: fewer than (chunks + 1) x stages forward passes go
ahead, then the passes repeat themselves every chunks x stages."""


def _in_flight(run: Run, trace: RankTrace, micro_batches: int) -> _InFlight:
    """Follow the schedule's passes, each of which keeps something until its backward pass."""
    stages = run.parallel.pipeline_model_parallel_size
    live = peak = host = most_host = most_waiting = 0
    ahead = run.moe.overlap_moe_expert_parallel_comm
    waiting: list[int] = []  # the chunks of the passes, in their order; of a chunk, the first comes back first
    leaving = 0  # what the last forward pass has not yet freed, while it waits
    passes = schedule(len(trace.chunks), stages, trace.stage, min(micro_batches, ROUNDS * stages), ahead)
    for is_forward, number in passes:
        chunk = trace.chunks[number]
        if is_forward:
            peak = max(peak, live + chunk.forward_peak)
            live, host, leaving = live + chunk.kept, host + chunk.moved, chunk.leaving
            waiting.append(number)
        else:
            place = waiting.index(number)
            if place == len(waiting) - 1:
                leaving = 0  # its own, which is in its peak
            del waiting[place]
            live -= chunk.kept
            peak = max(peak, live + leaving + chunk.backward_peak)
            host -= chunk.moved
        most_host, most_waiting = max(most_host, host), max(most_waiting, len(waiting))
    return _InFlight(peak, most_host, most_waiting)


def schedule(
    chunks: int, stages: int, stage: int, micro_batches: int, ahead: bool = False
) -> Iterator[tuple[bool, int]]:
    """Yield the passes of one stage in the engine's order: (is it a forward pass, of which chunk).

    With one chunk per stage there are as many forward passes as stages follow, then one forward and one backward pass
    in turn. With several, `stages` micro-batches at a time go through the chunks. With `ahead` there is one more
    forward pass first, so that a forward and a backward pass that run at a time do not wait for one another.
    """
    total = chunks * micro_batches
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up + ahead, total)

    def chunk(index: int) -> int:
        return index % (stages * chunks) // stages

    for index in range(total + warm_up):
        if index < total:
            yield True, chunk(index)
        if index >= warm_up:
            yield False, chunks - 1 - chunk(index - warm_up)


def bubble_share(chunks: int, stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage waits, (PP - 1) / (VPP x micro-batches + PP - 1).

    All passes are assumed to take equally long.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


# ---- a save (`checkpoint/optimizer.py`, `checkpoint/writer.py`)

_FP32 = 4


@dataclass(frozen=True)
class SavingMemory:
    """The memory that a save takes, in bytes; small state such as expert_bias is left out.

    Attributes:
        host_rank: host memory of the rank that takes most.
        host_node: host memory of the machine that takes most.
        kept: whether it is kept from save to save, page-locked on a GPU's machine; otherwise it is pageable and is
            freed when the step is written.
    """

    host_rank: int
    host_node: int
    kept: bool


def saving_memory(run: Run, traces: Sequence[RankTrace], gpus_per_node: int) -> SavingMemory:
    """Return the memory that a save of the whole job takes; traces of all its stages."""
    by_rank: Counter[int] = Counter()
    for trace in traces:
        of_shards = sum(_host_bytes_of_shards(run, unit) for unit in trace.units)
        for buffer in trace.buffers:
            # Data parallelism is the slowest dimension of a stage: the first ranks are the first of the groups.
            for rank in trace.ranks[: len(trace.ranks) // len(buffer.ranks)]:
                by_rank[rank] += _host_bytes(run, buffer)
            if run.derived.zero_stage == 1:
                of_shards += _average_bytes(run, buffer.used // len(buffer.ranks))
        for rank in trace.ranks:
            by_rank[rank] += of_shards
    by_node: Counter[int] = Counter()
    for rank, size in by_rank.items():
        by_node[rank // gpus_per_node] += size
    return SavingMemory(max(by_rank.values()), max(by_node.values()), run.checkpoint.async_save)


def _host_bytes(run: Run, buffer: Buffer) -> int:
    """Return what the first rank of a buffer's group holds in host memory for a save."""
    per_element = average = 0
    if run.derived.zero_stage != 1:
        average = _average_bytes(run, buffer.used)
        if run.checkpoint.async_save or _unpacks(run):
            per_element = _optimizer_bytes(run, buffer.parameter_bytes)
    elif not run.checkpoint.no_save_optim:  # main params and moments are gathered there
        only_matrices = run.optimizer.optimizer == "muon" and buffer.matrices == buffer.used
        per_element = 2 * _FP32 if only_matrices else 3 * _FP32
    if run.checkpoint.async_save:
        per_element += buffer.parameter_bytes
    return buffer.used * per_element + average


def _host_bytes_of_shards(run: Run, unit: GatheredUnit) -> int:
    """Return what a rank holds in host memory for a save of its shards: they are written where they are.

    Packed moments are unpacked there.
    """
    if run.checkpoint.async_save:
        per_element = unit.parameter_bytes + _optimizer_bytes(run, unit.parameter_bytes)
        return unit.share * per_element + _average_bytes(run, unit.share)
    unpacked = _unpacks(run) and not run.checkpoint.no_save_optim
    return unit.share * 2 * _FP32 if unpacked else 0


def _optimizer_bytes(run: Run, parameter_bytes: int) -> int:
    """Return the bytes that a save has of an element's optimizer state: two moments, and a main param if any."""
    if run.checkpoint.no_save_optim:
        return 0
    return 3 * _FP32 if parameter_bytes < _FP32 else 2 * _FP32


def _unpacks(run: Run) -> bool:
    """Return whether moments are made fp32 tensors in host memory to be written: `optim/adam.py`."""
    options = run.optimizer
    offloaded_muon = options.optimizer == "muon" and options.optimizer_cpu_offload and run.derived.zero_stage < 2
    return options.use_precision_aware_optimizer or offloaded_muon


def _average_bytes(run: Run, numel: int) -> int:
    """Return what a rank copies of the average of so many weights; a save that is waited for writes it as it is."""
    copied = run.checkpoint.async_save and not run.checkpoint.no_save_optim
    return run.derived.average_bytes(numel) if copied else 0


def gathering_bytes(run: Run, trace: RankTrace) -> int:
    """Return what a save takes on the device of the rank that gathers: two pieces received and two sent."""
    if run.checkpoint.save is None or run.checkpoint.no_save_optim or run.derived.zero_stage != 1:
        return 0
    taken = [0]
    for buffer in trace.buffers:
        size = len(buffer.ranks)
        if size > 1:
            taken.append(2 * _FP32 * (size + 1) * piece_numel(buffer.numel // size, size))
    return max(taken)


# ---- Muon: its exchange of matrices, its iteration, and the memory of both


@dataclass(frozen=True)
class _Matrices:
    """The matrices of the dense weights or of the experts that data-parallel `ranks` orthogonalize together.

    tp_ranks: those with the other parts. elements: on a tensor-parallel rank. flops: of a step of the iteration, of a
    rank. largest: elements of the largest block, whole.
    """

    ranks: tuple[int, ...]
    tp_ranks: tuple[int, ...]
    elements: int
    flops: float
    largest: int


def _matrices(run: Run, trace: RankTrace) -> Iterator[_Matrices]:
    if run.optimizer.optimizer != "muon":
        return
    for expert, tp in (
        (False, run.parallel.tensor_model_parallel_size),
        (True, run.derived.expert_tensor_parallel_size),
    ):
        parts: tuple[Buffer | GatheredUnit, ...] = (*trace.buffers, *trace.units)
        every = [part for part in parts if part.expert == expert and part.matrices]
        if every:
            ranks = every[0].ranks
            shards = len(ranks) if trace.units else 1
            yield _Matrices(
                ranks,
                tuple(trace.ranks[:tp]),
                sum(part.matrices for part in every) * shards,
                sum(rate * count for part in every for rate, count in part.rates.items()) * shards / len(ranks),
                max(part.largest_block for part in every) * tp,
            )


def muon_bytes(run: Run, trace: RankTrace) -> int:
    """Return what Muon takes during the update: for the dense weights, or for the experts, which come after them."""
    dtype, replicated = DTYPES[run.optimizer.muon_fp32_matmul_prec], run.derived.zero_stage == 0
    wide, most = trace.products_in_fp32, 0
    for one in _matrices(run, trace):
        ranks, tp = len(one.ranks), len(one.tp_ranks)
        taken = update_bytes(dtype, one.elements, one.largest, ranks, tp, replicated=replicated, wide=wide)
        most = max(most, taken)
    return most


def muon_flops(run: Run, trace: RankTrace) -> float:
    """Return the FLOPs of Muon's iteration on a rank in a step of the training; ranks have about as much to do."""
    return run.optimizer.muon_num_ns_steps * sum(one.flops for one in _matrices(run, trace))


def muon_exchanges(run: Run, trace: RankTrace) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield what Muon exchanges in a step: ranks, and the bytes that each of them has for all, itself included.

    What a rank updates goes to the matrices' owners, and their results come back, over the data-parallel ranks and then
    over the tensor-parallel ones. Where each data-parallel rank updates all, results alone are sent there.
    """
    size = DTYPES[run.optimizer.muon_fp32_matmul_prec].itemsize
    for one in _matrices(run, trace):
        share = one.elements / len(one.ranks)
        yield one.ranks, size * (one.elements if run.derived.zero_stage == 0 else 2 * share)
        yield one.tp_ranks, size * 2 * share


# ---- traffic

_DATA_PARALLELISM = {False: "DP", True: "expert DP"}
# Bytes that a rank sends over those of the whole tensor, without the factor (n - 1) / n of n ranks.
_SENT_MULTIPLES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends per step, and those of them that go to another machine."""

    sent: float
    between_nodes: float


def rank_traffic(run: Run, trace: RankTrace, world_size: int, gpus_per_node: int) -> dict[str, Traffic]:
    """Return the traffic of the stage's first rank: TP, CP, EP (its all-to-all), PP, DP, expert DP and Muon, if any.

    A ring is assumed for reductions and gathers: a rank sends (n - 1) / n of the tensor to its neighbour, twice for an
    all-reduce, and a link leaves the machine where two neighbours are on different ones. An all-to-all sends each of
    the others an equal share.
    """
    totals: dict[str, Traffic] = {}

    def add(name: str, kind: str, ranks: tuple[int, ...], size: float) -> None:
        if len(ranks) > 1:
            before, one = totals.get(name, Traffic(0.0, 0.0)), sent_by_a_rank(kind, ranks, size, gpus_per_node)
            totals[name] = Traffic(before.sent + one.sent, before.between_nodes + one.between_nodes)

    micro_batches = run.derived.num_microbatches(world_size)
    for chunk in trace.chunks:
        for call in chunk.forward + chunk.backward:
            if call.kind != "broadcast":
                add(purpose(call.kind, call.ranks, trace), call.kind, call.ranks, call.bytes * micro_batches)
    for unit in trace.units:
        for kind, ranks, size in _of_unit(run, unit, micro_batches):
            add(_DATA_PARALLELISM[unit.expert], kind, ranks, size)
    for buffer in trace.buffers:
        name, size = _DATA_PARALLELISM[buffer.expert], buffer.numel
        if run.derived.zero_stage == 1:
            add(name, "reduce-scatter", buffer.ranks, size * buffer.gradient_bytes)
            add(name, "all-gather", buffer.ranks, size * buffer.parameter_bytes)
        else:
            add(name, "all-reduce", buffer.ranks, size * buffer.gradient_bytes)
    for ranks, size in muon_exchanges(run, trace):
        add("Muon", "all-to-all", ranks, size)
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1:
        # A stage sends gradients of what it receives, and what the next stage receives.
        arriving = [stage.receives for stage in run.derived.pipeline_stages]
        messages = sum(arriving[trace.stage :: stages]) + sum((arriving[1:] + [0])[trace.stage :: stages])
        sent = trace.boundary * micro_batches * messages
        leaves = trace.ranks[0] // gpus_per_node != (trace.ranks[0] + len(trace.ranks)) // gpus_per_node
        totals["PP"] = Traffic(sent, sent * leaves)
    return dict(sorted(totals.items()))


def sent_by_a_rank(kind: str, ranks: tuple[int, ...], size: float, gpus_per_node: int) -> Traffic:
    """Return what one of `ranks` sends in a collective over `size` bytes."""
    if len(ranks) < 2:
        return Traffic(0.0, 0.0)
    sent = _SENT_MULTIPLES[kind] * size * (len(ranks) - 1) / len(ranks)
    return Traffic(sent, sent * _share_between_nodes(kind, ranks, gpus_per_node))


def _of_unit(run: Run, unit: GatheredUnit, micro_batches: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield what a fully sharded model sends of a unit in a step: kind, ranks, bytes of all ranks' parts together."""
    sharding, ranks, count = Sharding.from_run(run), unit.ranks, len(unit.ranks)
    plain = unit.share * unit.parameter_bytes
    rounds = sharding.quantized_weights and not unit.is_island
    row = sum(unit.segments.sizes(unit.parameter_bytes, 8)) if rounds else plain
    # Stage 2 keeps gathered weights for all micro-batches; the root's stay for the backward pass at stage 3 too.
    yield "all-gather", ranks, count * row * (1 if sharding.keep_gathered else micro_batches)
    if not sharding.keep_gathered and not unit.is_root:
        if sharding.machine is None or unit.neighbours == count:
            yield "all-gather", ranks, count * row * micro_batches
        else:
            yield "all-gather", ranks[: unit.neighbours], count * plain * micro_batches
    if sharding.gradient_bits is None or unit.is_island:
        yield "reduce-scatter", ranks, count * unit.share * 4 * micro_batches
        return
    row = sum(unit.segments.sizes(4, sharding.gradient_bits)) * micro_batches
    if not 1 < unit.neighbours < count:
        yield "all-to-all", ranks, count * row
        return
    yield "all-to-all", ranks[: unit.neighbours], count * row
    across = ranks[:: unit.neighbours]
    yield "all-to-all", across, len(across) * row


def purpose(kind: str, ranks: tuple[int, ...], trace: RankTrace) -> str:
    """Return what a collective of a pass is for: EP, TP, CP, or TP x CP."""
    if kind == "all-to-all":
        return "EP"
    return next((name for name, group in trace.groups.items() if group == ranks), "TP x CP")


@functools.cache
def _share_between_nodes(kind: str, ranks: tuple[int, ...], gpus_per_node: int) -> float:
    nodes = [rank // gpus_per_node for rank in ranks]
    if kind == "all-to-all":
        return sum(node != nodes[0] for node in nodes) / (len(nodes) - 1)
    return sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1])) / len(nodes)


def update_bytes(
    dtype: torch.dtype, matrices: int, largest: int, dp: int, tp: int, *, replicated: bool, wide: bool
) -> int:
    """Return about what a rank allocates to orthogonalize, as it was measured.

    Args:
        dtype: of the iteration.
        matrices: elements of all matrices on a tensor-parallel rank. largest: those of the largest block, whole.
        dp, tp: ranks of the groups. replicated: whether each data-parallel rank updates all. wide: whether products of
            bf16 numbers are in fp32.
    """
    size = dtype.itemsize
    most = max(min(matrices // dp, ROUND_NUMEL), largest)
    each = max(17.5 if wide else 0.0, 5.0 * size + (size if tp > 1 else 0))
    returned = size * (most + 2 * min(matrices, most * dp)) if replicated and dp > 1 else 0
    return max(round(each * most), returned)
