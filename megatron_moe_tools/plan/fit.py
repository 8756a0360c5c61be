"""Look for the fastest layout that fits a device: estimate all, trace the best ones as a whole until one fits.

The time of a step in a layout is arithmetic on the traced parts of the model (`layer_costs`) and on the speed of links.
It is least without recomputation. The search takes layouts by their time, the fastest first. A layout that does not fit
comes back later with the next set of recomputed modules that may help. The first layout that fits when it is planned as
a whole, stage by stage, is the answer: all faster ones do not fit, or were estimated not to from the same traces.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rules.rule import spelled as spelled_field
from megatron_moe.config.schema import Run
from megatron_moe_tools.plan.layer_costs import LOSS, PREDICTION, LayerCosts
from megatron_moe_tools.plan.layouts import (
    FULL,
    GIB,
    LayerSharding,
    Machine,
    Modules,
    SearchedLayout,
    brief,
    divided,
    fixed_fields,
    layouts,
    legal,
    module_sets,
    no_layout,
    offloadable,
    recompute_is_fixed,
    single_modules,
)
from megatron_moe_tools.plan.plan import (
    FILLED,
    PlannedMemory,
    make_plan,
    muon_flops,
    peak_gib,
    rank_memory,
    rank_traffic,
)
from megatron_moe_tools.plan.tracing import RankTrace


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


@dataclass(frozen=True)
class _Passes:
    """The seconds of a micro-batch's passes on a pipeline rank, by what they go to: see `StepTime`."""

    compute: float
    recomputed: float
    tensor: float
    expert: float
    host: float
    pipeline: float

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


class StepTimes:
    """The times of one run's layouts."""

    def __init__(self, run: Run, world_size: int, machine: Machine, costs: LayerCosts) -> None:
        self.run, self.world_size, self.machine, self.costs = run, world_size, machine, costs
        self.run_of = functools.cache(lambda layout: layout.run(run, None))
        """The run in a layout: what is recomputed makes no difference to what is read of it here."""

    def of(self, layout: SearchedLayout, modules: Modules) -> StepTime:
        """Return the time of a step, that of the slowest pipeline rank."""
        run = self.run_of(layout)
        micro_batches = run.derived.num_microbatches(self.world_size)
        slowest: _Passes | None = None
        sharing = muon = host = 0.0
        for rank in self.costs.ranks_that_differ(layout):
            trace = self.costs.rank_trace(layout, modules, rank, passes=False)
            seconds = {}
            for name, sent in rank_traffic(run, trace, self.world_size, self.machine.gpus_per_node).items():
                seconds[name] = self.costs.sending_seconds(sent.sent, sent.between_nodes)
            passes = self._passes(layout, modules, rank, seconds.pop("PP", 0.0) / micro_batches)
            if slowest is None or passes.seconds > slowest.seconds:
                slowest = passes
            muon = max(muon, seconds.pop("Muon", 0.0) + self.compute_seconds(muon_flops(run, trace)))
            sharing = max(sharing, sum(seconds.values()))
            host = max(host, self._host_seconds(run, trace, micro_batches))
        assert slowest is not None
        chunks = len(layout.stages) // layout.pp
        return StepTime(
            compute=slowest.compute * micro_batches,
            recomputed=slowest.recomputed * micro_batches,
            tensor=slowest.tensor * micro_batches,
            expert=slowest.expert * micro_batches,
            pipeline=slowest.pipeline * micro_batches,
            bubble=(layout.pp - 1) / chunks * slowest.seconds,
            data=max(sharing - _hidden(run, slowest.compute + slowest.recomputed, micro_batches), 0.0),
            muon=muon,
            host=host + slowest.host * micro_batches,
        )

    def _passes(self, layout: SearchedLayout, modules: Modules, rank: int, pipeline: float) -> _Passes:
        """Return the seconds of a micro-batch's passes on a pipeline rank. pipeline: of its messages."""
        compute = again = tensor = expert = moved = waiting = 0.0
        for stage in layout.stages[rank :: layout.pp]:
            for kind in self.costs.parts(stage):
                part = self.costs.part(layout.sharding, modules, kind)
                plain = self.costs.plain(layout.sharding, (), kind)
                compute += self.compute_seconds(plain.flops)
                again += self.compute_seconds(part.flops - plain.flops)
                again += self.rewriting(plain.kept - part.kept - part.leaving)
                tensor += part.tensor_seconds
                expert += part.expert_seconds
                moved += part.leaving
                waiting = max(waiting, part.leaving)
        if self.run.moe.overlap_moe_expert_parallel_comm:
            expert = max(expert - compute - again, 0.0)
        host = self.moving(moved, compute + again)
        if layout.pp > 1:  # where another micro-batch's pass came between, nothing hides the last layer's activations
            host += waiting / (self.machine.host_bandwidth * 1e9)
        return _Passes(compute, max(again, 0.0), tensor, expert, host, pipeline)

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


