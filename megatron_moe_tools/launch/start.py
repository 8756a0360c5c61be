"""Starts the ranks of this node by torch's elastic agent, passes signals on to them, and says how they ended."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

import megatron_moe
from megatron_moe.config.errors import ConfigError
from megatron_moe.io import launched
from megatron_moe.io.program import DONE, FAILED, INTERRUPTED, note
from megatron_moe.training.signals import signal_name
from megatron_moe_tools.launch.options import LaunchOptions

PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
# Python would search the folder first in which it was started, and a rank's would win over the installed package.
_RANK = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from megatron_moe_tools.pretrain import main; sys.exit(main(sys.argv[1:]))"
)
PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1") if hasattr(signal, name)
)
_POLL_SECONDS = 0.2


def start(options: LaunchOptions, flags: Sequence[str]) -> int:
    """Run the ranks of this node to their end and return the exit status; say once why they ended, if no rank has.

    Signals go to the ranks, which decide what to do: there is no limit on how long a checkpoint may take.
    """
    folder = Path(tempfile.mkdtemp(prefix="megatron-moe-"))
    os.environ[launched.FOLDER] = str(folder)
    os.environ[launched.COMMAND] = shlex.join([*launched.LAUNCHER.split(), *options.words, *flags])
    # torch sets it with a warning of five lines.
    if options.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    agent = _Agent(options, flags, folder)
    try:
        with _Signals() as signals:
            agent.start()
            _wait(agent, signals, options)
            ending = replace(agent.ending, by_signal=signals.first)
        if agent.is_alive():  # in a call of torch's that waits for other nodes
            ending = replace(ending, problem=f"ended by {signal_name(signals.first)} before its ranks were started")
        if text := ending.text(folder):
            note(f"{launched.LAUNCHER}: {text}")
    finally:
        del os.environ[launched.FOLDER], os.environ[launched.COMMAND]
        _remove(folder)
    if agent.is_alive():  # nothing ends that call
        os._exit(ending.status)
    return ending.status


class _Agent(threading.Thread):
    """The thread in which torch's agent joins the other nodes, starts the ranks and watches them.

    The main thread stays free for signals: a call of torch's that waits for another node would hold them up.
    """

    def __init__(self, options: LaunchOptions, flags: Sequence[str], folder: Path) -> None:
        super().__init__(name="agent", daemon=True)
        self._options, self._flags, self._folder = options, flags, folder
        self.ending = Ending()
        self.raised: BaseException | None = None

    def run(self) -> None:
        """Run the agent until all ranks have ended."""
        try:
            self._launch()
        except BaseException as error:
            self.raised = error

    def _launch(self) -> None:
        from torch.distributed import DistError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        if "LOGLEVEL" not in os.environ:  # by which torch's users ask for more
            for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        parser = torchrun.get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign] # it would print its usage, and end the process
        args = parser.parse_args([*self._options.words, "program"])
        args.training_script = "-c"  # which the parser would take for an option of its own
        args.training_script_args = [_RANK, str(PACKAGE_ROOT), *self._flags]
        if args.log_dir is None:  # torch would make a folder, and leave it
            args.log_dir = str(self._folder / "torch")
        try:
            torchrun.run(args)
        except ChildFailedError as error:
            self.ending = of_failures(error.failures)
        except (RendezvousError, DistError) as error:
            self.ending = Ending(problem=launched.not_met(self._options.where, error))
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"launch options {' '.join(self._options.words)}: {error}") from None


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


class _Signals:
    """Passes signals on to the ranks, which are the child processes; a context manager.

    Attributes:
        first: the number of the first signal, 0 without any.
        reached_ranks: whether a rank got one, which may have ended since.
    """

    def __init__(self) -> None:
        self.first = 0
        self.reached_ranks = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        for rank in ranks():
            self.reached_ranks = True
            try:
                rank.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def ranks() -> list[psutil.Process]:
    """Return the processes of the ranks that this launcher has started and that have not ended."""
    children = psutil.Process().children()
    return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def _wait(agent: _Agent, signals: _Signals, options: LaunchOptions) -> None:
    """Wait until the agent is done; before it has started ranks, say what it waits for, and leave at a signal.

    Raises:
        ConfigError: torch refuses an option.
    """
    waiting, started = launched.Waiting(), False
    while agent.is_alive():
        agent.join(_POLL_SECONDS)
        started = started or signals.reached_ranks or bool(ranks())
        if started:
            continue
        if signals.first:
            return
        if options.nnodes > 1 and waiting.is_due():
            note(
                f"{launched.LAUNCHER}: waiting for the other nodes of --nnodes {options.nnodes}, which meet at "
                f"{options.where}, for {waiting.seconds:.0f} s"
            )
    if agent.raised is not None:
        raise agent.raised


def _remove(folder: Path) -> None:
    """Remove the launcher's folder, except for reports of a fault that nothing else has."""
    shutil.rmtree(folder / "torch", ignore_errors=True)
    for name in (launched.REPORTED, launched.CONCLUSION):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


