"""Look for the fastest layout that fits a device: estimate all, trace the best ones as a whole until one fits.

The time of a step in a layout is arithmetic on the traced parts of the model (`layer_costs`) and on the speed of links.
It is least without recomputation. The search takes layouts by their time, the fastest first. A layout that does not fit
comes back later with the next set of recomputed modules that may help. The first layout that fits when it is planned as
a whole, stage by stage, is the answer: all faster ones do not fit, or were estimated not to from the same traces.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.rules.rule import spelled as spelled_field
from megatron_moe.config.schema import Run
from megatron_moe_tools.plan.latent_exchange import compared_exchanges
from megatron_moe_tools.plan.layer_costs import LOSS, PREDICTION, LayerCosts, StepTime
from megatron_moe_tools.plan.layouts import (
    FULL,
    GIB,
    RECOMPUTATION_FIELDS,
    LayerSharding,
    Machine,
    Modules,
    SearchedLayout,
    brief,
    divided,
    exists,
    fixed_fields,
    layouts,
    legal,
    module_sets,
    no_layout,
    offloadable,
)
from megatron_moe_tools.plan.plan import FILLED, PlannedMemory, make_plan, peak_gib, rank_memory
from megatron_moe_tools.plan.tracing import RankTrace

_logger = logging.getLogger(__name__)
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


class Search:
    """The search for one run, whose batch is set, on some machines."""

    def __init__(self, run: Run, world_size: int, machine: Machine) -> None:
        self.run, self.world_size, self.machine = run, world_size, machine
        self.known: dict[Hashable, RankTrace] = {}
        self.limit = FILLED * machine.memory_gib
        self.costs = LayerCosts(run, world_size, machine)
        self._sets: dict[LayerSharding, list[Modules]] = {}
        self._all_sets: list[tuple[str, ...]] = []
        self._learned: dict[SearchedLayout, float] = {}

    def layouts(self) -> list[SearchedLayout]:
        """Return all layouts; the layers of the last stage are as many as its loss leaves time for."""
        if not self.costs.shardings:
            return []
        sharding = self.costs.shardings[0]
        head: float = self.costs.plain(sharding, (), LOSS).flops
        if self.run.model.mtp_num_layers:
            head += self.costs.plain(sharding, (), PREDICTION).flops
        head /= self.costs.plain(sharding, (), self.costs.kinds[0]).flops
        return list(layouts(self.run, self.world_size, self.machine, self.costs.shardings, head))

    def sets(self, layout: SearchedLayout) -> list[Modules]:
        """Return the sets of modules by the time that they add; each keeps less on the device than those before it.

        Each keeps a hundredth of all activations less; modules are taken to add up.
        """
        if fixed_fields(self.run) & set(RECOMPUTATION_FIELDS):
            return [None]
        sharding = self.costs.reference(layout.sharding)
        if sharding in self._sets:
            return self._sets[sharding]
        rungs = offloadable(self.run, self.machine)
        singles = [name for name in all_fields()["recompute_modules"].choices or () if exists(self.run, (name,))]
        saved: dict[tuple[str, ...], tuple[float, float, float]] = {FULL: self._saved(sharding, FULL)}
        for name in itertools.chain(singles, *rungs):
            saved[name,] = self._saved(sharding, (name,))
        if not self._all_sets:
            self._all_sets = list(module_sets(self.run, singles, rungs))
        products = plain = 0.0
        for kind in self.costs.kinds:
            layer, count = self.costs.plain(sharding, (), kind), self.costs.count(kind)
            products += count * self.costs.compute_seconds(layer.flops)
            plain += count * layer.kept
        rows = []
        for modules in self._all_sets:
            seconds = size = moved = 0.0
            for part in [FULL] if modules == FULL else itertools.combinations(modules, 1):
                added, not_kept, to_host = saved[part]
                seconds, size, moved = seconds + added, size + not_kept, moved + to_host
            seconds += self.costs.moving(moved, products + seconds)
            rows.append((seconds, -size - moved, len(modules), modules))
        found: list[Modules] = []
        most = -plain
        for _, less, _, modules in sorted(rows):
            if -less > most + plain / 100:
                most = -less
                found.append(modules)
        self._sets[sharding] = found
        return found

    def _saved(self, sharding: LayerSharding, modules: tuple[str, ...]) -> tuple[float, float, float]:
        """Return the seconds that some modules of all layers add, the bytes not kept, and those that go to the host."""
        seconds = size = moved = 0.0
        for kind in self.costs.kinds:
            count = self.costs.count(kind)
            part, plain = self.costs.part(sharding, modules, kind), self.costs.plain(sharding, (), kind)
            less = plain.kept - part.kept - part.leaving
            again = part.tensor_seconds + part.expert_seconds - plain.tensor_seconds - plain.expert_seconds
            again += self.costs.compute_seconds(part.flops - plain.flops) + self.costs.rewriting(less)
            seconds += count * again
            size += count * less
            moved += count * part.leaving
        return seconds, size, moved

    # Memory.

    def estimated_gib(self, layout: SearchedLayout, modules: Modules) -> float:
        """Return the GiB of the largest rank, put together from parts; see `layer_costs`."""
        most = max(memory.peak for memory in self._memories(layout, modules))
        return most / GIB * self._learned.get(layout, 1.0)

    def _memories(self, layout: SearchedLayout, modules: Modules) -> Iterator[PlannedMemory]:
        """Yield the memory of each pipeline rank that differs from those before it."""
        for rank in self.costs.ranks_that_differ(layout):
            trace = self.costs.rank_trace(layout, modules, rank)
            yield rank_memory(self.costs.run_of(layout), trace, self.world_size)

    def _machine_holds(self, layout: SearchedLayout, modules: Modules) -> bool:
        """Return whether what a machine's ranks offload leaves a tenth of its memory."""
        if not layout.offload and not (modules and divided(modules)[1]):
            return True
        of_rank = max(memory.host + memory.host_activations for memory in self._memories(layout, modules))
        on_machine = min(self.machine.gpus_per_node, self.world_size)
        return of_rank * on_machine / GIB <= FILLED * self.machine.host_memory_gib

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
            queue.append((self.costs.step_time(layout, self.sets(layout)[0]).seconds, next(order), layout, -1))
        heapq.heapify(queue)
        most, least = _MEMORY_ESTIMATE_MARGIN * self.limit, []
        while queue and (outcome.best is None or len(outcome.next_best) < others):
            seconds, _, layout, index = heapq.heappop(queue)
            if outcome.best is not None and seconds > _MAX_SLOWDOWN_SHOWN * outcome.best.time.seconds:
                break
            sets = self.sets(layout)
            if index < 0:
                if not any(self.allowed(layout, modules) for modules in sets):
                    continue
                if not self._machine_holds(layout, sets[0]):
                    outcome.without_host += 1
                    continue
                outcome.looked_at += 1
                if outcome.unlimited is None:
                    gib, time = self.estimated_gib(layout, sets[0]), self.costs.step_time(layout, sets[0])
                    outcome.unlimited = Candidate(layout, sets[0], gib, time, exact=False)
            elif self._fits(layout, sets[index], outcome):
                continue
            # It comes back with the next set, by the time it adds, that may fit.
            following = len(sets)
            if self.estimated_gib(layout, sets[-1]) <= most:
                following = index + 1
            while following < len(sets) and not (
                self.estimated_gib(layout, sets[following]) <= most and self._machine_holds(layout, sets[following])
            ):
                following += 1
            if following < len(sets):
                again = self.costs.step_time(layout, sets[following]).seconds
                heapq.heappush(queue, (again, next(order), layout, following))
            elif index < 0:
                least.append((self.estimated_gib(layout, sets[-1]), next(order), layout, sets[-1]))
        if outcome.best is None:
            for _, _, layout, modules in sorted(least)[:_LEAST_TRIED]:
                self._fits(layout, modules, outcome)
            outcome.least = min(outcome.too_large, key=lambda one: one.gib, default=None)
        return outcome

    def _fits(self, layout: SearchedLayout, modules: Modules, outcome: Outcome) -> bool:
        """Return whether a layout fits as a whole, and put it where it belongs."""
        if not self.allowed(layout, modules):
            return False
        _logger.info("planning as a whole: %s", format_layout(layout, modules))
        gib = peak_gib(layout.run(self.run, modules), self.world_size, self.machine, self.known)
        candidate = Candidate(layout, modules, gib, self.costs.step_time(layout, modules), exact=True)
        outcome.planned += 1
        if gib > self.limit:
            # What was estimated to fit and does not: the next estimates of this layout are as far off.
            before = self._learned.get(layout, 1.0)
            self._learned[layout] = gib / self.estimated_gib(layout, modules) * before
            if outcome.best is None:
                outcome.too_large.append(candidate)
            return False
        if outcome.best is None:
            outcome.best = candidate
        else:
            outcome.next_best.append(candidate)
        return True


