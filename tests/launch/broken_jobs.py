"""Real runs in which one rank dies or hangs at a given place: what the watchdog makes of them.

Ranks run `pretrain_moe.main` with the fault that fault.json in the job's folder describes: {"rank", "iteration",
"phase", "kind"}, with "seconds" where it waits so long ("pause", and "time is up", which moves the clock of
`--exit-duration-in-mins` as well), and "slow_close" where the other ranks close their files slowly; without the file
they run undisturbed.
"""

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent, alive

PHASES = ("forward", "backward", "grad reduce", "save", "eval")
DEATHS = ("KILL", "SEGV", "exception", "exit")
HANGS = ("sleep", "STOP", "skipped", "wrong shape", "wrong order")
SIGNALS = ((signal.SIGTERM,), (signal.SIGUSR1,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM))
STEPS_TO_STOP = 4
"""Steps that end between the reading of the log, the signals, and the agreement of the ranks."""
BLAMED = {
    "KILL": "rank {rank} is gone",
    "SEGV": "rank {rank} is gone",
    "exit": "rank {rank} is gone",
    "exception": "rank {rank} failed at",
    "STOP": "rank {rank} is stopped (SIGSTOP)",
    "sleep": "rank {rank} did not come to the collective",
}


# ---- this side


class Breaking(Forked):
    """Starts ranks that meet in a store of this process, as torchrun's ranks do in its agent's; or, without `agent`, in
    rank 0's, as those do that Slurm starts."""

    def __init__(self, parent: RankParent, agent: bool = True) -> None:
        super().__init__(parent, "tests.launch.broken_jobs:main")
        self._agent = agent

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        if self._agent:
            super().start(argv, world_size, folder, log)
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._fork(argv, world_size, folder, log, port)


@dataclass
class Broken:
    """How a job ended: status, seconds after the fault, what it said, and what it left behind."""

    status: int | None
    seconds: float
    said: str
    left: list[str]

    def cause(self) -> str:
        """The verdict's first sentence, of whichever rank told it."""
        lines = [line for line in self.said.splitlines() if "ranks is ended" in line]
        return lines[0].partition("is ended")[2] if lines else ""

    def defects(self, kind: str, rank: int, seconds: float) -> list[str]:
        found = [] if self.status == 1 else [f"status {self.status}"]
        if self.seconds > seconds:
            found.append(f"it took {self.seconds:.1f} s, more than {seconds}")
        # Ranks whose collectives do not fit are told apart by a majority, which two ranks do not have.
        wanted = BLAMED.get(kind, "rank {rank}").format(rank=rank)
        if wanted not in self.cause():
            found.append(f"'{wanted}' is not in '{self.cause()}'")
        return found + self.left


def break_job(launcher: Any, folder: Path, argv: list[str], world_size: int, fault: dict[str, Any]) -> Broken:
    folder.mkdir(exist_ok=True)
    (folder / "fault.json").write_text(json.dumps(fault))
    shared = set(os.listdir("/dev/shm"))
    launcher.start(argv, world_size, folder, folder / "log.txt")
    status = launcher.wait(240)
    ended = time.time()
    (folder / "fault.json").unlink()
    began = folder / "fault_began"
    seconds = ended - float(began.read_text()) if began.exists() else -1.0
    # What works in the folder: the ranks, and whatever they started.
    cwds = {one.pid: one.info["cwd"] for one in psutil.process_iter(["cwd"])}
    left = [f"process {pid} is there" for pid, cwd in cwds.items() if cwd == str(folder) and alive(pid)]
    left += [f"/dev/shm/{name} is there" for name in set(os.listdir("/dev/shm")) - shared if "torch" in name]
    if not began.exists():
        left.append("the fault did not happen")
    began.unlink(missing_ok=True)
    return Broken(status, seconds, (folder / "log.txt").read_text(errors="replace"), left)


# ---- signals


