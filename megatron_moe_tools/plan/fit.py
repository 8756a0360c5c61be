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
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rules.rule import spelled as spelled_field
from megatron_moe.config.schema import Run
from megatron_moe_tools.plan.alternatives import FILLED
from megatron_moe_tools.plan.layouts import (
    FULL,
    Modules,
    SearchedLayout,
    Width,
    divided,
    fixed_fields,
    layouts,
    module_sets,
    no_layout,
    offloadable,
    recompute_is_fixed,
    single_modules,
)
from megatron_moe_tools.plan.neighbours import Machine, legal
from megatron_moe_tools.plan.pieces import LOSS, PREDICTION, Pieces
from megatron_moe_tools.plan.plan import GIB, make_plan, peak_gib, rank_memory
from megatron_moe_tools.plan.report import brief
from megatron_moe_tools.plan.step_time import StepTime, StepTimes
from megatron_moe_tools.plan.tracing import RankTrace

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 5.0
_DOUBT = 1.01
"""What is estimated to need so much more than there is may fit."""
_MUCH_SLOWER = 1.25
"""Over the fastest that fits; what is slower than this is not shown."""
_LEAST_TRIED = 3
"""Layouts that are traced as a whole where none fits."""


_ASSUMED = ("mfu", "peak_tflops", "node_bandwidth", "network_bandwidth", "host_bandwidth", "memory_bandwidth")
_OPTIONS: dict[str, Callable[[Run], bool]] = {
    "a smaller --micro-batch-size": lambda run: run.training.micro_batch_size == 1,
    "--context-parallel-size 2": lambda run: run.parallel.context_parallel_size > 1,
    "--cross-entropy-loss-fusion": lambda run: run.model.cross_entropy_loss_fusion,
    "--use-precision-aware-optimizer with --exp-avg-dtype bf16": lambda run: run.optimizer.exp_avg_dtype != "fp32",
}
"""What makes a run smaller, and whether it does so already."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its recomputation, the largest rank's GiB and the time of a step.

    exact: whether the memory is of the whole plan; it is put together from parts otherwise.
    """

    layout: SearchedLayout
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
    without_host: layouts that offload more than a machine holds.
    """

    best: Candidate | None = None
    next_best: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    least: Candidate | None = None
    unlimited: Candidate | None = None
    looked_at: int = 0
    of: int = 0
    planned: int = 0
    without_host: int = 0


class Search:
    """The search for one run, whose batch is set, on some machines."""

    def __init__(self, run: Run, world_size: int, machine: Machine, known: dict[Any, RankTrace]) -> None:
        self.run, self.world_size, self.machine, self.known = run, world_size, machine, known
        self.limit = FILLED * machine.memory_gib
        self.pieces = Pieces(run, world_size, machine)
        self.times = StepTimes(run, world_size, machine, self.pieces)
        self._sets: dict[Any, list[Modules]] = {}
        self._all_sets: list[tuple[str, ...]] = []
        self._learned: dict[SearchedLayout, float] = {}
        self._said = time.monotonic()

    def layouts(self) -> list[SearchedLayout]:
        """Return all layouts; the layers of the last stage are as many as its loss leaves time for."""
        return list(layouts(self.run, self.world_size, self.machine, self.pieces.widths, self._head()))

    def _head(self) -> float:
        width = next(iter(self.pieces.widths), None)
        if width is None:
            return 0.0
        kinds = (LOSS, PREDICTION) if self.run.model.mtp_num_layers else (LOSS,)
        layer = self.pieces.plain(width, (), self.pieces.kinds[0])
        return sum(self.pieces.plain(width, (), kind).flops for kind in kinds) / layer.flops

    def sets(self, layout: SearchedLayout) -> list[Modules]:
        """Return the sets of modules by the time that they add; each keeps less on the device than those before it."""
        if recompute_is_fixed(self.run):
            return [None]
        width = self.pieces.reference(layout.width)
        if width not in self._sets:
            self._sets[width] = list(self._improving(width))
        return self._sets[width]

    def _improving(self, width: Width) -> Iterator[Modules]:
        """Yield sets by the time that they add, as far as each keeps a hundredth less; modules are taken to add up."""
        layers = {kind: self.pieces.count(kind) for kind in self.pieces.kinds}
        singles, rungs = single_modules(self.run), offloadable(self.run, self.machine)
        saved = {modules: self._saved(width, modules, layers) for modules in [*((name,) for name in singles), FULL]}
        saved |= {(name,): self._saved(width, (name,), layers) for name in itertools.chain(*rungs)}
        if not self._all_sets:
            self._all_sets = list(module_sets(self.run, singles, rungs))
        products = sum(
            count * self.times.compute_seconds(self.pieces.plain(width, (), kind).flops)
            for kind, count in layers.items()
        )
        rows = []
        for modules in self._all_sets:
            parts = [FULL] if modules == FULL else [(name,) for name in modules]
            added, kept, moved = (sum(saved[part][index] for part in parts) for index in (0, 1, 2))
            added += self.times.moving(moved, products + added)
            rows.append((added, -kept - moved, len(modules), modules))
        plain = sum(count * self.pieces.plain(width, (), kind).kept for kind, count in layers.items())
        most = -plain
        for _, less, _, modules in sorted(rows):
            if -less > most + plain / 100:
                most = -less
                yield modules

    def _saved(self, width: Width, modules: Modules, layers: dict[str, int]) -> tuple[float, float, float]:
        """Return the seconds that recomputation adds to all layers, the bytes that are not kept, and those moved."""
        seconds = size = moved = 0.0
        for kind, count in layers.items():
            piece, plain = self.pieces.part(width, modules, kind), self.pieces.plain(width, (), kind)
            less = plain.kept - piece.kept - piece.leaving
            again = piece.tensor_seconds + piece.expert_seconds - plain.tensor_seconds - plain.expert_seconds
            seconds += count * (
                self.times.compute_seconds(piece.flops - plain.flops) + self.times.rewriting(less) + again
            )
            size, moved = size + count * less, moved + count * piece.leaving
        return seconds, size, moved

    # Memory.

    def estimated_gib(self, layout: SearchedLayout, modules: Modules) -> float:
        """Return the GiB of the largest rank, put together from parts; see `pieces`."""
        run = self.times.run_of(layout)
        traces = (self.pieces.rank_trace(layout, modules, rank) for rank in self.pieces.ranks_that_differ(layout))
        largest = max(rank_memory(run, trace, self.world_size).peak for trace in traces) / GIB
        return largest * self._learned.get(layout, 1.0)

    def _machine_holds(self, layout: SearchedLayout, modules: Modules) -> bool:
        """Return whether what a machine's ranks offload leaves a tenth of its memory."""
        if not layout.offload and not (modules and divided(modules)[1]):
            return True
        traces = (self.pieces.rank_trace(layout, modules, rank) for rank in self.pieces.ranks_that_differ(layout))
        held = [rank_memory(self.times.run_of(layout), trace, self.world_size) for trace in traces]
        of_rank = max(memory.host + memory.host_activations for memory in held)
        on_machine = min(self.machine.gpus_per_node, self.world_size)
        return of_rank * on_machine / GIB <= FILLED * self.machine.host_memory_gib

    def planned_gib(self, layout: SearchedLayout, modules: Modules) -> float:
        """Return the GiB of the largest rank of the whole plan."""
        return peak_gib(layout.run(self.run, modules), self.world_size, self.machine, self.known)

    def allowed(self, layout: SearchedLayout, modules: Modules) -> bool:
        """Return whether the rules allow it."""
        return legal(layout.run(self.run, modules), self.world_size)

    # The search.

    def search(self, others: int) -> Outcome:
        """Return the fastest layout that fits, and up to `others` that come after it."""
        every = self.layouts()
        outcome = Outcome(of=len(every))
        _logger.info("%s layouts; estimating the time of each", f"{len(every):,}")
        order = itertools.count()
        queue: list[tuple[float, int, SearchedLayout, int]] = []
        for layout in every:
            self._progress(f"{len(queue):,} of {len(every):,} layouts estimated")
            queue.append((self.times.of(layout, self.sets(layout)[0]).seconds, next(order), layout, -1))
        heapq.heapify(queue)
        least: list[tuple[float, int, SearchedLayout, Modules]] = []
        while queue and (outcome.best is None or len(outcome.next_best) < others):
            seconds, _, layout, index = heapq.heappop(queue)
            if outcome.best is not None and seconds > _MUCH_SLOWER * outcome.best.time.seconds:
                break
            self._progress(f"{outcome.looked_at:,} of {len(every):,} layouts looked at, now {seconds:,.2f} s a step")
            sets = self.sets(layout)
            if index < 0:
                if not any(self.allowed(layout, modules) for modules in sets):
                    continue
                if not self._machine_holds(layout, sets[0]):
                    outcome.without_host += 1
                    continue
                outcome.looked_at += 1
                if outcome.unlimited is None:
                    outcome.unlimited = self._candidate(layout, sets[0])
            elif self._fits(layout, sets[index], outcome):
                continue
            following = self._next_set(layout, index + 1)
            if following is not None:
                again = self.times.of(layout, sets[following]).seconds
                heapq.heappush(queue, (again, next(order), layout, following))
            elif index < 0:
                least.append((self.estimated_gib(layout, sets[-1]), next(order), layout, sets[-1]))
        if outcome.best is None:
            for _, _, layout, modules in sorted(least)[:_LEAST_TRIED]:
                self._fits(layout, modules, outcome)
            outcome.least = min(outcome.too_large, key=lambda one: one.gib, default=None)
        return outcome

    def _next_set(self, layout: SearchedLayout, start: int) -> int | None:
        """Return the index of the next set, by the time it adds, that may fit."""
        sets = self.sets(layout)
        if self.estimated_gib(layout, sets[-1]) > _DOUBT * self.limit:
            return None
        for index in range(start, len(sets)):
            fits = self.estimated_gib(layout, sets[index]) <= _DOUBT * self.limit
            if fits and self._machine_holds(layout, sets[index]):
                return index
        return None

    def _fits(self, layout: SearchedLayout, modules: Modules, outcome: Outcome) -> bool:
        """Return whether a layout fits as a whole, and put it where it belongs."""
        if not self.allowed(layout, modules):
            return False
        _logger.info("planning as a whole: %s", words(layout, modules))
        candidate = Candidate(
            layout, modules, self.planned_gib(layout, modules), self.times.of(layout, modules), exact=True
        )
        outcome.planned += 1
        if candidate.gib > self.limit:
            # What was estimated to fit and does not: the next estimates of this layout are as far off.
            before = self._learned.get(layout, 1.0)
            self._learned[layout] = candidate.gib / self.estimated_gib(layout, modules) * before
            if outcome.best is None:
                outcome.too_large.append(candidate)
            return False
        if outcome.best is None:
            outcome.best = candidate
        else:
            outcome.next_best.append(candidate)
        return True

    def _candidate(self, layout: SearchedLayout, modules: Modules) -> Candidate:
        gib = self.estimated_gib(layout, modules)
        return Candidate(layout, modules, gib, self.times.of(layout, modules), False)

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            _logger.info("%s, %d parts traced", text, self.pieces.traced)