_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 5.0
_MEMORY_ESTIMATE_MARGIN = 1.01
"""What is estimated to need so much more than there is may fit."""
_MAX_SLOWDOWN_SHOWN = 1.25
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


class _Saved(NamedTuple):
    """What modules save: seconds that they add, bytes that are not kept, and bytes that go to the host."""

    seconds: float
    size: float
    moved: float


class Search:
    """The search for one run, whose batch is set, on some machines."""

    def __init__(self, run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace]) -> None:
        self.run, self.world_size, self.machine, self.known = run, world_size, machine, known
        self.limit = FILLED * machine.memory_gib
        self.costs = LayerCosts(run, world_size, machine)
        self.times = StepTimes(run, world_size, machine, self.costs)
        self._sets: dict[LayerSharding, list[Modules]] = {}
        self._all_sets: list[tuple[str, ...]] = []
        self._learned: dict[SearchedLayout, float] = {}
        self._said = time.monotonic()

    def layouts(self) -> list[SearchedLayout]:
        """Return all layouts; the layers of the last stage are as many as its loss leaves time for."""
        if not self.costs.shardings:
            return []
        sharding = self.costs.shardings[0]
        head = self.costs.plain(sharding, (), LOSS).flops
        if self.run.model.mtp_num_layers:
            head += self.costs.plain(sharding, (), PREDICTION).flops
        head /= self.costs.plain(sharding, (), self.costs.kinds[0]).flops
        return list(layouts(self.run, self.world_size, self.machine, self.costs.shardings, head))

    def sets(self, layout: SearchedLayout) -> list[Modules]:
        """Return the sets of modules by the time that they add; each keeps less on the device than those before it."""
        if recompute_is_fixed(self.run):
            return [None]
        sharding = self.costs.reference(layout.sharding)
        if sharding not in self._sets:
            self._sets[sharding] = list(self._improving(sharding))
        return self._sets[sharding]

    def _improving(self, sharding: LayerSharding) -> Iterator[Modules]:
        """Yield sets by the time that they add, as far as each keeps a hundredth less; modules are taken to add up."""
        singles, rungs = single_modules(self.run), offloadable(self.run, self.machine)
        saved = {FULL: self._saved(sharding, FULL)}
        for name in itertools.chain(singles, *rungs):
            saved[name,] = self._saved(sharding, (name,))
        if not self._all_sets:
            self._all_sets = list(module_sets(self.run, singles, rungs))
        products = plain = 0.0
        for kind in self.costs.kinds:
            layer, count = self.costs.plain(sharding, (), kind), self.costs.count(kind)
            products += count * self.times.compute_seconds(layer.flops)
            plain += count * layer.kept
        rows = []
        for modules in self._all_sets:
            seconds = size = moved = 0.0
            singly = [FULL] if modules == FULL else [(name,) for name in modules]
            for part in singly:
                seconds += saved[part].seconds
                size += saved[part].size
                moved += saved[part].moved
            seconds += self.times.moving(moved, products + seconds)
            rows.append((seconds, -size - moved, len(modules), modules))
        most = -plain
        for _, less, _, modules in sorted(rows):
            if -less > most + plain / 100:
                most = -less
                yield modules

    def _saved(self, sharding: LayerSharding, modules: Modules) -> _Saved:
        """Return what recomputing and offloading some modules of all layers saves and takes."""
        seconds = size = moved = 0.0
        for kind in self.costs.kinds:
            count = self.costs.count(kind)
            part, plain = self.costs.part(sharding, modules, kind), self.costs.plain(sharding, (), kind)
            less = plain.kept - part.kept - part.leaving
            again = part.tensor_seconds + part.expert_seconds - plain.tensor_seconds - plain.expert_seconds
            again += self.times.compute_seconds(part.flops - plain.flops) + self.times.rewriting(less)
            seconds += count * again
            size += count * less
            moved += count * part.leaving
        return _Saved(seconds, size, moved)

    # Memory.

    def estimated_gib(self, layout: SearchedLayout, modules: Modules) -> float:
        """Return the GiB of the largest rank, put together from parts; see `layer_costs`."""
        most = max(memory.peak for memory in self._memories(layout, modules))
        return most / GIB * self._learned.get(layout, 1.0)

    def _memories(self, layout: SearchedLayout, modules: Modules) -> Iterator[PlannedMemory]:
        """Yield the memory of each pipeline rank that differs from those before it."""
        for rank in self.costs.ranks_that_differ(layout):
            trace = self.costs.rank_trace(layout, modules, rank)
            yield rank_memory(self.times.run_of(layout), trace, self.world_size)

    def _machine_holds(self, layout: SearchedLayout, modules: Modules) -> bool:
        """Return whether what a machine's ranks offload leaves a tenth of its memory."""
        if not layout.offload and not (modules and divided(modules)[1]):
            return True
        of_rank = max(memory.host + memory.host_activations for memory in self._memories(layout, modules))
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
            if outcome.best is not None and seconds > _MAX_SLOWDOWN_SHOWN * outcome.best.time.seconds:
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
                    gib, seconds_of = self.estimated_gib(layout, sets[0]), self.times.of(layout, sets[0])
                    outcome.unlimited = Candidate(layout, sets[0], gib, seconds_of, exact=False)
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
        if self.estimated_gib(layout, sets[-1]) > _MEMORY_ESTIMATE_MARGIN * self.limit:
            return None
        for index in range(start, len(sets)):
            fits = self.estimated_gib(layout, sets[index]) <= _MEMORY_ESTIMATE_MARGIN * self.limit
            if fits and self._machine_holds(layout, sets[index]):
                return index
        return None

    def _fits(self, layout: SearchedLayout, modules: Modules, outcome: Outcome) -> bool:
        """Return whether a layout fits as a whole, and put it where it belongs."""
        if not self.allowed(layout, modules):
            return False
        _logger.info("planning as a whole: %s", format_layout(layout, modules))
        gib = self.planned_gib(layout, modules)
        candidate = Candidate(layout, modules, gib, self.times.of(layout, modules), exact=True)
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

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            _logger.info("%s, %d parts traced", text, self.costs.traced)


