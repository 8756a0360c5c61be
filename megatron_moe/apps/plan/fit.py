"""Look for the fastest layout that fits a device: estimate all, trace the best ones as a whole until one fits.

A layout's time is arithmetic on the parts of its model (`pieces.Pieces`), and is least without recomputation. Layouts
are taken by their time, the fastest first. Each that does not fit comes back later, with the next set of recomputed
modules that may do, and the first that fits when it is planned as a whole, stage by stage, is the answer. All that is
faster has then been shown not to fit, or estimated so from the same traces.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.apps.plan.alternatives import FILLED
from megatron_moe.apps.plan.layouts import (
    Layout,
    layouts,
    module_sets,
    recompute_is_fixed,
    single_modules,
)
from megatron_moe.apps.plan.neighbours import Machine, legal
from megatron_moe.apps.plan.pieces import LOSS, PREDICTION, Pieces
from megatron_moe.apps.plan.plan import GIB, peak_gib, rank_memory
from megatron_moe.apps.plan.tracing import RankTrace
from megatron_moe.apps.plan.traffic import rank_traffic
from megatron_moe.config.schema import Run

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 5.0
_LEAST_TRIED = 3
"""Layouts that are traced as a whole where none fits."""

Modules = tuple[str, ...] | None
"""Recomputed modules; None: those that the user has set."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by what they go to; each adds to the step.

    compute: products of the model at the assumed share of the peak. recomputed: those that are computed again, and the
    memory that is written again. tensor, expert: collectives of TP and CP, and of EP, of all micro-batches. pipeline:
    messages between stages. bubble: waiting at both ends of a step. data: what data parallelism sends, as far as
    nothing hides it. host: what is exchanged with the machine's memory.
    """

    compute: float
    recomputed: float
    tensor: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    host: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Candidate:
    """A layout with its recomputation, the largest rank's GiB and the time of a step.

    exact: whether the memory is of the whole plan; it is put together from parts otherwise.
    """

    layout: Layout
    modules: Modules
    gib: float
    time: StepTime
    exact: bool


@dataclass
class Outcome:
    """What a search has found.

    best: the fastest that fits; None: nothing does. next_best: others that fit, by their time. too_large: faster ones
    that do not fit. least: the one that takes least where nothing fits. unlimited: the fastest of all. looked_at:
    layouts whose memory was estimated. of: layouts in all. planned: candidates that were traced as a whole.
    """

    best: Candidate | None = None
    next_best: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    least: Candidate | None = None
    unlimited: Candidate | None = None
    looked_at: int = 0
    of: int = 0
    planned: int = 0


class Search:
    """The search for one run, whose batch is set, on some machines."""

    def __init__(self, run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> None:
        self.run, self.world_size, self.machine, self.known = run, world_size, machine, known
        self.limit = FILLED * machine.memory_gib
        self.pieces = Pieces(run, world_size, machine)
        self._sets: dict[Any, list[Modules]] = {}
        self._said = time.monotonic()

    def layouts(self) -> list[Layout]:
        """Return all layouts; the layers of the last stage are as many as its loss leaves time for."""
        return list(layouts(self.run, self.world_size, self.machine, self._head()))

    def _head(self) -> float:
        width = next(iter(self.pieces.widths()), None)
        if width is None:
            return 0.0
        kinds = (LOSS, PREDICTION) if self.run.model.mtp_num_layers else (LOSS,)
        layer = self.pieces.exact(width, 1, False, (), self.pieces.kinds[0])
        return sum(self.pieces.exact(width, 1, False, (), kind).flops for kind in kinds) / layer.flops

    def sets(self, layout: Layout) -> list[Modules]:
        """Return the sets of recomputed modules by the time that they add; each keeps less than those before it."""
        if recompute_is_fixed(self.run):
            return [None]
        width = self.pieces.reference(layout.width)
        if width not in self._sets:
            self._sets[width] = list(self._improving(width))
        return self._sets[width]

    def _improving(self, width: Any) -> Iterator[Modules]:
        layers = {kind: self.pieces.count(kind) for kind in self.pieces.kinds}
        plain = sum(count * self.pieces.exact(width, 1, False, (), kind).kept for kind, count in layers.items())
        found = []
        for modules in module_sets(single_modules(self.run)):
            parts = [(count, kind, self.pieces.approximate(width, modules, kind)) for kind, count in layers.items()]
            kept = sum(count * piece.kept for count, _, piece in parts)
            added = sum(count * self._layer_seconds(width, modules, kind) for count, kind, _ in parts)
            found.append((added, kept, modules))
        least = plain * 1.01
        for _, kept, modules in sorted(found, key=lambda row: (row[0], row[1], len(row[2]))):
            if kept < least - 0.01 * plain or not modules:
                least = kept
                yield modules

    def _layer_seconds(self, width: Any, modules: Modules, kind: str) -> float:
        piece, plain = self.pieces.approximate(width, modules, kind), self.pieces.exact(width, 1, False, (), kind)
        return self._compute_seconds(piece.flops) + self._rewriting(plain.kept - piece.kept) + (
            piece.tensor_seconds + piece.expert_seconds
        )

    def _compute_seconds(self, flops: float) -> float:
        return flops / (self.machine.mfu * self.machine.peak_tflops * 1e12)

    def _rewriting(self, size: float) -> float:
        """Return the seconds in which what was not kept is written and read once more."""
        return 2 * max(size, 0.0) / (self.machine.memory_bandwidth * 1e9)

    # Time.

    def step_time(self, layout: Layout, modules: Modules) -> StepTime:
        """Return the time of a step, that of the slowest pipeline rank."""
        run = layout.run(self.run, modules)
        micro_batches = run.derived.num_microbatches(self.world_size)
        found, sharing, host = [], 0.0, 0.0
        for rank in ranks_that_differ(self.pieces, layout):
            passes = self._passes(layout, modules, rank)
            trace = self.pieces.rank_trace(layout, modules, rank, exact=False, passes=False)
            sent = rank_traffic(run, trace, self.world_size, self.machine.gpus_per_node)
            seconds = {name: self.pieces.sending_seconds(one.sent, one.between_nodes) for name, one in sent.items()}
            passes["pipeline"] = seconds.pop("PP", 0.0) / micro_batches
            found.append(passes)
            sharing = max(sharing, sum(seconds.values()))
            host = max(host, self._host_seconds(run, trace, micro_batches))
        slowest = max(found, key=lambda passes: sum(passes.values()))
        one = sum(slowest.values())
        chunks = len(layout.stages) // layout.pp
        return StepTime(
            **{name: seconds * micro_batches for name, seconds in slowest.items()},
            bubble=(layout.pp - 1) / chunks * one,
            data=max(sharing - self._hidden(run, layout, one, micro_batches), 0.0),
            host=host,
        )

    def _passes(self, layout: Layout, modules: Modules, rank: int) -> dict[str, float]:
        """Return the seconds of a micro-batch's passes on a pipeline rank."""
        compute = again = tensor = expert = 0.0
        for stage in layout.stages[rank :: layout.pp]:
            for part, piece in self.pieces.of_stage(layout, modules, stage, exact=False):
                plain = self.pieces.exact(layout.width, 1, False, (), part)
                compute += self._compute_seconds(plain.flops)
                again += self._compute_seconds(piece.flops - plain.flops) + self._rewriting(plain.kept - piece.kept)
                tensor, expert = tensor + piece.tensor_seconds, expert + piece.expert_seconds
        if self.run.moe.overlap_moe_expert_parallel_comm:
            expert = max(expert - compute - again, 0.0)
        return {"compute": compute, "recomputed": max(again, 0.0), "tensor": tensor, "expert": expert}

    def _hidden(self, run: Run, layout: Layout, one: float, micro_batches: int) -> float:
        """Return the seconds in which data parallelism is behind computation, if its flags let it."""
        if layout.zero >= 2:
            return one * micro_batches
        return one * (2 / 3 * run.parallel.overlap_grad_reduce + 1 / 3 * run.parallel.overlap_param_gather)

    def _host_seconds(self, run: Run, trace: RankTrace, micro_batches: int) -> float:
        """Return the seconds of offloading: moments there and back, and shards and gradients in every micro-batch."""
        if not trace.offloaded:
            return 0.0
        moved = 2 * rank_memory(run, trace, self.world_size).host
        # Weights are gathered twice from fp32 shards, and gradients come back once.
        moved += micro_batches * 12 * sum(unit.share for unit in trace.units)
        return moved / (self.machine.host_bandwidth * 1e9)

    # Memory.

    def estimated_gib(self, layout: Layout, modules: Modules, exact: bool) -> float:
        """Return the GiB of the largest rank, put together from parts; see `pieces`."""
        run = layout.run(self.run, modules)
        traces = (
            self.pieces.rank_trace(layout, modules, rank, exact) for rank in ranks_that_differ(self.pieces, layout)
        )
        return max(rank_memory(run, trace, self.world_size).peak for trace in traces) / GIB

    def planned_gib(self, layout: Layout, modules: Modules) -> float:
        """Return the GiB of the largest rank of the whole plan."""
        return peak_gib(layout.run(self.run, modules), self.world_size, self.machine, self.known)

    def allowed(self, layout: Layout, modules: Modules) -> bool:
        """Return whether the rules allow it."""
        return legal(layout.run(self.run, modules), self.world_size)

    # The search.

    def search(self, others: int) -> Outcome:
        """Return the fastest layout that fits, and up to `others` that come after it."""
        every = self.layouts()
        outcome = Outcome(of=len(every))
        _logger.info("%s layouts; estimating the time of each", f"{len(every):,}")
        order = itertools.count()
        queue: list[tuple[float, int, Layout, int]] = []
        for layout in every:
            self._progress(f"{len(queue):,} of {len(every):,} layouts estimated")
            queue.append((self.step_time(layout, self.sets(layout)[0]).seconds, next(order), layout, -1))
        heapq.heapify(queue)
        least: list[tuple[float, int, Layout, Modules]] = []
        while queue and (outcome.best is None or len(outcome.next_best) < others):
            seconds, _, layout, index = heapq.heappop(queue)
            self._progress(f"{outcome.looked_at:,} of {len(every):,} layouts looked at, now {seconds:,.2f} s a step")
            sets = self.sets(layout)
            if index < 0:
                if not self.allowed(layout, sets[0]) and not self.allowed(layout, sets[-1]):
                    continue
                outcome.looked_at += 1
                if outcome.unlimited is None:
                    outcome.unlimited = self._candidate(layout, sets[0])
            elif self._fits(layout, sets[index], outcome):
                continue
            following = self._next_set(layout, index + 1)
            if following is not None:
                again = self.step_time(layout, sets[following]).seconds
                heapq.heappush(queue, (again, next(order), layout, following))
            elif index < 0:
                least.append((self.estimated_gib(layout, sets[-1], False), next(order), layout, sets[-1]))
        if outcome.best is None:
            outcome.least = self._least(sorted(least)[:_LEAST_TRIED] if least else [], outcome)
        return outcome

    def _next_set(self, layout: Layout, start: int) -> int | None:
        """Return the index of the next set, by the time it adds, that may fit."""
        sets = self.sets(layout)
        for index in range(start, len(sets)):
            if self.estimated_gib(layout, sets[index], exact=False) <= self.limit:
                return index
        return None

    def _fits(self, layout: Layout, modules: Modules, outcome: Outcome) -> bool:
        """Return whether a layout fits as a whole, and put it where it belongs."""
        if not self.allowed(layout, modules):
            return False
        gib, exact = self.estimated_gib(layout, modules, exact=True), False
        if gib <= self.limit:
            _logger.info("planning as a whole: %s", words(layout, modules))
            gib, exact = self.planned_gib(layout, modules), True
            outcome.planned += 1
        candidate = Candidate(layout, modules, gib, self.step_time(layout, modules), exact)
        if gib > self.limit:
            if outcome.best is None:
                outcome.too_large.append(candidate)
            return False
        if outcome.best is None:
            outcome.best = candidate
        else:
            outcome.next_best.append(candidate)
        return True

    def _candidate(self, layout: Layout, modules: Modules) -> Candidate:
        gib = self.estimated_gib(layout, modules, exact=True)
        return Candidate(layout, modules, gib, self.step_time(layout, modules), False)

    def _least(self, rows: list[Any], outcome: Outcome) -> Candidate | None:
        """Return which of some layouts takes least, each traced as a whole."""
        found = []
        for _, _, layout, modules in rows:
            if self.allowed(layout, modules):
                _logger.info("nothing fits; planning as a whole what takes least: %s", words(layout, modules))
                gib = self.planned_gib(layout, modules)
                outcome.planned += 1
                found.append(Candidate(layout, modules, gib, self.step_time(layout, modules), True))
        return min(found, key=lambda one: one.gib, default=None)

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            _logger.info("%s, %d parts traced", text, self.pieces.traced)


def ranks_that_differ(pieces: Pieces, layout: Layout) -> list[int]:
    """Return the first pipeline rank of each kind, by its parts: it has the most micro-batches in flight."""
    seen: dict[Any, int] = {}
    for rank in range(layout.pp):
        seen.setdefault(tuple(pieces.parts(stage) for stage in layout.stages[rank :: layout.pp]), rank)
    return list(seen.values())


def words(layout: Layout, modules: Modules) -> str:
    """Return a layout in one line."""
    width = layout.width
    parts = [f"TP {width.tp}", f"PP {layout.pp}", f"VPP {len(layout.stages) // layout.pp}", f"EP {width.ep}"]
    parts += [f"ETP {width.etp}"] if width.etp != 1 or width.tp != 1 else []
    parts += [f"ZeRO {layout.zero}"] + (["offload"] if layout.offload else [])
    if modules is not None:
        parts.append("recompute " + (" ".join(modules) or "none"))
    return ", ".join(parts)