def fitted_plan(
    run: Run, world_size: int, machine: Machine, others: int, known: dict[Any, RankTrace]
) -> tuple[Run, dict[str, Any]]:
    """Return the fastest layout that fits, or else the one that takes least, and its plan with an entry `fit`.

    Args:
        run: with a batch, see `layouts.with_batch`; its own layout need not be allowed.
        world_size: number of ranks.
        machine: what it is to run on.
        others: how many other layouts to show.
        known: see `trace_ranks`.

    Raises:
        ConfigError: the rules allow no layout with what the user has set.
    """
    search = Search(run, world_size, machine, known)
    found = search.search(others)
    chosen = found.best or found.least
    if chosen is None:
        if found.without_host:
            raise ConfigError(
                f"--host-memory-gib {machine.host_memory_gib:g}, --optimizer-cpu-offload: is less than offloading takes"
                " of a machine in any layout; use more ranks, or drop the offload"
            )
        raise no_layout(run, world_size)
    fitted = chosen.layout.run(run, chosen.modules)
    plan = make_plan(fitted, world_size, machine, known)
    shown = [found.unlimited] if found.unlimited is not None and found.unlimited.layout != chosen.layout else []
    shown += [one for one in found.too_large if one is not chosen][-(others // 2) :] if others > 1 else []
    shown += found.next_best
    plan["fit"] = {
        "fits": found.best is not None,
        "limit_gib": search.limit,
        "seconds": {**vars(chosen.time), "step": chosen.time.seconds},
        "tokens_per_second": plan["global_batch_size"] * run.model.seq_length / chosen.time.seconds,
        "assumed": {name: getattr(machine, name) for name in _ASSUMED},
        "hidden": _hidden_words(fitted),
        "layouts": found.of,
        "looked_at": found.looked_at,
        "planned": found.planned,
        "others": [_row(one, chosen, search.limit) for one in shown[:others]],
        "advice": [] if found.best is not None else _advice(run, plan["total_params"], search.limit),
    }
    return fitted, plan


def _hidden_words(run: Run) -> str:
    """Return what of communication is taken to be hidden behind computation."""
    hidden = []
    if run.derived.zero_stage >= 2:
        hidden.append("ZeRO's gathers and reductions, as far as products last")
    elif run.parallel.overlap_grad_reduce:
        hidden.append("data parallelism, by a micro-batch at most")
    if run.moe.overlap_moe_expert_parallel_comm:
        hidden.append("exchanges of EP, as far as products last")
    return f"hidden: {' and '.join(hidden)}" if hidden else "nothing is hidden behind products"


def _row(one: Candidate, chosen: Candidate, limit: float) -> dict[str, Any]:
    """Return a layout as plain data, with what it lacks."""
    slower = one.time.seconds - chosen.time.seconds
    return {
        "layout": words(one.layout, one.modules),
        "max_memory_gib": one.gib,
        "planned": one.exact,
        "seconds": one.time.seconds,
        "loses": f"{one.gib - limit:,.2f} GiB too much" if one.gib > limit else f"{brief(slower)} s",
    }


def _advice(run: Run, parameters: int, limit: float) -> list[str]:
    """Return what would make room where nothing fits."""
    state = (8 * parameters + run.derived.moment_bytes(parameters)) / GIB
    lines = [
        f"weights, gradients and moments take {state:,.0f} GiB when nothing is held twice: more than "
        f"{math.ceil(state / limit):,} such devices are needed"
    ]
    fixed = fixed_fields(run)
    if fixed:
        lines.append(
            f"kept as given, and not searched: {', '.join(spelled_field(run, name) for name in sorted(fixed))}"
        )
    unused = [words for words, used in _OPTIONS.items() if not used(run)]
    lines.append("not searched, and take less: more ranks; " + "; ".join(unused))
    return lines


def words(layout: SearchedLayout, modules: Modules) -> str:
    """Return a layout in one line."""
    width = layout.width
    parts = [f"TP {width.tp}", f"PP {layout.pp}", f"VPP {len(layout.stages) // layout.pp}", f"EP {width.ep}"]
    parts += [f"ETP {width.etp}"] if width.etp != 1 or width.tp != 1 else []
    parts += [f"ZeRO {layout.zero}"] + (["optimizer offload"] if layout.offload else [])
    if modules is not None:
        recomputed, offloaded = divided(modules)
        parts.append("recompute " + (" ".join(recomputed) or "none"))
        parts += [f"offload {' '.join(offloaded)}"] if offloaded else []
    return ", ".join(parts)