def fitted_plan(
    run: Run, world_size: int, machine: Machine, others: int, known: dict[Hashable, RankTrace]
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
    shown = []
    if found.unlimited is not None and found.unlimited.layout != chosen.layout:
        shown.append(found.unlimited)
    if others > 1:
        shown += [one for one in found.too_large if one is not chosen][-(others // 2) :]
    shown += found.next_best
    advice: list[str] = []
    if found.best is None:
        advice = _advice(run, plan["total_params"], search.limit)
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
        "advice": advice,
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
    loses = f"{brief(one.time.seconds - chosen.time.seconds)} s"
    if one.gib > limit:
        loses = f"{one.gib - limit:,.2f} GiB too much"
    return {
        "layout": format_layout(one.layout, one.modules),
        "max_memory_gib": one.gib,
        "planned": one.exact,
        "seconds": one.time.seconds,
        "loses": loses,
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
        flags = [spelled_field(run, name) for name in sorted(fixed)]
        lines.append(f"kept as given, and not searched: {', '.join(flags)}")
    unused = [words for words, used in _OPTIONS.items() if not used(run)]
    lines.append("not searched, and take less: more ranks; " + "; ".join(unused))
    return lines


def format_layout(layout: SearchedLayout, modules: Modules) -> str:
    """Return a layout in one line."""
    by = layout.sharding
    parts = [f"TP {by.tp}", f"PP {layout.pp}", f"VPP {len(layout.stages) // layout.pp}", f"EP {by.ep}"]
    if by.etp != 1 or by.tp != 1:
        parts.append(f"ETP {by.etp}")
    parts.append(f"ZeRO {layout.zero}")
    if layout.offload:
        parts.append("optimizer offload")
    if modules is not None:
        recomputed, offloaded = divided(modules)
        parts.append("recompute " + (" ".join(recomputed) or "none"))
        if offloaded:
            parts.append(f"offload {' '.join(offloaded)}")
    return ", ".join(parts)