def fitted_plan(run: Run, world_size: int, machine: Machine, others: int) -> tuple[Run, dict[str, Any]]:
    """Return the fastest layout that fits, or else the one that takes least, and its plan.

    The plan has the entries `fit` and `mla_cp_exchange` in addition.

    Args:
        run: with a global batch; its own layout need not be allowed.
        world_size: number of ranks.
        machine: what it is to run on.
        others: how many other layouts to show.

    Raises:
        ConfigError: the rules allow no layout with what the user has set.
    """
    search = Search(run, world_size, machine)
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
    plan = make_plan(fitted, world_size, machine, search.known)
    plan["mla_cp_exchange"] = compared_exchanges(fitted, world_size, machine, search.known)

    candidates = []
    if found.unlimited is not None and found.unlimited.layout != chosen.layout:
        candidates.append(found.unlimited)
    if others > 1:
        candidates += [one for one in found.too_large if one is not chosen][-(others // 2) :]
    shown = []
    for one in [*candidates, *found.next_best][:others]:
        loses = f"{brief(one.time.seconds - chosen.time.seconds)} s"
        if one.gib > search.limit:
            loses = f"{one.gib - search.limit:,.2f} GiB too much"
        row = {"layout": format_layout(one.layout, one.modules), "max_memory_gib": one.gib, "planned": one.exact}
        shown.append({**row, "seconds": one.time.seconds, "loses": loses})

    hidden = []  # what of communication is taken to be behind computation
    if fitted.derived.zero_stage >= 2:
        hidden.append("ZeRO's gathers and reductions, as far as products last")
    elif fitted.parallel.overlap_grad_reduce:
        hidden.append("data parallelism, by a micro-batch at most")
    if fitted.moe.overlap_moe_expert_parallel_comm:
        hidden.append("exchanges of EP, as far as products last")

    advice = []
    if found.best is None:  # what would make room
        state = (8 * plan["total_params"] + run.derived.moment_bytes(plan["total_params"])) / GIB
        advice.append(
            f"weights, gradients and moments take {state:,.0f} GiB when nothing is held twice: more than "
            f"{math.ceil(state / search.limit):,} such devices are needed"
        )
        if fixed := sorted(fixed_fields(run)):
            advice.append(f"kept as given, and not searched: {', '.join(spelled_field(run, name) for name in fixed)}")
        others_take = ["not searched, and take less: more ranks"]
        for words, used in _OPTIONS.items():
            if not used(run):
                others_take.append(words)
        advice.append("; ".join(others_take))

    plan["fit"] = {
        "fits": found.best is not None,
        "limit_gib": search.limit,
        "seconds": {**vars(chosen.time), "step": chosen.time.seconds},
        "tokens_per_second": plan["global_batch_size"] * run.model.seq_length / chosen.time.seconds,
        "assumed": {name: getattr(machine, name) for name in _ASSUMED},
        "hidden": f"hidden: {' and '.join(hidden)}" if hidden else "nothing is hidden behind products",
        "layouts": found.of,
        "looked_at": found.looked_at,
        "planned": found.planned,
        "others": shown,
        "advice": advice,
    }
    return fitted, plan


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
