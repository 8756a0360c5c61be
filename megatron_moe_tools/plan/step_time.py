"""The time of a training step in a layout: arithmetic on the traced parts of a model and on the speed of links."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_moe.config.schema import Run
from megatron_moe_tools.plan import orthogonalization
from megatron_moe_tools.plan.layouts import Modules, SearchedLayout
from megatron_moe_tools.plan.neighbours import Machine
from megatron_moe_tools.plan.pieces import Pieces
from megatron_moe_tools.plan.plan import rank_memory
from megatron_moe_tools.plan.tracing import RankTrace
from megatron_moe_tools.plan.traffic import rank_traffic


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they go to; each adds to the step.

    compute: products of the model at the assumed share of the peak. recomputed: those that are computed again, and the
    memory that is written again. tensor, expert: collectives of TP and CP, and of EP, of all micro-batches. pipeline:
    messages between stages. bubble: waiting at both ends of a step. data: what data parallelism sends, as far as
    nothing hides it. muon: its exchange, and its iteration at the same share of the peak. host: what is exchanged with
    the machine's memory, activations as far as no pass hides them.
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


class StepTimes:
    """The times of one run's layouts."""

    def __init__(self, run: Run, world_size: int, machine: Machine, pieces: Pieces) -> None:
        self.run, self.world_size, self.machine, self.pieces = run, world_size, machine, pieces
        self.run_of = functools.cache(lambda layout: layout.run(run, None))
        """The run in a layout: what is recomputed makes no difference to what is read of it here."""

    def of(self, layout: SearchedLayout, modules: Modules) -> StepTime:
        """Return the time of a step, that of the slowest pipeline rank."""
        run = self.run_of(layout)
        micro_batches = run.derived.num_microbatches(self.world_size)
        found, sharing, muon, host = [], 0.0, 0.0, 0.0
        for rank in self.pieces.ranks_that_differ(layout):
            passes = self._passes(layout, modules, rank)
            trace = self.pieces.rank_trace(layout, modules, rank, passes=False)
            sent = rank_traffic(run, trace, self.world_size, self.machine.gpus_per_node)
            seconds = {name: self.pieces.sending_seconds(one.sent, one.between_nodes) for name, one in sent.items()}
            passes["pipeline"] = seconds.pop("PP", 0.0) / micro_batches
            found.append(passes)
            muon = max(muon, seconds.pop("Muon", 0.0) + self.compute_seconds(orthogonalization.flops(run, trace)))
            sharing = max(sharing, sum(seconds.values()))
            host = max(host, self._host_seconds(run, trace, micro_batches))
        slowest = max(found, key=lambda passes: sum(passes.values()))
        one = sum(slowest.values())
        chunks = len(layout.stages) // layout.pp
        host += slowest.pop("host") * micro_batches
        return StepTime(
            **{name: seconds * micro_batches for name, seconds in slowest.items()},
            bubble=(layout.pp - 1) / chunks * one,
            data=max(sharing - _hidden(run, slowest["compute"] + slowest["recomputed"], micro_batches), 0.0),
            muon=muon,
            host=host,
        )

    def _passes(self, layout: SearchedLayout, modules: Modules, rank: int) -> dict[str, float]:
        """Return the seconds of a micro-batch's passes on a pipeline rank."""
        compute = again = tensor = expert = moved = waiting = 0.0
        for stage in layout.stages[rank :: layout.pp]:
            for part in self.pieces.parts(stage):
                piece = self.pieces.part(layout.width, modules, part)
                plain = self.pieces.plain(layout.width, (), part)
                compute += self.compute_seconds(plain.flops)
                again += self.compute_seconds(piece.flops - plain.flops)
                again += self.rewriting(plain.kept - piece.kept - piece.leaving)
                tensor, expert = tensor + piece.tensor_seconds, expert + piece.expert_seconds
                moved, waiting = moved + piece.leaving, max(waiting, piece.leaving if layout.pp > 1 else 0.0)
        if self.run.moe.overlap_moe_expert_parallel_comm:
            expert = max(expert - compute - again, 0.0)
        # Where another micro-batch's pass came between, nothing is before the last layer's activations to hide them.
        host = self.moving(moved, compute + again) + waiting / (self.machine.host_bandwidth * 1e9)
        return {"compute": compute, "recomputed": max(again, 0.0), "tensor": tensor, "expert": expert, "host": host}

    def _host_seconds(self, run: Run, trace: RankTrace, micro_batches: int) -> float:
        """Return the seconds of offloading: moments there and back, and shards and gradients in every micro-batch."""
        if not trace.offloaded:
            return 0.0
        moved = 2 * rank_memory(run, trace, self.world_size).host
        # Weights are gathered twice from fp32 shards, and gradients come back once.
        moved += micro_batches * 12 * sum(unit.share for unit in trace.units)
        return moved / (self.machine.host_bandwidth * 1e9)

    def compute_seconds(self, flops: float) -> float:
        return flops / (self.machine.mfu * self.machine.peak_tflops * 1e12)

    def moving(self, size: float, products: float) -> float:
        """Return the seconds that offloaded activations add to a pass with these products.

        The device's memory is read and written for them. They are hidden behind a third of the products on the way to
        the host, and behind the others on the way back.
        """
        seconds = size / (self.machine.host_bandwidth * 1e9)
        return self.rewriting(size) + max(seconds - products / 3, 0.0) + max(seconds - products * 2 / 3, 0.0)

    def rewriting(self, size: float) -> float:
        """Return the seconds in which what was not kept is written and read once more."""
        return 2 * max(size, 0.0) / (self.machine.memory_bandwidth * 1e9)


def _hidden(run: Run, products: float, micro_batches: int) -> float:
    """Return the seconds in which data parallelism is behind the products of the passes, if its flags let it."""
    if run.derived.zero_stage >= 2:
        return products * micro_batches
    return products * (2 / 3 * run.parallel.overlap_grad_reduce + 1 / 3 * run.parallel.overlap_param_gather)
