"""What the parts of a model take, traced on models of three layers and put together for any layout: memory and time.

A stage is its embedding, its layers and its loss, one after the other. Each is traced once for a `LayerSharding` and a
set of recomputed modules, in the stages Et|t|tL of a pipeline; embedding, loss and multi-token prediction are what the
first and the last of these have more than the one between. What a part keeps adds up over a stage, and the peak of a
pass is that of one part above what those before it keep.

What recomputation and offload change is traced at one EP for a TP and an expert-TP. What a fully sharded model gathers
is added from the sizes of its weights. An interval of `--recompute-num-layers` is taken for 1, and modules that are
named by their layer (`--keep-fp32`, `--freeze`) are not found in three layers: what is chosen is traced as a whole in
any case.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_moe.config.pipeline_layout import Stage
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel.quantized_collectives import Segments
from megatron_moe_tools.plan.buffers import Buffer, GatheredUnit
from megatron_moe_tools.plan.layouts import (
    SEPARATE,
    TO_HOST,
    UNSHARDED,
    UNSPLIT,
    LayerSharding,
    Machine,
    Modules,
    SearchedLayout,
    layer_shardings,
    recomputing,
    vocabulary,
)
from megatron_moe_tools.plan.plan import (
    muon_flops,
    purpose,
    rank_memory,
    rank_traffic,
    sending_seconds,
    sent_by_a_rank,
)
from megatron_moe_tools.plan.tracing import ChunkTrace, RankTrace, trace_stage


class BufferKind(NamedTuple):
    """What the elements of a gradient buffer have in common.

    rate: FLOPs of a step of Muon's iteration over elements; 0: Muon does not update them.
    """

    expert: bool
    parameter_bytes: int
    gradient_bytes: int
    rate: float


EMBEDDING, DENSE, MOE, PREDICTION, LOSS = "E", "d", "e", "m", "L"
"""Kinds of parts: of layers the dense and those with experts."""
WINDOW = "w"
"""What follows the kind of a layer that attends to a window."""

_CHANGED = ("kept", "forward_peak", "backward_peak", "flops", "leaving", "moved")
"""What recomputation and offload change of a layer."""
_WITHOUT = {
    DENSE: ("moe", "moe_act", "shared_experts", f"{TO_HOST}expert_fc1", f"{TO_HOST}moe_act"),
    MOE: ("mlp",),
}
"""The modules that a kind of layer does not have; the other kinds of parts have none."""


@dataclass(frozen=True, kw_only=True)
class TracedPart(ChunkTrace):
    """One part of a model on one rank over one micro-batch, without its collectives.

    tensor_seconds, expert_seconds: of collectives of TP and CP, and of EP. elements: of gradient buffers, by kind.
    weights: bytes. boundary: bytes of the hidden states between stages. is_layer: whether it is a layer of the decoder.
    """

    tensor_seconds: float
    expert_seconds: float
    weights: int
    elements: Counter[BufferKind]
    boundary: int
    is_layer: bool = True

    def beyond(self, other: TracedPart) -> TracedPart:
        """Return what a stage has more than another one, as a part that follows it."""
        return dataclasses.replace(
            self,
            kept=self.kept - other.kept,
            forward_peak=self.forward_peak - other.kept,
            backward_peak=self.backward_peak - other.kept,
            dispatch=0,
            flops=self.flops - other.flops,
            leaving=0,
            moved=0,
            tensor_seconds=max(self.tensor_seconds - other.tensor_seconds, 0.0),
            expert_seconds=max(self.expert_seconds - other.expert_seconds, 0.0),
            weights=self.weights - other.weights,
            elements=self.elements - other.elements,
            is_layer=False,
        )

    @property
    def gathered_bytes(self) -> int:
        """Bytes of its weights while they are gathered."""
        return sum(kind.parameter_bytes * count for kind, count in self.elements.items())


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they go to; each adds to the step.

    compute: products of the model at the assumed share of the peak, the latents that every CP rank expands included.
    recomputed: those of recomputation, and the memory that is written again. tensor, expert: collectives of TP and CP,
    and of EP, of all micro-batches. pipeline: messages between stages. bubble: waiting at both ends of a step. data:
    what data parallelism sends, as far as nothing hides it. muon: its exchange, and its iteration at the same share of
    the peak. host: what is exchanged with the machine's memory, activations as far as no pass hides them.
    """

    compute: float
    recomputed: float
    tensor: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    muon: float
    host: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(vars(self).values())


