"""The plan of a layout, without its ranks: what each needs and sends, FLOPs and speed, and layouts nearby.

First what one traced rank needs: memory of a step and of a save, Muon's share of both, and traffic.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_moe.checkpoint import dist
from megatron_moe.config.model_flags import QUANTILE, SHARDING_STRATEGIES
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.fully_sharded import Sharding
from megatron_moe.optim.matrix_exchange import ROUND_NUMEL
from megatron_moe.optim.muon import DTYPES
from megatron_moe_tools.plan.buffers import Buffer, GatheredUnit, HeldTogether
from megatron_moe_tools.plan.layouts import (
    GIB,
    Machine,
    changed_flags,
    legal,
    nearby_layouts,
    vocabulary,
    with_stage,
)
from megatron_moe_tools.plan.tracing import RankTrace, trace_ranks

# ---- memory


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of a rank, in bytes.

    Attributes:
        weights: the engine's parameter buffers, padding included; the fp32 shards of a fully sharded model, which are
            its masters too. With them the histograms of quantile balancing.
        gradients: the engine's gradient buffers, padding included.
        optimizer: masters and moments.
        activations: peak above these three during the forward and backward passes of a step, with the weights that a
            fully sharded model gathers.
        in_flight: micro-batches (of one chunk each) that wait for their backward pass at once.
        logits: peak of the logits in one micro-batch, part of the activations.
        dispatch: peak of the dispatch buffers in one micro-batch, part of the activations.
        update: peak above weights, gradients and optimizer during the update, when the activations are freed.
        loading: what `--load` takes on the device, before the first step.
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
    loading: int
    host: int = 0
    host_activations: int = 0

    @property
    def peak(self) -> int:
        """The peak of all parts together."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update, self.loading)


def rank_memory(run: Run, trace: RankTrace, world_size: int) -> PlannedMemory:
    """Return the memory of a rank, for the data-parallel rank that holds most of the optimizer."""
    micro_batches, stages = run.derived.num_microbatches(world_size), run.parallel.pipeline_model_parallel_size
    # The schedule's passes, each of which keeps something until its backward pass.
    live = activations = on_host = most_on_host = in_flight = 0
    waiting: list[int] = []  # the chunks of the passes, in their order; of a chunk, the first comes back first
    leaving = 0  # what the last forward pass has not yet freed, while it waits
    ahead = run.moe.overlap_moe_expert_parallel_comm
    for is_forward, number in schedule(
        len(trace.chunks), stages, trace.stage, min(micro_batches, ROUNDS * stages), ahead
    ):
        chunk = trace.chunks[number]
        if is_forward:
            activations = max(activations, live + chunk.forward_peak)
            live, on_host, leaving = live + chunk.kept, on_host + chunk.moved, chunk.leaving
            waiting.append(number)
        else:
            place = waiting.index(number)
            if place == len(waiting) - 1:
                leaving = 0  # its own, which is in its peak
            del waiting[place]
            live -= chunk.kept
            activations = max(activations, live + leaving + chunk.backward_peak)
            on_host -= chunk.moved
        most_on_host, in_flight = max(most_on_host, on_host), max(in_flight, len(waiting))

    weights = trace.weights
    if QUANTILE in run.moe.moe_router_load_balancing_type:  # the routers' histograms
        for layer in trace.layers:
            bins = run.moe.moe_router_quantile_balancing_num_bins * run.derived.moe_layer_pattern[layer]
            weights += 4 * bins * (run.moe.num_experts or 0)
    gradients = optimizer = host = 0
    update = _muon_bytes(run, trace)
    if trace.units:  # what a fully sharded model gathers and reduces is among the activations
        shards = matrices = 0
        for unit in trace.units:
            shards, matrices = shards + unit.share, matrices + unit.matrices
        moments = run.derived.moment_bytes(shards, matrices) + run.derived.average_bytes(shards)
        if trace.offloaded:
            weights = 0
            host = 8 * shards + moments
        else:
            weights = gradients = 4 * shards
            optimizer = moments
            if micro_batches == 1:  # the gradients come about during its backward pass
                activations = max(activations - gradients, 0)
    for buffer in trace.buffers:
        ranks = len(buffer.ranks)
        gradients += buffer.numel * buffer.gradient_bytes
        share, matrices = buffer.used, buffer.matrices
        if run.derived.zero_stage == 1:
            share, matrices = buffer.numel // ranks, buffer.fewest_matrices
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
    loading = 0
    if run.checkpoint.load is not None:
        loading = _loading(run, trace, device=True, host=False)
    return PlannedMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        in_flight=in_flight,
        logits=max(chunk.logits for chunk in trace.chunks),
        dispatch=max(chunk.dispatch for chunk in trace.chunks),
        update=update,
        loading=loading,
        host=host,
        host_activations=most_on_host,
    )


