"""`--log-straggler`: which rank is slow, in which part of a step, and whether its card or its experts' load is why.

A thread looks at the stack of the training thread 50 times a second (`PartClock`) and adds up the time by part: data,
forward, backward, optimizer, save, and the time inside collectives. Every `--straggler-interval` steps rank 0 gathers
the sums in the background and takes them a step later, so that nothing waits for anything. `SlowRanks` compares each
rank's own work, without collectives, with that of the other ranks of its pipeline stage.

On CUDA only the host is seen. A rank whose host is late (data, save, Python) is named; one whose card computes slowly
is not, for all hosts then wait for their devices alike. A host that waits for its own device is not late: what it takes
longer to launch is hidden behind that. Not verified on a GPU.
"""

from __future__ import annotations

import inspect
import math
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph

from megatron_moe import moe, platform
from megatron_moe.checkpoint.errors import all_gather_object, on_rank_zero
from megatron_moe.checkpoint.save import CheckpointSave
from megatron_moe.data.batches import BatchIterator
from megatron_moe.parallel.groups import host_group
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.report.records import OWN_WORK
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.callbacks import checkpointing
from megatron_moe.training.finalize_model_grads import RouterUpdate, finalize_model_grads
from megatron_moe.training.hang_report import waiting_call
from megatron_moe.training.step import StepResult, forward_step, run_micro_batches, train_step
from megatron_moe.training.trainer import Trainer

COLLECTIVES, DEVICE, OTHER = "collectives", "device", "other"
"""Inside a collective, waiting for this rank's CUDA device, and what is compared with no one."""
EXPERTS = "experts"
"""The time of the forward pass inside the MoE layers, which grows with the tokens that a rank's experts get."""

# The clock.

SAMPLE_SECONDS = 0.02
CLOCKED = (*OWN_WORK, COLLECTIVES, DEVICE, OTHER, EXPERTS)
"""What `PartClock` counts."""
_COLLECTIVE_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")


def _code(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__


_PART_OF_CODE = {
    _code(BatchIterator.__next__): "data",
    _code(forward_step): "forward",
    _code(run_micro_batches): "forward",
    _code(graph._engine_run_backward): "backward",
    _code(finalize_model_grads): "backward",
    _code(train_step): "optimizer",
    _code(on_rank_zero): OTHER,  # what one rank does for all is no slowness
}
"""Functions whose frame says what a thread is doing; the innermost one on the stack counts."""
_PUBLISH_CODE = _code(CheckpointSave.publish)
_MOE_FOLDER = os.path.dirname(moe.__file__)


class PartClock:
    """Adds up what the thread that started it spends its time on, by sampling its stack from a thread of its own.

    Args:
        on_device: whether tensors are on a CUDA device, so that reading one waits for it.
    """

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._watched, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="part clock", daemon=True)
        self._seconds = dict.fromkeys(CLOCKED, 0.0)
        self._taken = dict(self._seconds)
        self._part_of: dict[CodeType, str | None] = {}
        self._waits_at: dict[tuple[CodeType, int], str | None] = {}

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._watched = threading.get_ident()
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the seconds of each of `CLOCKED` since the last call; NaN where the thread has failed."""
        now = dict(self._seconds)
        if not self._thread.is_alive():  # its error is on standard error, and nobody may look quick for it
            return dict.fromkeys(now, math.nan)
        taken, self._taken = self._taken, now
        for name in now:
            taken[name] = now[name] - taken[name]
        return taken

    def close(self) -> None:
        """End the thread; a clock that was not started may be closed, too."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(SAMPLE_SECONDS):
            for name in self._now():
                # The time since the last sample: this thread may have been held up as the others were.
                now = time.monotonic()
                self._seconds[name] += now - before
            before = now

    def _now(self) -> Iterable[str]:
        """Return the part that the watched thread is in, and EXPERTS in addition where it is there."""
        # No frame outlives this call: it would keep the tensors of its function. So this thread's own is dropped, which
        # would be a cycle.
        frames = sys._current_frames()
        del frames[threading.get_ident()]
        innermost = frames.get(self._watched)
        if innermost is None:
            return (OTHER,)
        waits = self._waits_for(innermost)
        if waits is not None:
            return (waits,)
        part, in_experts = OTHER, False
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if code not in self._part_of:
                self._part_of[code] = _part_of(code)
            found = self._part_of[code]
            in_experts = in_experts or code.co_filename.startswith(_MOE_FOLDER)
            if found is not None:
                part = found
                break
            frame = frame.f_back
        if part == "save":
            for other in frames.values():
                if _is_within(_PUBLISH_CODE, other):
                    part = OTHER  # rank 0 publishes, and the others wait
        return (part, EXPERTS) if in_experts and part == "forward" else (part,)

    def _waits_for(self, frame: FrameType) -> str | None:
        """Return COLLECTIVES or DEVICE where the innermost frame waits for one that was begun before."""
        place, line = (frame.f_code, frame.f_lasti), frame.f_lineno
        if line is None:  # between two lines
            return None
        if place not in self._waits_at:
            called = waiting_call(frame, line, frame.f_lasti, self._on_device)
            found = None
            if called is not None:
                found = COLLECTIVES if called == "wait" else DEVICE
            self._waits_at[place] = found
        return self._waits_at[place]