class LayerCosts:
    """One run's model on some machines: its parts, traced when they are asked for, and what layouts of it take."""

    def __init__(self, run: Run, world_size: int, machine: Machine) -> None:
        self._run, self._world_size, self._machine = run, world_size, machine
        self._stage = functools.cache(self._trace)
        self.part = functools.cache(self._part)
        self._chunk = functools.cache(self._put_together)
        self.run_of = functools.cache(lambda layout: layout.run(run, None))
        """The run in a layout: what is recomputed makes no difference to what is read of it here."""
        self._layers = []
        for has_experts, window in zip(run.derived.moe_layer_pattern, run.derived.window_pattern):
            self._layers.append((MOE if has_experts else DENSE) + WINDOW * window)
        self.kinds = tuple(dict.fromkeys(reversed(self._layers)))
        """The kinds of the model's layers, the last layer's first."""
        self.shardings = layer_shardings(run, world_size, machine)
        # The more EP, the less of a peak is the gradient of the experts' weights.
        by_size = sorted(self.shardings, key=lambda one: (one.ep, -one.etp))
        self._of_experts: dict[tuple[int, int], LayerSharding] = {}
        self._of_the_rest: dict[int, LayerSharding] = {}
        for sharding in by_size:
            self._of_experts[sharding.tp, sharding.etp] = self._of_the_rest[sharding.tp] = sharding

    def count(self, kind: str) -> int:
        """Return how many layers of a kind the model has."""
        return self._layers.count(kind)

    def _parts(self, stage: Stage) -> tuple[str, ...]:
        """Return the kinds of a stage's parts, in their order."""
        parts = self._layers[stage.layers.start : stage.layers.stop]
        if stage.embedding:
            parts = [EMBEDDING, *parts]
        if stage.loss:
            parts = [*parts, LOSS]
        if stage.predictions:
            parts = [*parts, PREDICTION]  # after the loss, as what a stage has with both beyond one
        return tuple(parts)

    def reference(self, sharding: LayerSharding, kind: str = MOE) -> LayerSharding:
        """Return the sharding whose recomputation is traced for all like it: for experts with any EP, else any."""
        if kind.startswith(MOE):
            return self._of_experts[sharding.tp, sharding.etp]
        return self._of_the_rest[sharding.tp]

    # One part.

    def _trace(self, sharding: LayerSharding, modules: Modules, kind: str, at: int) -> TracedPart:
        """Trace a stage of Et|t|tL whose layers are of one kind; place 3 is the last one with its predictions."""
        base, stages = self._run, 3
        changes: dict[str, Any] = {
            **sharding.changes,
            **UNSPLIT,
            **SEPARATE,
            "num_layers": stages,
            "pipeline_model_parallel_size": stages,
            "mtp_num_layers": base.model.mtp_num_layers if at == stages else None,
            "global_batch_size": None,
            "first_last_layers_bf16": False,
            "optimizer_cpu_offload": False,
            "window_size": base.model.window_size if kind.endswith(WINDOW) else None,
            "window_attn_skip_freq": None,
        }
        if base.derived.zero_stage >= 2:
            changes |= {"data_parallel_sharding_strategy": "optim", **UNSHARDED}
        if base.moe.num_experts is not None:
            changes["moe_layer_freq"] = f"[{int(kind.startswith(MOE))}]*{stages}"
        if modules is not None:
            changes |= recomputing(modules)
        elif base.training.recompute_granularity == "full":
            changes |= {"recompute_num_layers": 1}
        ranks = math.lcm(sharding.tp * base.parallel.context_parallel_size, sharding.etp * sharding.ep)
        run, on = replace(base, **changes), self._machine
        at = min(at, stages - 1)
        attended = on.attended_share(run.model.seq_length)
        on_machine = (on.device, on.imbalance, on.gpus_per_node, attended)
        trace = trace_stage(run, stages * ranks, vocabulary(run), at, *on_machine)
        (chunk,) = trace.chunks
        elements: Counter[BufferKind] = Counter()
        for buffer in trace.buffers:
            rates: Counter[float] = Counter()
            if self._run.optimizer.optimizer == "muon":
                rates.update(buffer.rates)
            rates[0.0] += buffer.used - rates.total()
            for rate, count in rates.items():
                elements[BufferKind(buffer.expert, buffer.parameter_bytes, buffer.gradient_bytes, rate)] += count
        tensor_seconds = expert_seconds = 0.0
        for call in chunk.collectives:
            if call.kind == "broadcast":
                continue
            seconds = sending_seconds(sent_by_a_rank(call.kind, call.ranks, call.bytes, on.gpus_per_node), on)
            if purpose(call.kind, call.ranks, trace) == "EP":
                expert_seconds += seconds
            else:
                tensor_seconds += seconds
        return TracedPart(
            **{**vars(chunk), "collectives": ()},
            tensor_seconds=tensor_seconds,
            expert_seconds=expert_seconds,
            weights=trace.weights,
            elements=elements,
            boundary=trace.boundary,
        )

    def plain(self, sharding: LayerSharding, modules: Modules, part: str) -> TracedPart:
        """Return a part as it is traced: without recomputation, or with the user's, where `modules` is None."""
        if modules is not None:
            modules = ()
        kind = self.kinds[0]
        if not (kind if part == PREDICTION else part).startswith(MOE):  # what has no experts is alike for any EP
            sharding = self.reference(sharding, part)
        if part.startswith((MOE, DENSE)):
            return self._stage(sharding, modules, part, 1)
        if part == PREDICTION:
            return self._stage(sharding, modules, kind, 3).beyond(self._stage(sharding, modules, kind, 2))
        layer = self._stage(sharding, modules, kind, 1)
        if part == LOSS:
            return self._stage(sharding, modules, kind, 2).beyond(layer)
        found = self._stage(sharding, modules, kind, 0).beyond(layer)
        # The embedding comes before the layer, not after it: of its own it has the gradient of the table.
        return dataclasses.replace(found, forward_peak=found.kept, backward_peak=found.kept + found.gathered_bytes)

    def _part(self, sharding: LayerSharding, modules: Modules, part: str) -> TracedPart:
        """Return a part with a set of modules recomputed: without them, and what they change at another EP."""
        plain = self.plain(sharding, modules, part)
        kind = self.kinds[0] if part == PREDICTION else part
        missing = _WITHOUT.get(kind.removesuffix(WINDOW), modules or ())
        modules = tuple(name for name in modules or () if name not in missing)
        if not modules:
            return plain
        at = self.reference(sharding, kind)
        before, after = self._stage(at, (), kind, 1), self._stage(at, modules, kind, 1)
        found = {}
        for name in _CHANGED:
            found[name] = getattr(plain, name) + getattr(after, name) - getattr(before, name)
        for name in ("tensor_seconds", "expert_seconds"):  # collectives are repeated, whatever they take here
            found[name] = getattr(plain, name)
            if getattr(before, name):
                found[name] *= getattr(after, name) / getattr(before, name)
        return dataclasses.replace(plain, **found)

    # A stage.

    def ranks_that_differ(self, layout: SearchedLayout) -> list[int]:
        """Return the first pipeline rank of each kind, by its parts: it has the most micro-batches in flight."""
        seen: dict[tuple, int] = {}
        for rank in range(layout.pp):
            seen.setdefault(tuple(map(self._parts, layout.stages[rank :: layout.pp])), rank)
        return list(seen.values())

    def _put_together(
        self, sharding: LayerSharding, modules: Modules, zero: int, kinds: tuple[str, ...]
    ) -> tuple[ChunkTrace, Counter[BufferKind], int]:
        """Put a stage together from its parts, in the order in which they compute.

        A fully sharded model gathers each layer's weights for both passes; in the backward pass the next layer's are on
        the way, and gradients are summed in fp32. The weights of all other parts are the root's, and stay gathered.

        Returns:
            The passes, elements of gradient buffers by kind, bytes of weights.
        """
        parts = [self.part(sharding, modules, kind) for kind in kinds]
        elements: Counter[BufferKind] = Counter()
        root = logits = dispatch = weights = 0
        flops: float = 0
        moved: float = 0
        for part in parts:
            elements.update(part.elements)
            logits, dispatch = max(logits, part.logits), max(dispatch, part.dispatch)
            flops += part.flops
            moved += part.moved
            weights += part.weights
            if zero >= 2 and not part.is_layer:
                root += part.gathered_bytes
        below, forward, backward = float(root), float(2 * root), float(3 * root)
        before = 0.0  # what is offloaded of the layer before, which comes back while this one is in its backward pass
        leaving = 0.0  # of the last layer that offloads
        for part in parts:
            own = 0
            if zero >= 2 and part.is_layer:
                own = part.gathered_bytes
            forward = max(forward, below + part.forward_peak + own)
            backward = max(backward, below + part.backward_peak + 2 * own + before)
            below += part.kept
            if zero == 2:
                below += own
            before, leaving = part.leaving, part.leaving or leaving
        trace = ChunkTrace(
            kept=round(max(below, 0)),
            forward_peak=round(max(forward, below)),
            backward_peak=round(max(backward, below)),
            logits=logits,
            dispatch=dispatch,
            flops=round(flops),
            collectives=(),
            leaving=round(leaving),
            moved=round(moved),
        )
        return trace, elements, weights

    def rank_trace(self, layout: SearchedLayout, modules: Modules, rank: int, passes: bool = True) -> RankTrace:
        """Return the trace of a pipeline rank, put together; without the passes, only what it holds and sends."""
        sharding, model = layout.sharding, self._run.model
        chunks: list[ChunkTrace] = []
        elements: Counter[BufferKind] = Counter()
        kinds: list[str] = []
        weights = 0
        for stage in layout.stages[rank :: layout.pp]:
            kinds += self._parts(stage)
            chunk, own, size = self._chunk(sharding, modules, layout.zero, self._parts(stage))
            chunks.append(chunk if passes else _NOTHING)
            elements.update(own)
            weights += size
        last = PREDICTION in kinds or (LOSS in kinds and not model.untie_embeddings_and_output_weights)
        if EMBEDDING in kinds and last:  # one rank has both ends of the model, which share the table
            shared = vocabulary(self._run) // sharding.tp * model.hidden_size
            of_table = max((one for one in elements if not (one.expert or one.rate)), key=elements.__getitem__)
            elements[of_table] -= shared
            weights -= shared * of_table.parameter_bytes
        per_stage = self._world_size // layout.pp
        buffers, units = [], []
        for kind, count in elements.items():
            # The ranks that share the first rank's dense weights, or its experts, counted from it on.
            ranks = tuple(range(0, per_stage, sharding.etp * sharding.ep if kind.expert else sharding.tp))
            share = -(-count // len(ranks))
            rates, fewest = {}, 0
            if kind.rate:
                rates, fewest = {kind.rate: count}, count // len(ranks)
            if layout.zero >= 2:  # all layers' shards as one unit for each kind
                unit = GatheredUnit(
                    segments=Segments((share,), (True,)),
                    parameter_bytes=kind.parameter_bytes,
                    ranks=ranks,
                    neighbours=bisect.bisect_left(ranks, self._machine.gpus_per_node),
                    expert=kind.expert,
                    rates=dict.fromkeys(rates, share),
                )
                units.append(unit)
                continue
            buffer = Buffer(
                numel=count,
                used=count,
                rates=rates,
                fewest_matrices=fewest,
                parameter_bytes=kind.parameter_bytes,
                gradient_bytes=kind.gradient_bytes,
                ranks=ranks,
                expert=kind.expert,
            )
            buffers.append(buffer)
        return RankTrace(
            stage=rank,
            ranks=range(rank * per_stage, (rank + 1) * per_stage),
            weights=weights,
            buffers=tuple(buffers),
            units=tuple(units),
            offloaded=layout.offload and self._machine.device != "cpu",
            chunks=tuple(chunks),
            boundary=self.part(sharding, modules, kinds[0]).boundary,
        )

    # Time.

    def step_time(self, layout: SearchedLayout, modules: Modules) -> StepTime:
        """Return the time of a step, that of the slowest pipeline rank."""
        run, on = self.run_of(layout), self._machine
        micro_batches = run.derived.num_microbatches(self._world_size)
        slowest: dict[str, float] = {}  # the seconds of a micro-batch's passes
        sharing = muon = host = 0.0
        for rank in self.ranks_that_differ(layout):
            trace = self.rank_trace(layout, modules, rank, passes=False)
            sending = {}
            for name, sent in rank_traffic(run, trace, self._world_size, on.gpus_per_node).items():
                sending[name] = sending_seconds(sent, on)
            compute = again = tensor = expert = moved = waiting = 0.0
            for kind in itertools.chain(*map(self._parts, layout.stages[rank :: layout.pp])):
                part = self.part(layout.sharding, modules, kind)
                plain = self.plain(layout.sharding, (), kind)
                compute += self.compute_seconds(plain.flops)
                again += self.compute_seconds(part.flops - plain.flops)
                again += self.rewriting(plain.kept - part.kept - part.leaving)
                tensor += part.tensor_seconds
                expert += part.expert_seconds
                moved += part.leaving
                waiting = max(waiting, part.leaving)
            if run.moe.overlap_moe_expert_parallel_comm:
                expert = max(expert - compute - again, 0.0)
            on_host = self.moving(moved, compute + again)
            if layout.pp > 1:  # another micro-batch's pass comes between, and hides nothing of the last layer's
                on_host += waiting / (on.host_bandwidth * 1e9)
            passes = {"compute": compute, "recomputed": max(again, 0.0), "tensor": tensor, "expert": expert}
            passes |= {"host": on_host, "pipeline": sending.pop("PP", 0.0) / micro_batches}
            if not slowest or sum(passes.values()) > sum(slowest.values()):
                slowest = passes
            muon = max(muon, sending.pop("Muon", 0.0) + self.compute_seconds(muon_flops(run, trace)))
            sharing = max(sharing, sum(sending.values()))
            if trace.offloaded:
                # Moments go there and back; weights are gathered twice from fp32 shards, and gradients come back once.
                moved = 2 * rank_memory(run, trace, self._world_size).host
                moved += micro_batches * 12 * sum(unit.share for unit in trace.units)
                host = max(host, moved / (on.host_bandwidth * 1e9))
        # Data parallelism is behind the products of the passes, if its flags let it.
        hidden = slowest["compute"] + slowest["recomputed"]
        if run.derived.zero_stage >= 2:
            hidden *= micro_batches
        else:
            hidden *= 2 / 3 * run.parallel.overlap_grad_reduce + 1 / 3 * run.parallel.overlap_param_gather
        of_step = {name: seconds * micro_batches for name, seconds in slowest.items()}
        of_step["host"] += host
        return StepTime(
            **of_step,
            bubble=(layout.pp - 1) / (len(layout.stages) // layout.pp) * sum(slowest.values()),
            data=max(sharing - hidden, 0.0),
            muon=muon,
        )

    def compute_seconds(self, flops: float) -> float:
        """Return the seconds of so many FLOPs."""
        return flops / (self._machine.mfu * self._machine.peak_tflops * 1e12)

    def moving(self, size: float, products: float) -> float:
        """Return the seconds that offloaded activations add to a pass with these products.

        The device's memory is read and written for them. They are hidden behind a third of the products on the way to
        the host, and behind the others on the way back.
        """
        seconds = size / (self._machine.host_bandwidth * 1e9)
        return self.rewriting(size) + max(seconds - products / 3, 0.0) + max(seconds - products * 2 / 3, 0.0)

    def rewriting(self, size: float) -> float:
        """Return the seconds in which what was not kept is written and read once more."""
        return 2 * max(size, 0.0) / (self._machine.memory_bandwidth * 1e9)


_NOTHING = ChunkTrace(0, 0, 0, 0, 0, 0, ())
