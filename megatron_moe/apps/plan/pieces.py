"""What the parts of a model take, traced on models of three layers and put together for any layout.

A stage is its embedding, its layers and its loss, one after the other. Each is traced once for a way to cut layers
(`layouts.Width`) and a set of recomputed modules, in the stages Et|t|tL of a pipeline; embedding, loss and multi-token
prediction are what the first and the last of these have more than the one between. What a part keeps adds up over a
stage, and the peak of a pass is that of one part above what those before it keep.

Two exactnesses: `approximate` adds what single modules save, each traced once for a TP and an expert-TP; `exact` traces
the set itself. An interval of `--recompute-num-layers` is taken for 1, and modules that are named by their layer
(`--keep-fp32`, `--freeze-parameters`) are not found in three layers: what is chosen is traced as a whole in any case.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.apps.plan.gathering import GatheredUnit
from megatron_moe.apps.plan.layouts import FULL, Layout, Width, recomputing, widths
from megatron_moe.apps.plan.neighbours import Machine, vocabulary
from megatron_moe.apps.plan.tracing import Buffer, ChunkTrace, RankTrace, trace_stage
from megatron_moe.apps.plan.traffic import purpose, sent_by_a_rank
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel.quantization import Segments

BufferKind = tuple[bool, int, int]
"""Whether of experts, bytes of a parameter, bytes of a gradient."""

EMBEDDING, DENSE, MOE, PREDICTION, LOSS = "E", "d", "e", "m", "L"
"""Kinds of parts: of layers the dense and those with experts."""

_LEAST_OF_BACKWARD = 0.8
"""Of a layer's peak in the backward pass, what is left with any recomputation: a layer is recomputed as a whole then."""


@dataclass(frozen=True)
class Piece:
    """One part of a model on one rank over one micro-batch; bytes above what was live before its forward pass.

    kept, forward, backward, logits, dispatch, flops: as in `ChunkTrace`. tensor_seconds, expert_seconds: of collectives
    of TP and CP, and of EP. elements: of gradient buffers, by kind. weights: bytes. units: of a fully sharded model.
    boundary: bytes of the hidden states between stages.
    """

    kept: float
    forward: float
    backward: float
    logits: int
    dispatch: int
    flops: float
    tensor_seconds: float
    expert_seconds: float
    weights: int
    elements: Counter[BufferKind] = field(compare=False)
    units: Counter[GatheredUnit] = field(compare=False)
    boundary: int = 0
    offloaded: bool = False

    def beyond(self, other: Piece) -> Piece:
        """Return what a stage has more than another one, as a part that follows it."""
        return Piece(
            kept=self.kept - other.kept,
            forward=self.forward - other.kept,
            backward=self.backward - other.kept,
            logits=self.logits,
            dispatch=0,
            flops=self.flops - other.flops,
            tensor_seconds=max(self.tensor_seconds - other.tensor_seconds, 0.0),
            expert_seconds=max(self.expert_seconds - other.expert_seconds, 0.0),
            weights=self.weights - other.weights,
            elements=self.elements - other.elements,
            units=self.units - other.units,
            boundary=self.boundary,
            offloaded=self.offloaded,
        )