ROUNDS = 3
"""Rounds of `stages` micro-batches after which nothing new waits: fewer than (chunks + 1) x stages forward passes go
ahead, then the passes repeat themselves every chunks x stages."""


def schedule(
    chunks: int, stages: int, stage: int, micro_batches: int, ahead: bool = False
) -> Iterator[tuple[bool, int]]:
    """Yield the passes of one stage in the engine's order: (is it a forward pass, of which chunk).

    With one chunk per stage there are as many forward passes as stages follow, then one forward and one backward pass
    in turn. With several, `stages` micro-batches at a time go through the chunks. With `ahead` there is one more
    forward pass first, so that a forward and a backward pass that run at a time do not wait for one another.
    """
    total = chunks * micro_batches
    warm_up = stages - stage - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * stages
    warm_up = min(warm_up + ahead, total)

    def chunk(index: int) -> int:
        return index % (stages * chunks) // stages

    for index in range(total + warm_up):
        if index < total:
            yield True, chunk(index)
        if index >= warm_up:
            yield False, chunks - 1 - chunk(index - warm_up)


# ---- a save and a load (`checkpoint/writer.py`, `checkpoint/dist.py`)

_FP32 = 4


def saving_memory(run: Run, traces: Sequence[RankTrace], gpus_per_node: int) -> dict[str, Any]:
    """Return the host memory that a save takes, in bytes; small state such as expert_bias is left out.

    Args:
        run: the run.
        traces: of all stages of the job.
        gpus_per_node: ranks of one machine.

    Returns:
        host_rank, host_node: of the rank and of the machine that take most. kept: whether it is kept from save to save,
        page-locked on a GPU's machine; otherwise it is pageable and is freed when the step is written.
    """
    background, saved = run.checkpoint.async_save, not run.checkpoint.no_save_optim
    of_rank: dict[int, int] = {}
    for trace in traces:
        size = saved * _unpacked_bytes(run, trace)
        for part in (*trace.buffers, *trace.units):
            numel, state = _written(run, part)
            if background:
                size += numel * part.parameter_bytes + saved * run.derived.average_bytes(numel)
            if background and saved and not _unpacks(run):
                size += state
        of_rank.update(dict.fromkeys(trace.ranks, size))
    return {**_most(of_rank, gpus_per_node), "kept": background}


def loading_memory(run: Run, traces: Sequence[RankTrace], machine: Machine) -> dict[str, Any]:
    """Return the host memory that a load takes besides the state, in bytes; the index of the step is left out.

    Args:
        traces: of all stages of the job.

    Returns:
        host_rank, host_node: of the rank and of the machine that take most. It is freed before the first step.
    """
    of_rank: dict[int, int] = {}
    for trace in traces:
        of_rank.update(dict.fromkeys(trace.ranks, _loading(run, trace, device=machine.device == "cpu", host=True)))
    return _most(of_rank, machine.gpus_per_node)