def _part_of(code: CodeType) -> str | None:
    if code.co_filename.endswith(_COLLECTIVE_FILES):
        return COLLECTIVES
    if code.co_filename == checkpointing.__file__:
        return "save"
    if code.co_name in ("backward_step", "custom_backward"):  # the engine's, which calls autograd's C++ itself
        return "backward"
    return _PART_OF_CODE.get(code)


def _is_within(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


# The decision.

COLUMNS = (*CLOCKED, "load")
"""What is known of each rank in an interval: seconds, and the choices that its experts got in one of its steps."""
ALLOWED = {"step": 0.25, "save": 1.0}
"""How much more own work than the median of the others a rank may have, as a share of it. Disks vary more."""
EVIDENCE_SECONDS = 2.0
"""Own work beyond that by which a rank is slow."""
EVIDENCE_STEPS = 8
"""A step adds an eighth of the evidence at most: a pause of a few steps, however long, is no slow rank."""
MEMORY_SECONDS, MEMORY_INTERVALS = 16.0, 16
"""Part and cause are named by so much of a rank's own work, or so many intervals where these are longer."""
CLEARLY = 2.0
"""By how much another part's excess is above that of the part that was named, for the other one to be named."""
_COLUMN = dict(zip(COLUMNS, range(len(COLUMNS))))
_LAUNCHED = ("forward", "backward", "optimizer")
_WORK = {"step": OWN_WORK[:-1], "save": OWN_WORK[-1:]}
_LOOK_AT = {
    "data": "the storage of its data",
    "save": "the disk of its checkpoints",
    **dict.fromkeys(_LAUNCHED, "its card, and at what else runs on its host"),
}


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow, or no longer is.

    seconds: per step in this part of it. usual: the median of the other ranks of its stage. load: choices that its
    experts got over the stage's mean. experts: whether these explain it. ended: it is as fast as the others again.
    """

    rank: int
    phase: str
    seconds: float
    usual: float
    load: float
    experts: bool
    ended: bool = False

    def text(self, host: str) -> str:
        """Return what to say about it."""
        name = f"rank {self.rank} ({host})"
        if self.ended:
            return f"{name} is no longer slow in {self.phase}"
        took = f"{name} is slow in {self.phase}: {self.seconds:.3f} s a step, the others of its stage {self.usual:.3f}"
        if self.experts:
            return f"{took}; its experts got {self.load:.2f} times the mean of tokens, so balance them"
        return f"{took}; look at {_LOOK_AT[self.phase]}"


def others_median(values: Tensor) -> Tensor:
    """Return for each of n > 1 values [n, ...] the median of the n - 1 others along the first dimension."""
    in_order, order = values.sort(dim=0)
    place = order.argsort(dim=0)
    total = torch.zeros_like(values)
    for middle in ((len(values) - 2) // 2, (len(values) - 1) // 2):
        # The value itself is left out of the order.
        total += in_order.gather(0, middle + (place <= middle).long())
    return total / 2


class _Comparison:
    """The ranks of one pipeline stage and their work of one kind, in a step or in a save."""

    def __init__(self, ranks: Sequence[int], kind: str) -> None:
        self._ranks, self._parts, self._allowed = list(ranks), _WORK[kind], ALLOWED[kind]
        self._evidence = torch.zeros(len(ranks), dtype=torch.float64)
        # Sums of steps, of what each rank had and of what the others had, since the evidence began.
        self._steps = torch.zeros_like(self._evidence)
        self._own = torch.zeros(len(ranks), len(COLUMNS), dtype=torch.float64)
        self._usual = torch.zeros_like(self._own)
        self._said: dict[int, SlowRank] = {}
        self._new_for: Counter[int] = Counter()
        """Steps for which another part or cause than the one that was said has been found."""

    def add(self, steps: int, table: Tensor) -> list[SlowRank]:
        """Take an interval of all ranks [world, columns]; return what is new."""
        table = table[self._ranks]
        work = _of(table, self._parts)
        if not work.any():  # nothing was saved in these steps
            return []
        usual = others_median(table)
        usual[:, _COLUMN["load"]] = table[:, _COLUMN["load"]].mean()
        excess = work - (1 + self._allowed) * others_median(work)
        if self._parts is _WORK["step"]:
            # What a host takes longer to launch costs nothing while its device is busy.
            launching = _of(table, _LAUNCHED) - _of(usual, _LAUNCHED)
            excess -= torch.minimum(table[:, _COLUMN[DEVICE]], launching.clamp(min=0))
        # What was before the evidence began says nothing about its part.
        kept = (1 - (work / MEMORY_SECONDS).clamp(max=1 / MEMORY_INTERVALS)) * (self._evidence > 0)
        self._steps = kept * self._steps + steps
        self._own = kept[:, None] * self._own + table
        self._usual = kept[:, None] * self._usual + usual
        gain = excess.clamp(max=steps * EVIDENCE_SECONDS / EVIDENCE_STEPS)
        self._evidence = (self._evidence + gain).clamp(0, EVIDENCE_SECONDS)
        found = []
        suspects = (self._evidence >= EVIDENCE_SECONDS).nonzero().flatten().tolist()
        for row in sorted({*suspects, *self._said}):
            found += self._news(row, steps)
        return found

    def _news(self, row: int, steps: int) -> list[SlowRank]:
        """Return what there is to say: each verdict once, and another one when it has held for `EVIDENCE_STEPS`."""
        said, now = self._said.get(row), self._verdict(row)
        if said is not None and self._evidence[row] == 0:
            del self._said[row]
            return [replace(said, ended=True)]
        if said is not None:
            self._new_for[row] += steps
            if (now.phase, now.experts) == (said.phase, said.experts):
                self._new_for[row] = 0
            if self._new_for[row] < EVIDENCE_STEPS:
                return []
        self._said[row], self._new_for[row] = now, 0
        return [now]

    def _verdict(self, row: int) -> SlowRank:
        own, usual = dict(zip(COLUMNS, self._own[row].tolist())), dict(zip(COLUMNS, self._usual[row].tolist()))
        excess = dict(zip(COLUMNS, (self._own[row] - self._usual[row]).tolist()))
        phase = max(self._parts, key=lambda part: excess[part])
        said = self._said.get(row)
        if said is not None and excess[phase] < CLEARLY * excess[said.phase]:
            phase = said.phase
        load = 1.0
        if usual["load"]:
            load = own["load"] / usual["load"]
        experts = False
        if phase in ("forward", "backward") and load >= 1 + ALLOWED["step"]:
            # A slow card is slow outside of the MoE layers, too.
            experts = own["forward"] - own[EXPERTS] <= (load + 1) / 2 * (usual["forward"] - usual[EXPERTS])
        steps = float(self._steps[row])
        return SlowRank(self._ranks[row], phase, own[phase] / steps, usual[phase] / steps, load, experts)


def _of(table: Tensor, parts: Sequence[str]) -> Tensor:
    """Return the sum of these columns [n] of a table [n, columns]."""
    total = torch.zeros_like(table[:, 0])
    for part in parts:
        total += table[:, _COLUMN[part]]
    return total


class SlowRanks:
    """Says which ranks are slow, from what all ranks have spent in intervals of some steps.

    Evidence is a sum of a rank's own work beyond that of the others and what is allowed (a CUSUM chart, Page 1954): it
    grows while a rank is slow, and noise takes it back to zero.

    Args:
        stages: the ranks of each pipeline stage, which have the same work.
    """

    def __init__(self, stages: Iterable[Sequence[int]]) -> None:
        self._comparisons = []
        for ranks in stages:
            if len(ranks) > 1:
                self._comparisons += [_Comparison(ranks, "step"), _Comparison(ranks, "save")]

    def add(self, steps: int, table: Tensor) -> list[SlowRank]:
        """Return what is new: a slow rank, another part or cause of one, or its end.

        Args:
            steps: what the interval has.
            table: fp64 [world, columns] of `COLUMNS`; NaN where a rank's clock has failed, and nothing is compared.
        """
        found: list[SlowRank] = []
        if not table.isnan().any():
            for comparison in self._comparisons:
                found += comparison.add(steps, table)
        return found


# The callback.


class Stragglers(Callback):
    """Samples this rank's time and exchanges the sums with the others; does nothing without `--log-straggler`."""

    _clock: PartClock | None = None

    def attach(self, trainer: Trainer) -> None:
        """Exchange hosts and stages. Collective over all ranks."""
        super().attach(trainer)
        if not trainer.run.logging.log_straggler:
            return
        self._hosts: list[str] = []
        self._stages: defaultdict[int, list[int]] = defaultdict(list)
        for rank, (host, stage) in enumerate(all_gather_object((socket.gethostname(), trainer.rank_facts.pp_rank))):
            self._hosts.append(host)
            self._stages[stage].append(rank)
        self._slow = SlowRanks(self._stages.values())
        self._load: HostCopy | None = None
        self._gathering: tuple[dist.Work, list[Tensor], int] | None = None
        self._sums = torch.zeros(len(self._hosts), len(COLUMNS), dtype=torch.float64)
        self._sent_at, self._steps = trainer.progress.iteration, 0
        self._clock = PartClock(platform.has_cuda())

    def notes(self) -> Sequence[str]:
        """Say where no rank has another one to be compared with."""
        if self._clock is None or len(self._stages) < len(self._hosts):
            return ()
        return ("--log-straggler: no rank is compared, as each is alone in its pipeline stage; its times are recorded",)

    def before_training(self) -> None:
        if self._clock is not None:
            self._clock.start()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Take what was gathered since an earlier step, and begin to gather at the end of an interval.

        Collective over all ranks.
        """
        if self._clock is None:
            return
        self._take()
        options = self.trainer.run.logging
        if step.iteration % options.straggler_interval == 0:
            self._send(self._clock.take(), step.iteration, result.router_update)
        if step.iteration % options.log_interval == 0 and self._steps:
            step.rank_seconds = self._seconds_per_step()
            self._steps = 0
            self._sums.zero_()

    def after_training(self) -> None:
        """Take what was gathered last."""
        if self._clock is not None:
            self._take()

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def _send(self, own: dict[str, float], iteration: int, update: RouterUpdate) -> None:
        # Counts of an interval before: they have arrived, so that no host waits for its device.
        load = 0.0
        if self._load is not None:
            load = float(self._load.result())
        self._load = self._load_of(update)
        mine = torch.tensor([*own.values(), load], dtype=torch.float64)
        rows: list[Tensor] = []
        if self.trainer.rank_facts.rank == 0:
            rows = list(torch.empty(len(self._hosts), len(COLUMNS), dtype=torch.float64))
        work = dist.gather(mine, rows or None, dst=0, group=host_group(), async_op=True)
        self._gathering = (work, rows, iteration - self._sent_at)
        self._sent_at = iteration

    def _load_of(self, update: RouterUpdate) -> HostCopy | None:
        """Return the choices of all layers that this rank's experts got, on their way to the host."""
        facts, total = self.trainer.rank_facts, None
        for counts in update.tokens_per_expert:
            own = counts.view(facts.ep_size, -1)[facts.ep_rank].sum()
            total = own if total is None else total + own
        return None if total is None else HostCopy(total)

    def _take(self) -> None:
        if self._gathering is None:
            return
        (work, rows, steps), self._gathering = self._gathering, None
        work.wait()
        if not rows:  # not rank 0
            return
        table = torch.stack(rows)
        self._steps += steps
        self._sums += table
        for slow in self._slow.add(steps, table):
            host = self._hosts[slow.rank]
            facts: dict[str, Any] = {"rank": slow.rank, "host": host, "phase": slow.phase}
            facts |= {"experts": slow.experts, "ended": slow.ended}
            self.trainer.reporter.event("slow", slow.text(host), **facts)

    def _seconds_per_step(self) -> dict[str, list[float]]:
        """Return the seconds per step of each part, rank by rank; see `StepRecord.rank_seconds`."""
        per_step = (self._sums / self._steps).round(decimals=5)
        found = {name: per_step[:, _COLUMN[name]].tolist() for name in (*OWN_WORK, DEVICE)}
        # Nobody waits for the rank of a stage that comes last: what it spends in collectives is the exchange itself.
        exchange = per_step[:, _COLUMN[COLLECTIVES]].clone()
        for ranks in self._stages.values():
            exchange[ranks] = exchange[ranks].min()
        waiting = (per_step[:, _COLUMN[COLLECTIVES]] - exchange).round(decimals=5)
        return {**found, "exchange": exchange.tolist(), "waiting": waiting.tolist()}
