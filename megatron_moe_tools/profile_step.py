"""megatron-moe profile: run some steps of a run, print where their time goes by station, write a Chrome trace.

docs/internals/journey.md has the stations. In the forward pass a station is a range around a function or a module of
the run; an operation belongs to the innermost range that it is in. In the backward pass an operation belongs to the
station whose operation it is the backward of: autograd numbers both alike. The ranges are those of
`training/profiler.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, local_world_size, require_rendezvous
from megatron_moe.config.presets import with_made_up_data
from megatron_moe.config.rules.sources import READ_WITH, SCALARS
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import require_writable
from megatron_moe.io.program import DONE, run_program, say
from megatron_moe.report.records import StepRecord
from megatron_moe.report.sink import Sink
from megatron_moe.training.plan import check_start
from megatron_moe_tools import compat

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import profile

NAME = "megatron-moe profile"

OPERATIONS = {"_CrossEntropy": "loss"}
"""Operation -> its station, where no function or module of ours is around it."""
ELSEWHERE = "elsewhere"
_BACKWARD = "autograd::engine::evaluate_function: "
# What belongs to another profile, or to the run whose flags these are.
_REPORTS = {"profile", "tensorboard_dir", "wandb_project", "mlflow_experiment", "moe_routing_trace_path"}
_NO_REPORTS = {*_REPORTS, *SCALARS, "mlflow_tracking_uri", "mlflow_run_name"}.union(
    *(READ_WITH.get(flag, ()) for flag in _REPORTS)
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s [--profile-steps N] [--trace FILE] [the run's flags]",
        description="Run some training steps and print where rank 0's time goes, by the stations of a token's journey.",
        epilog="Other flags, such as --preset tiny --bf16, are those of megatron-moe train; without data, tokens are "
        "made up. The run ends after the profiled steps. Several ranks: torchrun ... -m megatron_moe profile. Exit "
        "status: 0 done; 1 a fault of the run; 2 a mistake in the flags.",
        allow_abbrev=False,
    )
    p.add_argument("--profile-steps", type=int, default=3, metavar="N", help="steps to profile (default: 3)")
    p.add_argument("--profile-warmup", type=int, default=2, metavar="N", help="steps before those (default: 2)")
    p.add_argument("--trace", metavar="FILE", help="write a Chrome trace (chrome://tracing, ui.perfetto.dev)")
    return p


def main(argv: list[str]) -> int:
    """Profile what the flags name, and return the exit status."""
    return run_program(NAME, _main, argv)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    for name in ("profile_steps", "profile_warmup"):
        if (number := getattr(flags, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: it has to be at least 1")
    require_writable("--trace", flags.trace)
    _, world_size = launched_world()
    run = with_made_up_data(compat.parse(rest, filled_in, world_size))
    rules.check(run, world_size)
    silent = {name: getattr(Run().logging, name) for name in _NO_REPORTS}
    steps = flags.profile_warmup + flags.profile_steps
    run = replace(run, train_iters=steps, save=None, eval_iters=0, exit_interval=None, **silent)
    require_rendezvous(world_size)
    check_start(run, world_size, local_world_size(world_size))
    # Not before flags and files are right: loading torch and the engine takes seconds.
    from megatron_moe.training.callbacks.profiler import profiler_ranges
    from megatron_moe.training.run import pretrain

    profiler = StepProfiler(flags.profile_warmup, steps)
    with profiler_ranges():
        pretrain(run, also=(profiler,))
    if profiler.shares is None or profiler.profile is None:  # another rank than 0
        return DONE
    say(text(profiler.shares, flags.profile_steps))
    if flags.trace is not None:
        profiler.profile.export_chrome_trace(flags.trace)
        say(f"wrote {flags.trace}")
    return DONE


@dataclass
class Share:
    """The time of one station in ms, on the host without what it calls at other stations, and on the GPU."""

    forward: float = 0.0
    backward: float = 0.0
    device: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)

    @property
    def host(self) -> float:
        """The time on the host, forward and backward."""
        return self.forward + self.backward


class StepProfiler(Sink):
    """A sink that profiles the steps of a run on rank 0 after the first `warmup`, up to step `last`.

    Attributes:
        shares: what came of it, by station; None before the last profiled step.
        profile: torch's, for a trace.
    """

    def __init__(self, warmup: int, last: int) -> None:
        self._warmup, self._last, self._steps = warmup, last, 0
        self.shares: dict[str, Share] | None = None
        self.profile: profile | None = None

    def step(self, record: StepRecord) -> None:
        from torch.profiler import profile

        from megatron_moe.training.callbacks.profiler import activities

        self._steps += 1
        if self._steps == self._warmup:
            self.profile = profile(activities=activities())
            self.profile.start()
        if self._steps == self._last and self.profile is not None:
            self.profile.stop()
            self.shares = shares(self.profile.events())


def shares(events: Iterable[FunctionEvent]) -> dict[str, Share]:
    """Return each station's share of the time of these events of a profile."""
    import torch

    from megatron_moe.training.callbacks.profiler import PREFIX

    by_sequence: dict[int, str] = {}
    for event in events:
        # An operation without a graph bears the number that the next one with a graph will take: the last one counts.
        station, node = _place(event)
        if event.sequence_nr >= 0 and node is None:
            by_sequence[event.sequence_nr] = station
    found: dict[str, Share] = {}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU or event.is_async:
            continue
        station, node = _place(event)
        if station == ELSEWHERE and node is not None:
            station = by_sequence.get(node.sequence_nr, ELSEWHERE)
        share = found.setdefault(station, Share())
        took = event.self_cpu_time_total / 1e3
        if node is None:
            share.forward += took
        else:
            share.backward += took
        share.device += event.self_device_time_total / 1e3
        if not event.name.startswith(PREFIX):
            name = event.name.removeprefix(_BACKWARD)
            share.operations[name] = share.operations.get(name, 0.0) + took
    return found


def _place(event: FunctionEvent) -> tuple[str, FunctionEvent | None]:
    """Return the station of the innermost range around an event, and the step of autograd that it is in, if any.

    What is around a backward pass is not the station of what it computes.
    """
    from megatron_moe.training.callbacks.profiler import PREFIX

    station: str | None = None
    one: FunctionEvent | None = event
    while one is not None and not one.name.startswith(_BACKWARD):
        if station is None and one.name.startswith(PREFIX):
            station = one.name.removeprefix(PREFIX)
        elif station is None:
            station = OPERATIONS.get(one.name)
        one = one.cpu_parent
    return station or ELSEWHERE, one


def text(found: dict[str, Share], steps: int) -> str:
    """Return the table of the shares, per step, the largest first."""
    total, device = 0.0, 0.0
    for one in found.values():
        total, device = total + one.host, device + one.device
    lines = [f"{'station':<16}{'forward ms':>11}{'backward ms':>12}{'share':>7}"]
    if device:
        lines[0] += f"{'GPU ms':>9}"
    for name, one in sorted(found.items(), key=lambda item: -item[1].host):
        line = f"{name:<16}{one.forward / steps:>11.2f}{one.backward / steps:>12.2f}{one.host / total:>7.1%}"
        if device:
            line += f"{one.device / steps:>9.2f}"
        most = sorted(one.operations.items(), key=lambda item: -item[1])[:3]
        lines.append(line + "  " + ", ".join(f"{key} {ms / steps:.2f}" for key, ms in most))
    lines.append(f"{'total':<16}{total / steps:>11.2f} ms a step on rank 0, in {steps} steps")
    lines.append("at the right: the largest operations of a station")
    return "\n".join(lines)