def _most(of_rank: dict[int, int], gpus_per_node: int) -> dict[str, Any]:
    of_node: Counter[int] = Counter()
    for rank, size in of_rank.items():
        of_node[rank // gpus_per_node] += size
    return {"host_rank": max(of_rank.values()), "host_node": max(of_node.values())}


def _loading(run: Run, trace: RankTrace, device: bool, host: bool) -> int:
    """Return what a load takes besides the state, on the device, in host memory, or in both where they are one."""
    exchanged: Counter[tuple[bool, int, int]] = Counter()  # elements of all that a group's ranks hold in one width
    alone = 0  # bytes of the largest tensor that a rank reads by itself
    for part in (*trace.buffers, *trace.units):
        if isinstance(part, Buffer) and len(part.ranks) > 1:
            exchanged[part.expert, len(part.ranks), part.parameter_bytes] += part.used
            if run.derived.zero_stage == 0:
                state = _state_bytes(run, part, part.used, part.matrices) + run.derived.average_bytes(part.used)
                exchanged[part.expert, len(part.ranks), _FP32] += state // _FP32
                continue
        alone = max(alone, _FP32 * min(part.largest_weight, _written(run, part)[0]))
    most = host * min(alone, dist.PIECE_BYTES)
    copies = 2 * device or host  # what is sent and what is received; what is read, where that is not what is sent
    for (_, ranks, width), numel in exchanged.items():
        most = max(most, copies * dist.exchanged_numel(numel, ranks, width) * width)
    return most + device * _unpacked_bytes(run, trace)


def _written(run: Run, part: HeldTogether) -> tuple[int, int]:
    """Return how many elements of weights that are held together a rank writes, and how many bytes of their state."""
    if isinstance(part, GatheredUnit):
        return part.share, _state_bytes(run, part, part.share, part.matrices)
    assert isinstance(part, Buffer)
    ranks = len(part.ranks)
    if run.derived.zero_stage == 1:
        numel = min(part.numel // ranks, part.used)
        return numel, _state_bytes(run, part, numel, part.fewest_matrices)
    return part.used // ranks, _state_bytes(run, part, part.used, part.matrices) // ranks


def _state_bytes(run: Run, part: HeldTogether, numel: int, matrices: int) -> int:
    """Return the bytes of state in a checkpoint: two moments, a main param if any; one moment of what Muon updates."""
    tensors = (2 + (part.parameter_bytes < _FP32)) * numel
    if run.optimizer.optimizer == "muon":
        tensors -= matrices
    return _FP32 * tensors


def _unpacks(run: Run) -> bool:
    """Return whether state is made fp32 tensors to be written and read: `optim/adam.py`."""
    options = run.optimizer
    on_host = options.optimizer == "muon" and options.optimizer_cpu_offload and run.derived.zero_stage < 2
    return options.use_precision_aware_optimizer or on_host


def _unpacked_bytes(run: Run, trace: RankTrace) -> int:
    """Return the bytes of these tensors, which are of all that a rank updates."""
    size = 0
    for part in (*trace.buffers, *trace.units):
        numel, _ = _written(run, part)
        if run.derived.zero_stage == 0:
            numel *= len(part.ranks)
        with_main = run.derived.packs_main_weights and part.parameter_bytes < _FP32
        size += (2 + with_main) * _FP32 * numel
    return size * _unpacks(run)


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
    parts: tuple[HeldTogether, ...] = (*trace.buffers, *trace.units)
    for expert, tp in (
        (False, run.parallel.tensor_model_parallel_size),
        (True, run.derived.expert_tensor_parallel_size),
    ):
        ranks: tuple[int, ...] = ()
        elements = largest = 0
        flops = 0.0
        for part in parts:
            if part.expert == expert and part.matrices:
                ranks = ranks or part.ranks
                elements += part.matrices
                largest = max(largest, part.largest_block)
                for rate, count in part.rates.items():
                    flops += rate * count
        if ranks:
            shards = len(ranks) if trace.units else 1
            flops = flops * shards / len(ranks)
            yield _Matrices(ranks, tuple(range(tp)), elements * shards, flops, largest * tp)


def _muon_bytes(run: Run, trace: RankTrace) -> int:
    """Return about what Muon allocates during the update, as it was measured.

    The dense weights come first, then the experts. Where each data-parallel rank updates all, results come back to it.
    """
    size = DTYPES[run.optimizer.muon_fp32_matmul_prec].itemsize
    most = 0
    for one in _matrices(run, trace):
        dp = len(one.ranks)
        at_once = max(min(one.elements // dp, ROUND_NUMEL), one.largest)
        each = 5.0 * size
        if trace.products_in_fp32:
            each = max(each, 17.5)
        most = max(most, round(each * at_once))
        if run.derived.zero_stage == 0 and dp > 1:
            most = max(most, size * (at_once + 2 * min(one.elements, at_once * dp)))
    return most


def muon_flops(run: Run, trace: RankTrace) -> float:
    """Return the FLOPs of Muon's iteration on a rank in a step of the training; ranks have about as much to do."""
    return run.optimizer.muon_num_ns_steps * sum(one.flops for one in _matrices(run, trace))


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
            ranks = tuple(rank + trace.ranks[0] for rank in ranks)
            before, one = totals.get(name, Traffic(0.0, 0.0)), sent_by_a_rank(kind, ranks, size, gpus_per_node)
            totals[name] = Traffic(before.sent + one.sent, before.between_nodes + one.between_nodes)

    micro_batches = run.derived.num_microbatches(world_size)
    for chunk in trace.chunks:
        for call in chunk.collectives:
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
    element = DTYPES[run.optimizer.muon_fp32_matmul_prec].itemsize
    for one in _matrices(run, trace):
        # What a rank updates goes to the matrices' owners, and their results come back, over the data-parallel ranks
        # and then over the tensor-parallel ones. Where each data-parallel rank updates all, only results are sent.
        exchanged = element * 2 * one.elements / len(one.ranks)
        add("Muon", "all-to-all", one.ranks, element * one.elements if run.derived.zero_stage == 0 else exchanged)
        add("Muon", "all-to-all", one.tp_ranks, exchanged)
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


def sending_seconds(sent: Traffic, machine: Machine) -> float:
    """Return the seconds of what goes to the same machine, and of what goes to others after it."""
    near, far = sent.sent - sent.between_nodes, sent.between_nodes
    return (near / machine.node_bandwidth + far / machine.network_bandwidth) / 1e9


def _of_unit(run: Run, unit: GatheredUnit, micro_batches: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield what a fully sharded model sends of a unit in a step: kind, ranks, bytes of all ranks' parts together."""
    sharding, ranks, count = Sharding.from_run(run), unit.ranks, len(unit.ranks)
    plain = row = unit.share * unit.parameter_bytes
    if sharding.quantized_weights and not unit.is_island:
        row = sum(unit.segments.sizes(unit.parameter_bytes, 8))
    # Stage 2 keeps gathered weights for all micro-batches; the root's stay for the backward pass at stage 3 too.
    if sharding.keep_gathered:
        yield "all-gather", ranks, count * row
    else:
        yield "all-gather", ranks, count * row * micro_batches
        if not unit.is_root and (sharding.machine is None or unit.neighbours == count):
            yield "all-gather", ranks, count * row * micro_batches
        elif not unit.is_root:
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
    for name, group in trace.groups.items():
        if group == ranks:
            return name
    return "TP x CP"


@functools.cache
def _share_between_nodes(kind: str, ranks: tuple[int, ...], gpus_per_node: int) -> float:
    nodes = [rank // gpus_per_node for rank in ranks]
    if kind == "all-to-all":
        return (len(nodes) - nodes.count(nodes[0])) / (len(nodes) - 1)
    return sum(map(operator.ne, nodes, nodes[1:] + nodes[:1])) / len(nodes)


# ---- the plan


def traced(
    run: Run,
    world_size: int,
    machine: Machine,
    known: dict[Hashable, RankTrace] | None = None,
    stages: Sequence[int] | None = None,
) -> list[RankTrace]:
    """Return the traces of a layout on such machines. `known` and `stages`: see `trace_ranks`."""
    return trace_ranks(
        run,
        world_size,
        vocabulary(run),
        device=machine.device,
        imbalance=machine.imbalance,
        gpus_per_node=machine.gpus_per_node,
        attended=machine.attended_share(run.model.seq_length),
        stages=stages,
        known=known,
    )


def make_plan(
    run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace] | None = None
) -> dict[str, Any]:
    """Return the plan of a layout as plain data (bytes, unless a key says otherwise).

    Args:
        run: a run that has passed the rules for `world_size` ranks.
        world_size: number of ranks.
        machine: what it is to run on.
        known: see `trace_ranks`.
    """
    traces = traced(run, world_size, machine, known)
    ranks: list[dict[str, Any]] = []
    computed, of_muon = 0, 0.0
    for trace in traces:
        memory, traffic = rank_memory(run, trace, world_size), {}
        for name, one in rank_traffic(run, trace, world_size, machine.gpus_per_node).items():
            traffic[name] = vars(one)
        flops = trace.flops
        computed += flops
        of_muon = max(of_muon, muon_flops(run, trace))
        ranks.append(
            {
                "stage": trace.stage,
                "ranks": [trace.ranks[0], trace.ranks[-1]],
                "layers": list(trace.layers),
                "dense_params": trace.dense,
                "expert_params": trace.expert,
                "params": trace.dense + trace.expert,
                "memory": {**vars(memory), "peak": memory.peak},
                "traffic": traffic,
                "flops_per_micro_batch": flops,
            }
        )
    vocabulary_size, stages = vocabulary(run), len(traces)
    batch, micro_batches = run.derived.global_batch_size(world_size), run.derived.num_microbatches(world_size)
    tokens, keys = batch * run.model.seq_length, machine.attended_share(run.model.seq_length) * run.model.seq_length / 2
    per_token = run.derived.flops_per_token(vocabulary_size, keys)
    of_model = tokens * per_token / world_size
    speed: dict[str, float | None] = dict.fromkeys(("peak_tflops", "tokens_per_second", "seconds_per_step"))
    if machine.device != "cpu" or run.logging.peak_tflops is not None:
        seconds = (of_model + of_muon) / (machine.mfu * machine.peak_tflops * 1e12)
        speed = {
            "peak_tflops": machine.peak_tflops,
            "tokens_per_second": tokens / seconds,
            "seconds_per_step": seconds,
        }
    return {
        "world_size": world_size,
        "layout": layout(run, world_size),
        "total_params": run.derived.parameter_count(vocabulary_size),
        "active_params": run.derived.active_parameter_count(vocabulary_size),
        "max_memory_gib": max(rank["memory"]["peak"] for rank in ranks) / GIB,
        "device_memory_gib": machine.memory_gib,
        "saving": saving_memory(run, traces, machine.gpus_per_node),
        "loading": loading_memory(run, traces, machine),
        "imbalance": machine.imbalance,
        "mean_document_length": machine.mean_document_length,
        "ranks": ranks,
        "model_flops_per_token": per_token,
        "computed_flops_per_token": computed * micro_batches * (world_size // stages) / tokens,
        # The share of a step in which a stage waits, if all passes take equally long.
        "bubble_share": (stages - 1) / (len(traces[0].chunks) * micro_batches + stages - 1),
        "micro_batches": micro_batches,
        "global_batch_size": batch,
        "mfu": machine.mfu,
        **speed,
        "muon_share": of_muon / (of_model + of_muon),
    }


def peak_gib(run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace]) -> float:
    """Return the largest peak memory of a rank, in GiB.

    The stages that can be the largest are traced: the first two and the last, all of a layout by letters.
    `known`: see `trace_ranks`.
    """
    stages = run.parallel.pipeline_model_parallel_size
    some = sorted({0, min(1, stages - 1), stages - 1})
    if run.parallel.pipeline_model_parallel_layout is not None:
        some = list(range(stages))
    traces = traced(run, world_size, machine, known, some)
    return max(rank_memory(run, trace, world_size).peak for trace in traces) / GIB


def layout(run: Run, world_size: int) -> dict[str, Any]:
    """Return the sizes of the layout, micro-batch size and recomputation."""
    p = run.parallel
    recompute = run.training.recompute_granularity or "none"
    if recompute == "selective":
        recompute += ": " + " ".join(run.training.recompute_modules or ("core_attn",))
    sizes = {
        "TP": p.tensor_model_parallel_size,
        "PP": p.pipeline_model_parallel_size,
        "VPP": run.derived.virtual_pipeline_size or 1,
        "CP": p.context_parallel_size,
        "EP": p.expert_model_parallel_size,
        "ETP": run.derived.expert_tensor_parallel_size,
        "DP": run.derived.data_parallel_size(world_size),
        "EDP": run.derived.expert_data_parallel_size(world_size),
        "micro_batch_size": run.training.micro_batch_size,
        "recompute": recompute,
    }
    if run.training.fine_grained_activation_offloading and run.training.offload_modules:
        sizes["offload"] = " ".join(run.training.offload_modules)
    return sizes


# Of a device's memory, by the tensors of a run: the rest is the allocator's and the communication libraries'.
FILLED = 0.9


def ranked(
    run: Run, world_size: int, machine: Machine, count: int, known: dict[Hashable, RankTrace]
) -> list[dict[str, Any]]:
    """Return up to `count` legal layouts one change away, the most promising first. `known`: see `trace_ranks`.

    Those that fit the device come before those that do not, then a smaller estimated time (less recomputation, a
    smaller bubble), then a smaller memory. The time is over that of a step without bubble and recomputation; full
    recomputation makes three passes four. Communication, and kernels that are slower on smaller pieces, are left out.
    """
    rows: list[dict[str, Any]] = []
    for other in nearby_layouts(run):
        if not legal(other, world_size):
            continue
        gib = peak_gib(other, world_size, machine, known)
        stages, chunks = other.parallel.pipeline_model_parallel_size, other.derived.virtual_pipeline_size or 1
        relative_time = 1 + (stages - 1) / (chunks * other.derived.num_microbatches(world_size))
        if other.training.recompute_granularity == "full":
            relative_time *= 4 / 3
        row = {"change": changed_flags(run, other), "layout": layout(other, world_size), "max_memory_gib": gib}
        rows.append({**row, "fits": gib <= machine.memory_gib, "relative_time": relative_time})
    rows.sort(key=lambda row: (not row["fits"], round(row["relative_time"], 3), row["max_memory_gib"]))
    return rows[:count]


def recommended_stage(run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace]) -> dict[str, Any]:
    """Return the lowest ZeRO stage whose peak leaves a tenth of the device free, or the one that takes least.

    The allocator and the communication libraries need the tenth. A higher stage sends more. Stage 0 is looked at where
    there is nothing to share: stage 1 takes less and sends less. `known`: see `trace_ranks`.

    Returns:
        strategy, flags, max_memory_gib, fits, between_nodes (bytes a rank sends to other machines in a step), switches
        (flags of ZeRO++ that send less and fit), between_nodes_with_switches, max_memory_gib_with_switches.
    """
    shared = run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size
    limit, least = FILLED * machine.memory_gib, float("inf")
    for strategy in SHARDING_STRATEGIES[min(shared - 1, 1) :]:
        other = with_stage(run, strategy)
        if least <= limit or not legal(other, world_size):
            continue
        gib = peak_gib(other, world_size, machine, known)
        if gib < least:
            least, chosen, its_strategy = gib, other, strategy
    sent = _between_nodes(chosen, world_size, machine, known)
    found = {
        "strategy": its_strategy,
        "flags": changed_flags(run, chosen) or f"--data-parallel-sharding-strategy {its_strategy}",
        "max_memory_gib": least,
        "fits": least <= limit,
        "between_nodes": sent,
        "switches": [],
    }
    if chosen.derived.zero_stage < 2 or not sent:
        return found
    size = machine.gpus_per_node // run.parallel.tensor_model_parallel_size
    for partition in (size, None) if size > 1 else (None,):
        words = ["--zero-quantized-weights", "--zero-quantized-gradients int8"]
        if partition is not None:
            words.append(f"--zero-hpz-partition-size {partition}")
        other = replace(
            chosen, zero_quantized_weights=True, zero_quantized_gradients="int8", zero_hpz_partition_size=partition
        )
        if legal(other, world_size) and (gib := peak_gib(other, world_size, machine, known)) <= limit:
            found |= {
                "switches": words,
                "between_nodes_with_switches": _between_nodes(other, world_size, machine, known),
                "max_memory_gib_with_switches": gib,
            }
            break
    return found


def _between_nodes(run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace]) -> float:
    """Return the most bytes that a rank sends to other machines in a step for data parallelism."""
    most = 0.0
    for trace in traced(run, world_size, machine, known):
        sent = rank_traffic(run, trace, world_size, machine.gpus_per_node)
        most = max(most, sum(sent[name].between_nodes for name in _DATA_PARALLELISM.values() if name in sent))
    return most
