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
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object, on_rank_zero
from megatron_moe.checkpoint.save import CheckpointSave
from megatron_moe.data.batches import BatchIterator
from megatron_moe.moe.layer import MoELayer
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
"""The time of the forward pass inside the routed experts."""

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
_EXPERTS_CODE, _PUBLISH_CODE = _code(MoELayer.compute_experts), _code(CheckpointSave.publish)


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
        return {name: now[name] - taken[name] for name in now}

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
            in_experts = in_experts or code is _EXPERTS_CODE
            if found is not None:
                part = found
                break
            frame = frame.f_back
        if part == "save" and any(_is_within(_PUBLISH_CODE, other) for other in frames.values()):
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
    experts got over the stage's mean. experts: whether these explain it. ended: it is as fast as the others
    again.
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
        took = f"{name} is slow in {self.phase}: {self.seconds:.3f} s a step, the others of its stage {self.usual:.3f} s"
        if self.experts:
            return f"{took}; its experts got {self.load:.2f} times the mean of tokens: balance them, the rank is not slow"
        return f"{took}; look at {_LOOK_AT[self.phase]}"


class _Suspect:
    """What is known about one rank's work in some parts: those of a step, or a save."""

    def __init__(self, rank: int, parts: Sequence[str]) -> None:
        self.rank, self.parts = rank, parts
        self.evidence = 0.0
        self.own: defaultdict[str, float] = defaultdict(float)
        self.others: defaultdict[str, float] = defaultdict(float)
        self.steps = 0.0
        self.said: SlowRank | None = None
        self.new_for = 0
        """Steps for which another part or cause than the one that was said has been found."""

    def add(self, steps: int, own: dict[str, float], others: dict[str, float], excess: float) -> None:
        """Add an interval; `excess` is the own work in it beyond what is allowed, in seconds."""
        # What was before the evidence began says nothing about its part.
        kept = 0.0
        if self.evidence > 0:
            kept = 1 - min(sum(own[part] for part in self.parts) / MEMORY_SECONDS, 1 / MEMORY_INTERVALS)
        self.steps = kept * self.steps + steps
        for name in own:
            self.own[name] = kept * self.own[name] + own[name]
            self.others[name] = kept * self.others[name] + others[name]
        gain = min(excess, steps * EVIDENCE_SECONDS / EVIDENCE_STEPS)
        self.evidence = min(max(self.evidence + gain, 0.0), EVIDENCE_SECONDS)

    def excess(self, part: str) -> float:
        return self.own[part] - self.others[part]

    def verdict(self) -> SlowRank:
        """Return what there is to say of this rank if it is slow."""
        phase = max(self.parts, key=self.excess)
        if self.said is not None and self.excess(phase) < CLEARLY * self.excess(self.said.phase):
            phase = self.said.phase
        load = self.own["load"] / self.others["load"] if self.others["load"] else 1.0
        # A slow card is slow outside of the experts, too.
        own, others = (of["forward"] - of[EXPERTS] for of in (self.own, self.others))
        more = load - 1
        experts = phase in ("forward", "backward") and more >= ALLOWED["step"] and own <= (1 + more / 2) * others
        return SlowRank(self.rank, phase, self.own[phase] / self.steps, self.others[phase] / self.steps, load, experts)


class SlowRanks:
    """Says which ranks are slow, from what all ranks have spent in intervals of some steps.

    Evidence is a sum of a rank's own work beyond that of the others and what is allowed (a CUSUM chart, Page 1954): it
    grows while a rank is slow, and noise takes it back to zero.

    Args:
        stages: the ranks of each pipeline stage, which have the same work.
    """

    def __init__(self, stages: Iterable[Sequence[int]]) -> None:
        self._stages = [tuple(ranks) for ranks in stages if len(ranks) > 1]
        self._suspects = {}
        for kind, parts in _WORK.items():
            for rank in chain.from_iterable(self._stages):
                self._suspects[rank, kind] = _Suspect(rank, parts)

    def add(self, steps: int, of_ranks: Sequence[Mapping[str, float]]) -> list[SlowRank]:
        """Return what is new: a slow rank, another part or cause of one, or its end.

        Args:
            steps: what the interval has.
            of_ranks: per rank the seconds that `PartClock` counted, and "load", the choices that its experts got.
        """
        found: list[SlowRank] = []
        if any(math.isnan(times[OTHER]) for times in of_ranks):
            return found
        for ranks in self._stages:
            for kind, parts in _WORK.items():
                work = {rank: sum(of_ranks[rank][part] for part in parts) for rank in ranks}
                if kind == "save" and not any(work.values()):
                    continue  # nothing was saved in these steps
                for rank in ranks:
                    others = [other for other in ranks if other != rank]
                    usual = {}
                    for name in (*parts, EXPERTS):
                        usual[name] = median(of_ranks[other][name] for other in others)
                    usual["load"] = fmean(of_ranks[one]["load"] for one in ranks)
                    excess = work[rank] - (1 + ALLOWED[kind]) * median(work[other] for other in others)
                    # What a host takes longer to launch costs nothing while its device is busy.
                    launching = sum(of_ranks[rank][part] - usual[part] for part in parts if part in _LAUNCHED)
                    excess -= min(of_ranks[rank][DEVICE], max(launching, 0.0))
                    suspect = self._suspects[rank, kind]
                    suspect.add(steps, {name: of_ranks[rank][name] for name in usual}, usual, excess)
                    found += _news(suspect, steps)
        return found