def signalled_jobs(
    launcher: Any, folder: Path, argv: list[str], world_size: int, draw: random.Random, trials: int
) -> dict[str, Any]:
    """Jobs that get SIGTERM or SIGUSR1 at a random time, on one rank or all, once or twice.

    Each has to save where it is and end with 0 within 30 s and a few steps, and then goes on as an undisturbed job.
    """
    oracle = kills.undisturbed_job(launcher, folder / "oracle", argv, world_size)
    found: list[str] = []
    sent, jobs, longest = 0, 0, 0.0
    while sent < trials:
        here = folder / f"signalled{jobs}"
        here.mkdir()
        jobs += 1
        launcher.start(argv, world_size, here, here / "log.txt")
        assert kills.until_lines(launcher, here / "metrics.jsonl", 1) is None, kills.tail(here)
        if launcher.wait(draw.uniform(0.0, oracle.seconds / 2)) is None:
            sent, began, before = sent + 1, time.monotonic(), len(kills.raw_lines(here / "metrics.jsonl"))
            chosen = launcher.ranks() if draw.random() < 0.5 else launcher.ranks()[:1]
            for number in draw.choice(SIGNALS):
                for pid in chosen:
                    with contextlib.suppress(ProcessLookupError):  # it was done, or the first signal has ended it
                        os.kill(pid, number)
                time.sleep(draw.choice([0.0, 0.05]))
            status = launcher.wait(30)
            longest = max(longest, time.monotonic() - began)
            reached = len(kills.raw_lines(here / "metrics.jsonl"))
            saved = [path.name for path in (here / "checkpoints").glob("iter_*")]
            if status != 0 or f"iter_{reached:07d}" not in saved or reached > before + STEPS_TO_STOP:
                found.append(f"trial {sent}: status {status}, from {before} to {reached}, saved {saved}")
            if status is None:
                launcher.kill(None)
            found += kills.steps_in(here / "checkpoints")[1]
        found += kills.differences(kills.undisturbed_job(launcher, here, argv, world_size), oracle, 0)
    return {"trials": sent, "failures": len(found), "jobs": jobs, "longest_seconds": longest, "found": found[:10]}


PLACES = {"start": 60.0, "forward": 2.0, "eval": 2.0, "save": 5.0}
"""Where a job is asked to stop, and the seconds that one rank waits there, at each micro-batch or once."""


def stopped_in(launcher: Any, folder: Path, argv: list[str], world_size: int, place: str, way: str) -> list[str]:
    """Ask a job to stop, by a signal or the clock, while the others wait for one rank; return what is wrong."""
    folder.mkdir()
    at = 0 if place == "start" else 3
    fault: dict[str, Any] = {"rank": 1, "phase": place, "iteration": at, "seconds": PLACES[place]}
    fault["kind"] = "pause" if way.startswith("SIG") else "time is up"
    (folder / "fault.json").write_text(json.dumps(fault))
    launcher.start(argv, world_size, folder, folder / "log.txt")
    deadline = time.monotonic() + 120
    while not (folder / "fault_began").exists() and launcher.wait(0.05) is None:
        assert time.monotonic() < deadline, kills.tail(folder)
    began = time.monotonic()
    if way.startswith("SIG"):
        for pid in launcher.ranks():
            os.kill(pid, getattr(signal, way))
    status = launcher.wait(30)  # a launcher kills then
    seconds, said = time.monotonic() - began, (folder / "log.txt").read_text(errors="replace")
    if status is None:
        launcher.kill(None)
    (folder / "fault.json").unlink()
    reached, saved = len(kills.raw_lines(folder / "metrics.jsonl")), [*(folder / "checkpoints").glob("iter_*")]
    found = [] if status == 0 else [f"{place}, {way}: status {status} after {seconds:.1f} s: {said[-500:]}"]
    if reached != (0 if place == "start" else 3) or [path.name for path in saved][-1:] != ["iter_0000003"][:reached]:
        found.append(f"{place}, {way}: reached {reached}, saved {saved}")
    reason = f"by {way}" if way.startswith("SIG") else "(--exit-duration-in-mins"
    if f"{reason}" not in said:
        found.append(f"{place}, {way}: said {said[-500:]}")
    print(f"{place}, {way}: {seconds:.1f} s")
    return found


# ---- in the ranks


