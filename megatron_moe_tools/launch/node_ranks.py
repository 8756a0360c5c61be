"""Starts the ranks of this node for a command that takes torchrun's options, and says how they ended.

torch's elastic agent starts the ranks, and signals are passed on to them. The options are taken by a table: torch's own
parser reads the values in the end, when flags and options have been checked, for torch takes seconds to load. A test
compares the table with that parser.
"""

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

import megatron_moe
from megatron_moe.config.errors import ConfigError
from megatron_moe.io import launched
from megatron_moe.io.program import DONE, FAILED, INTERRUPTED, note
from megatron_moe.platform import host
from megatron_moe.training.signals import signal_name

# ---- torchrun's options

VALUE, SWITCH, NUMBER, SECONDS = "VALUE", "", "N", "S"
"""What follows an option: any word, nothing, a whole number, or a number of seconds."""

TAKEN = {
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-port", "--shutdown-timeout"), NUMBER),
    **dict.fromkeys(("--nproc-per-node", "--master-addr", "--local-addr", "--role", "--numa-binding"), VALUE),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), VALUE),
    **dict.fromkeys(("--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--event-log-handler"), VALUE),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), VALUE),
    "--standalone": SWITCH,
    "--monitor-interval": SECONDS,
}
"""Option -> what follows it."""

SHORT = {"-r": "--redirects", "-t": "--tee", "-m": "--module"}

PROGRAM = "megatron_moe_tools.pretrain"
_PROGRAM = f"the ranks run {PROGRAM}; for another program use torchrun"
REFUSED = {
    "--max-restarts": "a rank that dies ends the job; start the same command again, with --load it continues from its "
    "newest checkpoint",
    "--module": _PROGRAM,
    "--no-python": _PROGRAM,
    "--run-path": _PROGRAM,
    "--start-method": _PROGRAM,
    "--logs-specs": "use --log-dir, --redirects and --tee",
    "--signals-to-handle": "SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 are passed on to the ranks; leave it out",
    "--virtual-local-rank": "ranks find their device, and one another, by LOCAL_RANK; leave it out",
}
"""torchrun's other options -> why they are refused, and what works."""


@dataclass(frozen=True)
class LaunchOptions:
    """The launch options of a command line.

    Attributes:
        words: as torch's parser reads them, with the number of ranks per node as a number.
        nnodes, nproc_per_node: nodes of the job, and ranks on each.
        where: the rendezvous as it was given, for messages.
    """

    words: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    where: str

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nnodes * self.nproc_per_node