_OFTEN = {
    "SIGKILL": "Linux does that where memory runs out (dmesg says so), and so do people",
    "SIGSEGV": "a crash in compiled code",
    "SIGABRT": "compiled code gave up, and its last lines above say why",
    "SIGBUS": "often a full /dev/shm, which data workers and NCCL share memory in",
    "SIGILL": "an instruction that this processor does not have",
    "SIGFPE": "a crash in compiled code",
}


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its process and its exit status, which is minus the number of a signal that killed it."""

    rank: int
    pid: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"ended with status {self.status}"
        name = signal_name(-self.status)
        return f"was killed by {name}{f' ({_OFTEN[name]})' if name in _OFTEN else ''}"


@dataclass(frozen=True)
class Ending:
    """How the ranks of this node ended.

    Attributes:
        ranks: those that failed, the first to fail first.
        problem: why no rank was started; empty where the ranks were.
        by_signal: the first signal that the launcher got, 0 without any.
    """

    ranks: tuple[RankEnd, ...] = ()
    problem: str = ""
    by_signal: int = 0

    @property
    def status(self) -> int:
        """The launcher's exit status: INTERRUPTED after Ctrl-C, else the first failed rank's; DONE if none failed.

        It is as a shell has it: 128 and the number of a signal that killed the rank.
        """
        if self.problem:
            return 128 + self.by_signal if self.by_signal else FAILED
        if self.ranks and self.by_signal == signal.SIGINT:  # torch may have ended slower ranks by SIGTERM
            return INTERRUPTED
        status = self.ranks[0].status if self.ranks else DONE
        return status if status >= 0 else 128 - status

    def text(self, folder: Path) -> str:
        """Return the paragraph; empty where all went well, or a rank has said already why it did not.

        Args:
            folder: the launcher's, with what ranks have left there.
        """
        if self.problem:
            return self.problem
        if not self.ranks or (folder / launched.REPORTED).exists() or self.by_signal == signal.SIGINT:
            return ""
        if self.by_signal and -self.ranks[0].status == self.by_signal:
            return f"the ranks were ended by {signal_name(self.by_signal)}, without a checkpoint"
        return self._of_dead_rank(folder)

    def _of_dead_rank(self, folder: Path) -> str:
        first, *others = self.ranks
        parts = [f"rank {first.rank} on {socket.gethostname()} (process {first.pid}) {first}"]
        conclusion = folder / launched.CONCLUSION
        if conclusion.exists():
            parts.append(conclusion.read_text(encoding="utf-8").strip().rstrip("."))
        elif first.status >= 0:
            parts.append("its last lines above say why, or those of a rank on another node")
        if others:
            parts.append("then " + _listed(others))
        if any(folder.glob("stacks_*")):
            parts.append(f"where the others were is in {folder}")
        return ". ".join(part[0].upper() + part[1:] if number else part for number, part in enumerate(parts)) + "."


def of_failures(failures: Mapping[int, Any]) -> Ending:
    """Return the ending of torch's ProcessFailures, rank -> failure.

    torch looks at all ranks a few times a second. Where it finds several that have ended, those that a signal killed
    come first: a rank that ends by itself may do so because another one is gone.
    """
    ordered = sorted(failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
    return Ending(tuple(RankEnd(rank, failure.pid, failure.exitcode) for rank, failure in ordered))


def _listed(ends: list[RankEnd]) -> str:
    """Return how ranks ended, those that ended alike together."""
    alike: dict[str, list[int]] = {}
    for end in ends:
        alike.setdefault(str(end), []).append(end.rank)
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, sorted(r)))} {how}" for how, r in alike.items())