def _act(fault: dict[str, Any]) -> None:
    Path("fault_began").write_text(str(time.time()))
    kind = fault["kind"]
    if kind == "time is up":
        fault["stop"].started -= 24 * 3600
    if kind in ("pause", "time is up"):
        time.sleep(fault["seconds"])
        return
    if kind == "exception":
        raise ValueError("a fault of the test")
    if kind == "exit":
        os._exit(9)
    if kind == "sleep":
        time.sleep(10000)
    for name in kind.split():
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


def _install(fault: dict[str, Any]) -> None:
    """Change the functions of the phase; the iteration is that of the step that runs."""
    from megatron_moe.checkpoint import folder as checkpoint_folder
    from megatron_moe.checkpoint import save as save_file
    from megatron_moe.training import build, evaluate, step, step_sums
    from megatron_moe.training.signals import StopSignals
    from megatron_moe.training.trainer import Trainer

    kind, phase, now = fault["kind"], fault["phase"], {"iteration": 0}
    listen = StopSignals.__enter__

    def listening(self: StopSignals) -> StopSignals:
        fault["stop"] = self
        return listen(self)

    StopSignals.__enter__ = listening  # type: ignore[method-assign]
    tell = Trainer.at_step

    def counted(self: Any, mark: str) -> None:
        now["iteration"] = self.progress.iteration + 1
        tell(self, mark)

    Trainer.at_step = counted  # type: ignore[method-assign]

    def first(function: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if now["iteration"] < fault["iteration"]:
                return function(*args, **kwargs)
            if instead is not None:
                return instead(function, *args, **kwargs)
            _act(fault)
            return function(*args, **kwargs)

        return wrapped

    if kind in ("skipped", "wrong shape", "wrong order"):
        step_sums.sum_over_ranks = first(step_sums.sum_over_ranks, lambda *args: _odd_sum(kind, *args))
    elif phase == "start":
        build.build_model = first(build.build_model)
    elif phase == "forward":
        step.forward_step = first(step.forward_step)
    elif phase == "backward":
        forward_step = step.forward_step

        def with_hook(*args: Any) -> Any:
            output, loss_func = forward_step(*args)
            if now["iteration"] >= fault["iteration"] and output.requires_grad:
                output.register_hook(lambda _: _act(fault))
            return output, loss_func

        step.forward_step = with_hook
    elif phase == "grad reduce":
        step.finalize_model_grads = first(step.finalize_model_grads)
    elif phase == "save":
        save_file.CheckpointSave._write = first(save_file.CheckpointSave._write)  # type: ignore[method-assign]
        # The other rank, which raises the same error, ends before this one has cleared away.
        discard = checkpoint_folder.discard
        checkpoint_folder.discard = lambda *of: (time.sleep(3), discard(*of))  # type: ignore[assignment, func-returns-value]
    else:
        evaluate.forward_step = first(evaluate.forward_step)


def _odd_sum(kind: str, real: Callable[..., list[float]], values: Any, *shared: Any) -> list[float]:
    import torch

    Path("fault_began").write_text(str(time.time()))
    if kind == "skipped":
        return torch.cat([values, *shared]).tolist()
    if kind == "wrong shape":
        return real(torch.cat([values, values]), *shared)[len(values) :]
    torch.distributed.barrier()
    return real(values, *shared)


def main(argv: list[str]) -> int:
    """Run `pretrain_moe.main` on this rank, with the fault where it is this rank's."""
    import pretrain_moe

    if os.path.exists("fault.json"):
        fault = json.loads(Path("fault.json").read_text())
        if fault["rank"] == int(os.environ["RANK"]):
            _install(fault)
        else:
            from megatron_moe.report.reporter import Reporter

            close = Reporter.close  # of the files that a run reports to: it takes its time, as over a network

            def close_slowly(self: Reporter, *args: Any) -> None:
                time.sleep(fault.get("slow_close", 0.0))
                close(self, *args)

            Reporter.close = close_slowly  # type: ignore[method-assign]
    try:
        return pretrain_moe.main(argv)
    except SystemExit as ended:  # before the first step; this process goes on, as no program's does
        return int(ended.code or 0)
