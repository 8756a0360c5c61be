"""Trace one rank of each pipeline stage: build its part of the model on the meta device and run one micro-batch.

No other rank exists. Parameters, bytes, FLOPs and collectives are counted from what the model's own code does.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.schedules import without_loss_scale
from megatron_moe.model.activation_offload import ActivationOffload
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import Sharding, units
from megatron_moe.model.loss import loss_func
from megatron_moe.model.matrices import mark_matrices
from megatron_moe.model.norm import residual_dtype
from megatron_moe.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from megatron_moe.moe.dispatch_by_node import ByNodeDispatcher, NodeSplits
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import MicroBatch, chosen_experts, scores_from_logits
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.platform.cpu_half_gemm import multiply_in_fp32
from megatron_moe_tools.plan.buffers import Buffer, GatheredUnit, Gathering, buffers_of, planned_units
from megatron_moe_tools.plan.meta_tracer import Collective, MetaTracer, meta_device, ranks_of, storage_bytes

_logger = logging.getLogger(__name__)
_ROUTED_TOKENS = 16384
_GROUPS = {"TP": "tp", "CP": "cp", "EP": "tp_ep"}


@dataclass(frozen=True)
class ChunkTrace:
    """The counts of one model chunk over one micro-batch. All bytes are above what was live before its forward pass.

    Attributes:
        kept: what the forward pass keeps for the backward pass, its output included unless that is freed after sending.
        leaving: what of it is on the way to host memory, and stays on the device until the next pass.
        moved: what it keeps in host memory.
        forward_peak: peak during the forward pass.
        backward_peak: peak during the backward pass.
        logits: peak of the logits.
        dispatch: peak of the dispatch buffers.
        flops: FLOPs of both passes, recomputation included.
        collectives: of both passes.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    logits: int
    dispatch: int
    flops: int
    collectives: tuple[Collective, ...]
    leaving: int = 0
    moved: int = 0


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The counts of the ranks of one pipeline stage.

    Attributes:
        stage: number of the stage, from 0.
        ranks: all ranks of the stage; the counts are the same for each.
        layers: global numbers of its layers, from 0.
        dense: parameters of one rank outside the routed experts.
        expert: parameters of one rank in routed experts.
        groups: ranks of the first rank's groups, for the names of `_GROUPS`; these, and those of buffers, units and
            collectives, are counted from the first rank on.
        weights: bytes of the parameters.
        buffers: the engine's gradient buffers.
        units: what `FullyShardedDataParallel` gathers together, from ZeRO's stage 2 on; there are no buffers then.
        offloaded: whether moments are in a device's host memory, and the shards and gradients of units.
        products_in_fp32: whether products of bf16 numbers are computed in fp32, on a CPU without instructions for them.
        chunks: the model chunks.
        boundary: bytes of a micro-batch's hidden states between two stages.
    """

    stage: int
    ranks: range
    layers: tuple[int, ...] = ()
    dense: int = 0
    expert: int = 0
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: int
    buffers: tuple[Buffer, ...]
    units: tuple[GatheredUnit, ...]
    offloaded: bool
    products_in_fp32: bool = False
    chunks: tuple[ChunkTrace, ...]
    boundary: int

    @property
    def flops(self) -> int:
        """FLOPs of both passes of one micro-batch, recomputation included."""
        return sum(chunk.flops for chunk in self.chunks)


def trace_ranks(
    run: Run,
    world_size: int,
    vocabulary: int,
    *,
    device: str,
    imbalance: float,
    gpus_per_node: int = 8,
    attended: float = 1.0,
    stages: Sequence[int] | None = None,
    known: dict[Hashable, RankTrace] | None = None,
) -> list[RankTrace]:
    """Return one trace per pipeline stage. Stages that are alike are built and run once.

    Args:
        run: a run that has passed the rules for `world_size` ranks.
        world_size: number of ranks.
        vocabulary: padded vocabulary size.
        device: "cuda" or "cpu", the device that the run is planned for.
        imbalance: rows that a rank's experts get, over the mean.
        gpus_per_node: ranks of one machine; quantised gradients are added up inside it first, tokens copied.
        attended: see `MetaTracer`.
        stages: the stages to trace; None: all.
        known: cache of earlier traces, also of runs with other flags; new traces are added.
    """
    if known is None:
        known = {}
    traces = []
    last = run.parallel.pipeline_model_parallel_size - 1
    if stages is None:
        stages = range(last + 1)
    for stage in stages:
        kind = (device, imbalance, gpus_per_node, attended)
        key = (run, world_size, vocabulary, *kind, _kind(run, stage))
        if key not in known:
            _logger.info("tracing stage %d of %d", stage + 1, last + 1)
            known[key] = trace_stage(run, world_size, vocabulary, stage, *kind)
        layers: list[int] = []
        for chunk in run.derived.chunks_of_pipeline_rank(stage):
            layers += chunk.layers
        # The stages of a pipeline are consecutive ranks.
        own, count = known[key], world_size // (last + 1)
        ranks = range(stage * count, (stage + 1) * count)
        traces.append(replace(own, stage=stage, ranks=ranks, layers=tuple(layers)))
    return traces


def _kind(run: Run, stage: int) -> Hashable:
    """Return a key that is equal for stages whose traces differ in nothing but the numbers of ranks and layers.

    It says which layers have experts or windows, and which other parts of the model it has. Modules that are kept in
    fp32, and frozen parameters, may be named by their layer, so with them no stage is like another.
    """
    if run.precision.keep_fp32 is not None or run.optimizer.freeze is not None:
        return stage
    kinds = []
    for chunk in run.derived.chunks_of_pipeline_rank(stage):
        of_layers = slice(chunk.layers.start, chunk.layers.stop)
        layers = run.derived.moe_layer_pattern[of_layers], run.derived.window_pattern[of_layers]
        kinds.append((layers, chunk.embedding, chunk.predictions, chunk.loss, chunk.receives))
    return tuple(kinds)


def trace_stage(
    run: Run,
    world_size: int,
    vocabulary: int,
    stage: int,
    device: str,
    imbalance: float,
    gpus_per_node: int,
    attended: float = 1.0,
) -> RankTrace:
    """Build and run one stage. Arguments: see `trace_ranks`."""
    per_stage = world_size // run.parallel.pipeline_model_parallel_size
    ranks = range(stage * per_stage, (stage + 1) * per_stage)
    tokens = run.training.micro_batch_size * run.model.seq_length // run.parallel.context_parallel_size
    shape = (tokens, vocabulary // run.parallel.tensor_model_parallel_size)
    state, hook = torch.get_rng_state(), sys.excepthook  # torch.distributed puts the rank into every traceback
    sent_to_node = 1.0
    if run.moe.moe_alltoall_by_node:
        sent_to_node = share_of_tokens(run, max(1, run.parallel.expert_model_parallel_size // gpus_per_node))
    pg_collection: Any = groups.fake_world(run, ranks[0], world_size, gpus_per_node)
    try:
        seed_everything(run)
        with without_loss_scale(), meta_device(device, shape, attended) as tracer:
            assert pg_collection.pp.rank() == stage
            offload = ActivationOffload.from_run(run)
            chunks = build_model(run, pg_collection, vocabulary, draw=False, offload=offload)
            bare: list[Any] = []  # the language models inside their wrappers
            for chunk in chunks:
                model: Any = chunk
                while not hasattr(model, "pre_process") or not hasattr(model, "decoder"):
                    model = model.module
                bare.append(model)
            mark_matrices(run, bare)
            for inner in bare:
                _set_row_counts(run, inner, tracer, imbalance, sent_to_node)
            # The memory of a CPU is the host's.
            sharding = replace(Sharding.from_run(run), offload=run.optimizer.optimizer_cpu_offload and device != "cpu")
            sharded = []
            if run.derived.zero_stage >= 2:
                sharded = planned_units(units(bare[0], pg_collection), sharding.machine or gpus_per_node)
            traces: dict[Hashable, ChunkTrace] = {}
            counts: list[ChunkTrace] = []
            for chunk, inner, part in zip(chunks, bare, run.derived.chunks_of_pipeline_rank(stage)):
                weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in chunk.named_parameters())
                key = (part.embedding, part.loss, part.receives, weights)
                if key not in traces:
                    # A first pass allocates what stays: rotary tables, sums of auxiliary losses.
                    with Gathering(sharded, sharding, copies=device == "cpu") as gathering:
                        _trace_chunk(run, tracer, chunk, inner, part.receives, gathering, offload)
                        if run.derived.num_microbatches(world_size) == 1:  # the shards have no gradients yet
                            for unit in sharded:
                                unit.shards = None
                        traces[key] = _trace_chunk(run, tracer, chunk, inner, part.receives, gathering, offload)
                counts.append(traces[key])
            parameters: list[torch.nn.Parameter] = []
            layers: list[int] = []
            for inner in bare:
                parameters += inner.parameters()
                layers += [layer.layer_number - 1 for layer in inner.decoder.layers]
            dense = expert = 0
            for parameter in parameters:
                if getattr(parameter, "allreduce", True):
                    dense += parameter.numel()
                else:
                    expert += parameter.numel()
            groups_of_rank = {name: ranks_of(getattr(pg_collection, attribute)) for name, attribute in _GROUPS.items()}
            return RankTrace(
                stage=stage,
                ranks=ranks,
                layers=tuple(layers),
                dense=dense,
                expert=expert,
                groups=groups_of_rank,
                weights=storage_bytes(parameters),
                buffers=() if sharded else tuple(buffers_of(chunks)),
                units=tuple(one.facts for one in sharded),
                offloaded=sharding.offload,
                products_in_fp32=multiply_in_fp32(torch.empty(0, dtype=torch.bfloat16)),
                chunks=tuple(counts),
                boundary=_hidden_states(run).nbytes,
            )
    finally:
        groups.destroy()
        torch.set_rng_state(state)
        sys.excepthook = hook


@functools.cache
def share_of_tokens(run: Run, nodes: int) -> float:
    """Return the share of tokens that have an expert on a node, for experts that are spread evenly over the nodes.

    They are counted: the run's own choice, over random logits. Without groups the mean is 1 - C(E - E / nodes, K) /
    C(E, K). Call it without process groups.
    """
    options = MoEOptions.from_run(run)
    assert options is not None, "a model with experts"
    logits = torch.randn(_ROUTED_TOKENS, options.num_experts, generator=torch.Generator().manual_seed(0))
    scores, micro_batch = scores_from_logits(logits, options), MicroBatch(None, 1, training=False)
    expert_ids = chosen_experts(options, moe_groups(), logits, scores, None, micro_batch)
    node = expert_ids * nodes // options.num_experts
    return float(torch.zeros(_ROUTED_TOKENS, nodes).scatter_(1, node, 1.0).mean())


def _trace_chunk(
    run: Run,
    tracer: MetaTracer,
    chunk: torch.nn.Module,
    inner: Any,
    receives: int,
    gathering: Gathering,
    offload: ActivationOffload | None,
) -> ChunkTrace:
    start, calls, flops = tracer.live, len(tracer.collectives), tracer.flops
    tracer.restart_peak()
    shape = (run.training.micro_batch_size, run.model.seq_length // run.parallel.context_parallel_size)
    batch = [torch.empty(shape, dtype=torch.int64) for _ in range(3)]  # tokens, labels, positions
    mask = torch.empty(shape, dtype=torch.float32)
    given = None
    if not inner.pre_process:
        given = torch.cat([_hidden_states(run)] * receives).requires_grad_()
        inner.set_input_tensor(given)
    output = chunk(batch[0], batch[2], None, labels=batch[1])
    if inner.post_process:
        output = loss_func(mask, output)[0]
    inner.set_input_tensor(None)
    del batch, mask
    forward_peak = tracer.peak - start
    freed = 0
    if not inner.post_process and inner.config.deallocate_pipeline_outputs:
        freed = output.untyped_storage().nbytes()
    leaving = moved = 0
    if offload is not None:
        leaving, moved = offload.bytes_now()
    kept = tracer.live - start - freed - leaving
    tracer.peak = tracer.live
    output.backward(None if inner.post_process else torch.empty_like(output))
    gathering.end_backward()
    backward_peak = tracer.peak - start - freed
    peaks = tracer.label_peaks
    del output, given
    for parameter in chunk.parameters():
        parameter.grad = None
    return ChunkTrace(
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        logits=peaks["logits"],
        dispatch=peaks["dispatch"],
        flops=tracer.flops - flops,
        collectives=tuple(tracer.collectives[calls:]),
        leaving=leaving,
        moved=moved,
    )


def _hidden_states(run: Run) -> torch.Tensor:
    """Return an empty tensor like this rank's part [S, B, H] of the hidden states between two stages."""
    layout = run.parallel
    split = layout.context_parallel_size
    if layout.sequence_parallel:
        split *= layout.tensor_model_parallel_size
    dtype = residual_dtype(run.precision.fp32_residual_connection, getattr(torch, run.derived.params_dtype_name))
    shape = (run.model.seq_length // split, run.training.micro_batch_size, run.model.hidden_size)
    return torch.empty(shape, dtype=dtype, device=platform.device())


def _set_row_counts(
    run: Run, chunk: torch.nn.Module, tracer: MetaTracer, imbalance: float, sent_to_node: float
) -> None:
    """Give the dispatchers of a chunk the row counts that they would read from the device.

    sent_to_node: see `share_of_tokens`.
    """
    layout = run.parallel
    tokens = run.training.micro_batch_size * run.model.seq_length
    tokens //= layout.context_parallel_size * layout.tensor_model_parallel_size
    for layer in chunk.modules():
        if not isinstance(layer, MoELayer):
            continue
        dispatcher: Any = getattr(layer.dispatcher, "inner", layer.dispatcher)  # a padded one carries another
        ranks, ep = dispatcher.groups.expert.size(), dispatcher.groups.ep_size
        choices = tokens * run.moe.moe_router_topk
        factor = run.moe.moe_expert_capacity_factor or imbalance
        total = round(choices * min(1.0, factor))
        sent = [total // ep + (index < total % ep) for index in range(ep)]
        rows = min(round(choices / ep * min(imbalance, factor)), choices)
        instead: dict[str, Callable] = {}
        for name in ("dispatch", "combine"):
            instead[name] = tracer.labelled("dispatch")(getattr(dispatcher, name))
        if isinstance(dispatcher, ByNodeDispatcher):
            nodes, places = dispatcher.across.size(), dispatcher.inside.size()
            once = round(tokens * sent_to_node * min(1.0, factor))
            splits = NodeSplits(
                tokens_out=[once] * nodes,
                tokens_in=[min(round(once * imbalance), tokens)] * nodes,
                choices_out=[total // nodes] * nodes,
                choices_in=[rows * places] * nodes,
                copies_out=[rows * nodes] * places,
                copies_in=[rows * nodes] * places,
            )
            instead["node_splits"] = lambda *_, splits=splits: splits
        elif isinstance(dispatcher, AllToAllDispatcher):
            sent_to = [count for count in sent for _ in range(ranks // ep)]
            instead["splits"] = lambda *_, sent_to=sent_to, rows=rows, ranks=ranks: (sent_to, [rows] * ranks)
        else:
            here = rows * ranks if isinstance(dispatcher, AllGatherDispatcher) else sum(sent)
            instead["rows_here"] = lambda _, here=here: here
        vars(dispatcher).update(instead)