def split(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[LaunchOptions | None, list[str]]:
    """Return the launch options, None where there are none, and the other words of a command line, in their order.

    Like torchrun, it takes the options also with underscores, as `--nnodes=2`, and from variables such as PET_NNODES.

    Raises:
        ConfigError: an option is refused, is given twice, lacks its value, or has one of the wrong kind.
    """
    given, rest = {}, []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        typed, equals, value = word.partition("=")
        name = SHORT.get(typed, typed.replace("_", "-"))
        if name in REFUSED:
            raise ConfigError(f"{typed}: {REFUSED[name]}")
        if name not in TAKEN:
            rest.append(word)
            continue
        if name in given:
            raise ConfigError(f"{typed}: is given twice; keep one")
        if TAKEN[name] != SWITCH and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{typed}: a value is missing, as in {typed} {_example(name)}")
            value = waiting.pop(0)
        given[name] = value
    from_variables = {}
    for name in TAKEN:
        variable = "PET_" + name[2:].replace("-", "_").upper()
        if variable in environment and name not in given:
            from_variables[name] = environment[variable]
    if not given and not {"--nnodes", "--nproc-per-node"} & from_variables.keys():
        return None, rest
    if "RANK" in environment:
        raise ConfigError(
            f"{next(iter(given or from_variables))}: RANK={environment['RANK']} is set, so this process is a rank that "
            "a launcher has started; leave the launch options out, or unset RANK"
        )
    return _options(given, {**from_variables, **given}), rest


def _options(given: Mapping[str, str], all_of_them: Mapping[str, str]) -> LaunchOptions:
    """Check the values and count the ranks. `--nnodes` may be a range of one number."""
    for name, value in all_of_them.items():
        kind, text = TAKEN[name], value
        if kind == SWITCH:
            if value:
                raise ConfigError(f"{name} {value}: takes no value; leave {value!r} out")
            continue
        if not value:
            raise ConfigError(f"{name}: its value is empty; write {name} {_example(name)}, or leave it out")
        if name == "--nnodes" and ":" in value:
            least, _, most = value.partition(":")
            if least != most:
                raise ConfigError(
                    f"--nnodes {value}: layout and batch need the number of ranks before they start; give one number"
                )
            text = least
        if kind == NUMBER and not (text.isdecimal() and (int(text) > 0 or name != "--nnodes")):
            raise ConfigError(f"{name} {value}: is no number of this kind; e.g. {name} {_example(name)}")
        if kind == SECONDS and not text.replace(".", "", 1).isdecimal():
            raise ConfigError(f"{name} {value}: is no number of seconds; e.g. {name} 0.1")
    # A word asks for as many ranks on each node as this one has devices, or else processors.
    typed = all_of_them.get("--nproc-per-node", "1")
    if typed in ("gpu", "auto") and host.visible_devices():
        nproc_per_node = host.visible_devices()
    elif typed in ("cpu", "auto"):
        nproc_per_node = len(os.sched_getaffinity(0))
    elif typed == "gpu":
        raise ConfigError("--nproc-per-node gpu: there is no NVIDIA device here; give a number, or cpu")
    elif not typed.isdecimal() or int(typed) < 1:
        raise ConfigError(f"--nproc-per-node {typed}: is neither a number above 0 nor gpu, cpu or auto")
    else:
        nproc_per_node = int(typed)
    words = []
    for name, value in given.items():
        if name != "--nproc-per-node":
            words.append(f"{name}={value}" if value else name)
    master = f"{all_of_them.get('--master-addr', '')}:{all_of_them.get('--master-port', '')}".strip(":")
    return LaunchOptions(
        (*words, f"--nproc-per-node={nproc_per_node}"),
        int(all_of_them.get("--nnodes", "1").split(":")[0]),
        nproc_per_node,
        all_of_them.get("--rdzv-endpoint") or master or "this machine",
    )


def _example(name: str) -> str:
    examples = {"--nproc-per-node": "8", "--master-addr": "node1", "--master-port": "29500", "--rdzv-backend": "c10d"}
    return examples.get(name, {NUMBER: "2", SECONDS: "0.1"}.get(TAKEN[name], "VALUE"))


# ---- the ranks

PACKAGE_ROOT = Path(megatron_moe.__file__).resolve().parents[1]
# Python would search the folder first in which it was started, and a rank's would win over the installed package.
_RANK = (
    "import sys; from importlib import import_module; sys.path[0] = sys.argv.pop(1); "
    "sys.exit(import_module(sys.argv.pop(1)).main(sys.argv[1:]))"
)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_POLL_SECONDS = 0.2


def start(options: LaunchOptions, flags: Sequence[str], name: str = launched.LAUNCHER, module: str = PROGRAM) -> int:
    """Run the ranks of this node to their end and return the exit status; say once why they ended, if no rank has.

    Signals go to the ranks, which decide what to do: there is no limit on how long a checkpoint may take.

    Args:
        name: the command, of two words.
        module: its `main` is what a rank runs.
    """
    folder = Path(tempfile.mkdtemp(prefix="megatron-moe-"))
    os.environ[launched.FOLDER] = str(folder)
    os.environ[launched.COMMAND] = shlex.join([*name.split(), *options.words, *flags])
    # torch sets it with a warning of five lines.
    if options.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    agent = _Agent(options, [module, *flags], folder)
    try:
        with ExitStack() as stack:
            for number in PASSED_ON:
                stack.callback(signal.signal, number, signal.signal(number, agent.pass_on) or signal.SIG_DFL)
            agent.start()
            waiting, started = launched.Waiting(), False
            while agent.is_alive():
                agent.join(_POLL_SECONDS)
                started = started or agent.reached_ranks or bool(ranks())
                if started:
                    continue
                if agent.first_signal:
                    break
                if options.nnodes > 1 and waiting.is_due():
                    note(
                        f"{name}: waiting for the other nodes of --nnodes {options.nnodes}, which meet at "
                        f"{options.where}, for {waiting.seconds:.0f} s"
                    )
            if agent.raised is not None:
                raise agent.raised
            ending = replace(agent.ending, by_signal=agent.first_signal)
        if agent.is_alive():  # in a call of torch's that waits for other nodes
            problem = f"ended by {signal_name(agent.first_signal)} before its ranks were started"
            ending = replace(ending, problem=problem)
        if text := ending.text(folder):
            note(f"{name}: {text}")
    finally:
        del os.environ[launched.FOLDER], os.environ[launched.COMMAND]
        # What stays are reports of a fault that nothing else has.
        shutil.rmtree(folder / "torch", ignore_errors=True)
        for name in (launched.REPORTED, launched.CONCLUSION):
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    if agent.is_alive():  # nothing ends that call
        os._exit(ending.status)
    return ending.status


class _Agent(threading.Thread):
    """The thread in which torch's agent joins the other nodes, starts the ranks and watches them.

    The main thread stays free for signals: a call of torch's that waits for another node would hold them up.

    Attributes:
        ending: how the ranks ended.
        raised: what the thread raised, such as the ConfigError for an option that torch refuses.
        first_signal: the number of the first signal, 0 without any.
        reached_ranks: whether a rank got one, which may have ended since.
    """

    def __init__(self, options: LaunchOptions, flags: Sequence[str], folder: Path) -> None:
        super().__init__(name="agent", daemon=True)
        self._options, self._flags, self._folder = options, flags, folder
        self.ending = Ending()
        self.raised: BaseException | None = None
        self.first_signal = 0
        self.reached_ranks = False

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: pass it on to the ranks, which are the child processes."""
        self.first_signal = self.first_signal or number
        for rank in ranks():
            self.reached_ranks = True
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    def run(self) -> None:
        """Run torch's agent until all ranks have ended."""
        try:
            from torch.distributed import DistError
            from torch.distributed import run as torchrun
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.elastic.rendezvous import RendezvousError

            if "LOGLEVEL" not in os.environ:  # by which torch's users ask for more
                for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
                    logging.getLogger(name).setLevel(logging.CRITICAL)
            parser = torchrun.get_args_parser()
            parser.error = _refuse  # type: ignore[method-assign] # it would print its usage, and end the process
            try:
                args = parser.parse_args([*self._options.words, "program"])
                args.training_script = "-c"  # which the parser would take for an option of its own
                args.training_script_args = [_RANK, str(PACKAGE_ROOT), *self._flags]
                if args.log_dir is None:  # torch would make a folder, and leave it
                    args.log_dir = str(self._folder / "torch")
                torchrun.run(args)
            except ChildFailedError as error:
                self.ending = of_failures(error.failures)
            except (RendezvousError, DistError) as error:
                self.ending = Ending(problem=launched.not_met(self._options.where, error))
            except (ValueError, AssertionError) as error:
                raise ConfigError(f"launch options {' '.join(self._options.words)}: {error}") from None
        except BaseException as error:
            self.raised = error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def ranks() -> list[psutil.Process]:
    """Return the processes of the ranks that this launcher has started and that have not ended."""
    children = psutil.Process().children()
    return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


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
        return f"was killed by {name} ({_OFTEN[name]})" if name in _OFTEN else f"was killed by {name}"


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
        if self.problem and self.by_signal:
            return 128 + self.by_signal
        if self.problem:
            return FAILED
        if self.ranks and self.by_signal == signal.SIGINT:  # torch may have ended slower ranks by SIGTERM
            return INTERRUPTED
        if not self.ranks:
            return DONE
        status = self.ranks[0].status
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
        first, *others = self.ranks
        parts = [f"rank {first.rank} on {socket.gethostname()} (process {first.pid}) {first}"]
        conclusion = folder / launched.CONCLUSION
        if conclusion.exists():
            parts.append(conclusion.read_text(encoding="utf-8").strip().rstrip("."))
        elif first.status >= 0:
            parts.append("its last lines above say why, or those of a rank on another node")
        if others:
            alike: dict[str, list[int]] = {}
            for end in others:
                alike.setdefault(str(end), []).append(end.rank)
            texts = []
            for how, numbers in alike.items():
                who = "rank" if len(numbers) == 1 else "ranks"
                texts.append(f"{who} {', '.join(map(str, sorted(numbers)))} {how}")
            parts.append("then " + "; ".join(texts))
        if any(folder.glob("stacks_*")):
            parts.append(f"where the others were is in {folder}")
        return ". ".join([parts[0], *(f"{part[0].upper()}{part[1:]}" for part in parts[1:])]) + "."


def of_failures(failures: Mapping[int, Any]) -> Ending:
    """Return the ending of torch's ProcessFailures, rank -> failure.

    torch looks at all ranks a few times a second. Where it finds several that have ended, those that a signal killed
    come first: a rank that ends by itself may do so because another one is gone.
    """
    ordered = sorted(failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
    return Ending(tuple(RankEnd(rank, failure.pid, failure.exitcode) for rank, failure in ordered))