class Pieces:
    """The parts of one run's model on some machines, traced when they are asked for."""

    def __init__(self, run: Run, world_size: int, machine: Machine) -> None:
        self._run, self._world_size, self._machine = run, world_size, machine
        self.traced = 0
        self._stage = functools.cache(self._trace)
        self.exact = functools.cache(self._exact)
        self.approximate = functools.cache(self._approximate)
        self._reference: dict[tuple[int, int], Width] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the model's layers, the last layer's first."""
        pattern = self._run.derived.moe_layer_pattern
        return tuple(dict.fromkeys(MOE if one else DENSE for one in reversed(pattern)))

    def widths(self) -> list[Width]:
        """Return the ways to cut layers that the rules allow."""
        return widths(self._run, self._world_size, self._machine)

    def count(self, kind: str) -> int:
        """Return how many layers of a kind the model has."""
        return [MOE if one else DENSE for one in self._run.derived.moe_layer_pattern].count(kind)

    def parts(self, stage: Any) -> tuple[str, ...]:
        """Return the kinds of a stage's parts, in their order."""
        pattern = self._run.derived.moe_layer_pattern
        layers = [MOE if pattern[layer] else DENSE for layer in stage.layers]
        return (EMBEDDING,) * stage.embedding + (*layers,) + (PREDICTION,) * bool(stage.predictions) + (LOSS,) * stage.loss

    # One part.

    def _trace(self, width: Width, zero: int, offload: bool, modules: tuple[str, ...] | None, kind: str, at: int) -> Piece:
        """Trace a stage of Et|t|tL whose layers are of one kind; place 3 is the last one, with its predictions."""
        self.traced += 1
        base, stages = self._run, 3
        changes: dict[str, Any] = {
            **width.changes,
            "num_layers": stages,
            "pipeline_model_parallel_size": stages,
            "pipeline_model_parallel_layout": None,
            "decoder_first_pipeline_num_layers": None,
            "decoder_last_pipeline_num_layers": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "num_virtual_stages_per_pipeline_rank": None,
            "mtp_num_layers": base.model.mtp_num_layers if at == stages else None,
            "global_batch_size": None,
            "first_last_layers_bf16": False,
            "optimizer_cpu_offload": offload,
        }
        if base.moe.num_experts is not None:
            changes["moe_layer_freq"] = f"[{int(kind == MOE)}]*{stages}"
        if modules is not None:
            changes |= recomputing(modules)
        elif base.training.recompute_granularity == "full":
            changes |= {"recompute_num_layers": 1}
        ranks = math.lcm(width.tp * base.parallel.context_parallel_size, width.etp * width.ep)
        if zero < 2 <= base.derived.zero_stage:
            changes |= {"data_parallel_sharding_strategy": "optim", "use_torch_fsdp2": False}
            changes |= {"zero_quantized_weights": False, "zero_quantized_gradients": None}
            changes |= {"zero_hpz_partition_size": None}
        elif zero >= 2:
            changes["data_parallel_sharding_strategy"] = ("optim_grads", "optim_grads_params")[zero - 2]
            ranks = self._world_size  # shards of as many ranks
        run, on = replace(base, **changes), self._machine
        size = run.derived.padded_vocab_size(vocabulary(base)) if base.model.padded_vocab_size is None else vocabulary(run)
        trace = trace_stage(
            run, stages * ranks, size, min(at, stages - 1), on.device, on.imbalance, on.gpus_per_node
        )
        return self._piece(trace)

    def _piece(self, trace: RankTrace) -> Piece:
        (chunk,) = trace.chunks
        elements: Counter[BufferKind] = Counter()
        for buffer in trace.buffers:
            elements[buffer.expert, buffer.parameter_bytes, buffer.gradient_bytes] += buffer.used
        seconds = {"EP": 0.0, "": 0.0}
        for call in chunk.forward + chunk.backward:
            if call.kind != "broadcast":
                name = purpose(call.kind, call.ranks, trace)
                ranks = tuple(rank - trace.ranks.start for rank in call.ranks)
                seconds[name if name == "EP" else ""] += self.seconds(call.kind, ranks, call.bytes)
        return Piece(
            kept=chunk.kept,
            forward=chunk.forward_peak,
            backward=chunk.backward_peak,
            logits=chunk.logits,
            dispatch=chunk.dispatch,
            flops=chunk.flops,
            tensor_seconds=seconds[""],
            expert_seconds=seconds["EP"],
            weights=trace.weights,
            elements=elements,
            units=Counter(trace.units),
            boundary=trace.boundary,
            offloaded=trace.offloaded,
        )

    def seconds(self, kind: str, ranks: tuple[int, ...], size: float) -> float:
        """Return the seconds of a collective: what goes to the same machine, and what goes to others after it."""
        sent = sent_by_a_rank(kind, ranks, size, self._machine.gpus_per_node)
        return self.sending_seconds(sent.sent, sent.between_nodes)

    def sending_seconds(self, sent: float, between_nodes: float) -> float:
        """Return the seconds in which a rank sends so many bytes, some of them to other machines."""
        on = self._machine
        return ((sent - between_nodes) / on.node_bandwidth + between_nodes / on.network_bandwidth) / 1e9

    def _exact(self, width: Width, zero: int, offload: bool, modules: tuple[str, ...] | None, part: str) -> Piece:
        """Return a part with a set of modules recomputed; None: those of the run."""
        sharding = (zero, offload) if zero >= 2 else (1, False)
        if part in (DENSE, MOE):
            return self._stage(width, *sharding, modules, part, 1)
        kind = self.kinds[0]
        if part == PREDICTION:
            return self._stage(width, *sharding, modules, kind, 3).beyond(self._stage(width, *sharding, modules, kind, 2))
        if zero < 2:  # alike for all that is left
            width = self.reference(width)
            modules = () if modules is not None else None
        layer = self._stage(width, *sharding, modules, kind, 1)
        other = self._stage(width, *sharding, modules, kind, 0 if part == EMBEDDING else 2)
        found = other.beyond(layer)
        if part == EMBEDDING:
            # It comes before the layer, not after it: of its own it has the gradient of the table.
            table = sum(count * size for (_, size, _), count in found.elements.items()) + 3 * _gathered(found)
            found = dataclasses.replace(found, forward=max(found.kept, 0), backward=max(found.kept, 0) + table)
        return found

    def reference(self, width: Width) -> Width:
        """Return the width whose traces serve for every EP next to a TP and an expert-TP."""
        return self._reference.setdefault((width.tp, width.etp), width)

    def _approximate(self, width: Width, modules: tuple[str, ...] | None, part: str) -> Piece:
        """Return a part from what single modules save at another EP: a bit less than what it takes at its peaks."""
        if modules is None:
            return self.exact(width, 1, False, modules, part)
        plain = self.exact(width, 1, False, (), part)
        kind = self.kinds[0] if part == PREDICTION else part
        if kind not in (DENSE, MOE) or not modules:
            return plain
        at = self.reference(width)
        before = self.exact(at, 1, False, (), kind)
        kept, flops, tensor, expert = 0.0, 0.0, 0.0, 0.0
        for names in ([FULL] if modules == FULL else [(name,) for name in modules]):
            after = self.exact(at, 1, False, names, kind)
            kept, flops = kept + after.kept - before.kept, flops + after.flops - before.flops
            tensor += after.tensor_seconds - before.tensor_seconds
            expert += after.expert_seconds - before.expert_seconds
        least = 0.01 * before.kept
        return dataclasses.replace(
            plain,
            kept=max(plain.kept + kept, least),
            forward=max(plain.forward + kept, least),
            backward=_LEAST_OF_BACKWARD * plain.backward,
            flops=plain.flops + flops,
            tensor_seconds=plain.tensor_seconds * (1 + tensor / max(before.tensor_seconds, 1e-30)),
            expert_seconds=plain.expert_seconds * (1 + expert / max(before.expert_seconds, 1e-30)),
        )

    # A stage.

    def of_stage(self, layout: Layout, modules: tuple[str, ...] | None, stage: Any, exact: bool) -> list[tuple[str, Piece]]:
        """Return the parts of one stage with their kinds."""
        found = []
        for part in self.parts(stage):
            if exact:
                found.append((part, self.exact(layout.width, layout.zero, layout.offload, modules, part)))
            else:
                found.append((part, self.approximate(layout.width, modules, part)))
        return found

    def rank_trace(
        self, layout: Layout, modules: tuple[str, ...] | None, rank: int, exact: bool, passes: bool = True
    ) -> RankTrace:
        """Return the trace of a pipeline rank, put together; without the passes, only what it holds and sends."""
        chunks = [self.of_stage(layout, modules, stage, exact) for stage in layout.stages[rank :: layout.pp]]
        pieces = [piece for chunk in chunks for _, piece in chunk]
        elements: Counter[BufferKind] = Counter()
        for piece in pieces:
            elements += piece.elements
        parts = {part for chunk in chunks for part, _ in chunk}
        weights = sum(piece.weights for piece in pieces)
        again = self._table_again(layout, parts)
        if again:
            of_table = max((kind for kind in elements if not kind[0]), key=elements.__getitem__)
            elements[of_table] -= again
            weights -= again * of_table[1]
        per_stage = self._world_size // layout.pp
        units: Counter[GatheredUnit] = Counter()
        for piece in pieces:
            units += piece.units
        sharded = layout.zero >= 2
        return RankTrace(
            stage=rank,
            ranks=range(rank * per_stage, (rank + 1) * per_stage),
            layers=(),
            dense=0,
            expert=0,
            whole={},
            groups={},
            weights=weights,
            buffers=() if sharded else tuple(self._buffers(layout, elements)),
            units=(tuple(units.elements()) if exact else tuple(self._units(layout, elements))) if sharded else (),
            offloaded=layout.offload and self._machine.device != "cpu",
            chunks=tuple(_chunk(chunk, layout.zero, exact) if passes else _NOTHING for chunk in chunks),
            boundary=pieces[0].boundary,
        )

    def _table_again(self, layout: Layout, parts: set[str]) -> int:
        """Return the elements of a table that two parts share where one rank has both."""
        model = self._run.model
        last = PREDICTION in parts or (LOSS in parts and not model.untie_embeddings_and_output_weights)
        if EMBEDDING not in parts or not last or layout.zero >= 2:
            return 0
        return vocabulary(self._run) // layout.width.tp * model.hidden_size

    def _groups(self, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first stage's ranks that share the first rank's dense weights, and those with its experts."""
        per_stage, width = self._world_size // layout.pp, layout.width
        return tuple(range(0, per_stage, width.tp)), tuple(range(0, per_stage, width.etp * width.ep))

    def _buffers(self, layout: Layout, elements: Counter[BufferKind]) -> Iterable[Buffer]:
        dense, expert = self._groups(layout)
        for (of_experts, parameter, gradient), count in elements.items():
            yield Buffer(count, count, parameter, gradient, expert if of_experts else dense, of_experts)

    def _units(self, layout: Layout, elements: Counter[BufferKind]) -> Iterable[GatheredUnit]:
        """Yield all layers' shards as one unit for each kind."""
        on_machine = self._machine.gpus_per_node
        for (of_experts, size, _), count in elements.items():
            ranks = self._groups(layout)[of_experts]
            share = -(-count // len(ranks))
            near = sum(rank < on_machine for rank in ranks)
            yield GatheredUnit(Segments((share,), (True,)), size, ranks, near, of_experts, False, False)


_NOTHING = ChunkTrace(0, 0, 0, 0, 0, 0, (), ())


def _chunk(pieces: list[tuple[str, Piece]], zero: int, exact: bool) -> ChunkTrace:
    """Return the trace of a stage from those of its parts, in the order in which they compute."""
    below = forward = backward = 0.0
    if zero >= 2 and exact:
        # The root is gathered as a whole, with what its last part has.
        below += sum(_gathered(piece, of_root=True) for part, piece in pieces if part == LOSS)
    for index, (part, piece) in enumerate(pieces):
        own = piece.kept
        at_forward = at_backward = 0.0
        if zero >= 2 and exact:
            own -= _gathered(piece, of_root=True) if part == LOSS else 0
            at_backward = _dense(pieces[index - 1][1]) if index else 0.0
        elif zero >= 2:
            at_forward = sum(size * count for (_, size, _), count in piece.elements.items())
            at_backward = 2.0 * at_forward
            own += at_forward if zero == 2 or part not in (DENSE, MOE) else 0
        forward = max(forward, below + piece.forward + at_forward)
        backward = max(backward, below + piece.backward + at_backward)
        below += own
    return ChunkTrace(
        kept=round(max(below, 0)),
        forward_peak=round(max(forward, below)),
        backward_peak=round(max(backward, below)),
        logits=max((piece.logits for _, piece in pieces), default=0),
        dispatch=max((piece.dispatch for _, piece in pieces), default=0),
        flops=round(sum(piece.flops for _, piece in pieces)),
        forward=(),
        backward=(),
    )


def _gathered(piece: Piece, of_root: bool = False) -> int:
    """Return the bytes of a part's gathered weights, or of those that are gathered with the root."""
    units = (unit for unit in piece.units.elements() if unit.is_root or not of_root)
    return sum(unit.share * len(unit.ranks) * unit.parameter_bytes for unit in units)


def _dense(piece: Piece) -> int:
    """Return the bytes of a part's gathered weights outside its experts, which come about first in a backward pass."""
    return sum(
        unit.share * len(unit.ranks) * unit.parameter_bytes
        for unit in piece.units.elements()
        if not unit.expert and not unit.is_root
    )