def _news(suspect: _Suspect, steps: int) -> list[SlowRank]:
    """Return what there is to say: each verdict once, and another one when it has held for `EVIDENCE_STEPS`."""
    said, now = suspect.said, suspect.verdict()
    if said is not None and suspect.evidence == 0:
        suspect.said = None
        return [replace(said, ended=True)]
    if said is None and suspect.evidence < EVIDENCE_SECONDS:
        return []
    if said is not None:
        is_other = (now.phase, now.experts) != (said.phase, said.experts)
        suspect.new_for = suspect.new_for + steps if is_other else 0
        if suspect.new_for < EVIDENCE_STEPS:
            return []
    suspect.said, suspect.new_for = now, 0
    return [now]


# The callback.


class Stragglers(Callback):
    """Samples this rank's time and exchanges the sums with the others; does nothing without `--log-straggler`."""

    _clock: PartClock | None = None

    def attach(self, trainer: Trainer) -> None:
        """Exchange hosts and stages. Collective over all ranks."""
        super().attach(trainer)
        if not trainer.run.logging.log_straggler:
            return
        ranks = all_gather_object((socket.gethostname(), trainer.rank_facts.pp_rank))
        self._hosts = [host for host, _ in ranks]
        stages: defaultdict[int, list[int]] = defaultdict(list)
        for rank, (_, stage) in enumerate(ranks):
            stages[stage].append(rank)
        self._stages = list(stages.values())
        self._slow = SlowRanks(self._stages)
        self._load: HostCopy | None = None
        self._gathering: tuple[dist.Work, list[Tensor], int] | None = None
        self._sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in ranks]
        self._sent_at, self._steps = trainer.progress.iteration, 0
        self._clock = PartClock(platform.has_cuda())

    def notes(self) -> Sequence[str]:
        """Say where no rank has another one to be compared with."""
        if self._clock is None or any(len(ranks) > 1 for ranks in self._stages):
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
            self._sums = [defaultdict(float) for _ in self._sums]

    def after_training(self) -> None:
        """Take what was gathered last."""
        if self._clock is not None:
            self._take()

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def _send(self, own: dict[str, float], iteration: int, update: RouterUpdate) -> None:
        # Counts of an interval before: they have arrived, so that no host waits for its device.
        load = 0.0 if self._load is None else float(self._load.result())
        self._load = self._load_of(update)
        mine = torch.tensor([own[name] for name in CLOCKED] + [load], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in self._hosts]
        into = rows if self.trainer.rank_facts.rank == 0 else None
        work = dist.gather(mine, into, dst=0, group=host_group(), async_op=True)
        self._gathering = (work, rows, iteration - self._sent_at)
        self._sent_at = iteration

    def _load_of(self, update: RouterUpdate) -> HostCopy | None:
        """Return the choices of all layers that this rank's experts got, on their way to the host."""
        facts = self.trainer.rank_facts
        own = [counts.view(facts.ep_size, -1)[facts.ep_rank].sum() for counts in update.tokens_per_expert]
        return HostCopy(torch.stack(own).sum()) if own else None

    def _take(self) -> None:
        if self._gathering is None:
            return
        (work, rows, steps), self._gathering = self._gathering, None
        work.wait()
        if self.trainer.rank_facts.rank != 0:
            return
        of_ranks = [dict(zip((*CLOCKED, "load"), row.tolist())) for row in rows]
        self._steps += steps
        for sums, times in zip(self._sums, of_ranks):
            for name, value in times.items():
                sums[name] += value
        for slow in self._slow.add(steps, of_ranks):
            host = self._hosts[slow.rank]
            facts = {"rank": slow.rank, "host": host, "phase": slow.phase, "experts": slow.experts, "ended": slow.ended}
            self.trainer.reporter.event("slow", slow.text(host), **facts)

    def _seconds_per_step(self) -> dict[str, list[float]]:
        """Return the seconds per step of each part, rank by rank; see `StepRecord.rank_seconds`."""
        found = {name: [sums[name] for sums in self._sums] for name in (*OWN_WORK, DEVICE)}
        # Nobody waits for the rank of a stage that comes last: what it spends in collectives is the exchange itself.
        within = [sums[COLLECTIVES] for sums in self._sums]
        found["exchange"], found["waiting"] = within[:], [0.0] * len(within)
        for ranks in self._stages:
            least = min(within[rank] for rank in ranks)
            for rank in ranks:
                found["exchange"][rank], found["waiting"][rank] = least, within[rank] - least
        return {name: [round(one / self._steps, 5) for one in values] for name, values in found.items()}
