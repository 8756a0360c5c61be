"""Many distributed test cases in one set of processes.

Ranks are forked once per test session (`ranks.RankParent`) and then serve case after case. A case is a module-level
function that every rank runs, with the default gloo process group initialised for it. Whatever it returns comes back,
one result per rank:

    def sums(factor):                                  # runs on every rank
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return factor * value.item()

    def test_every_rank_has_the_sum(gloo):             # `gloo` is the session's pool (tests/conftest.py)
        assert gloo.run(2, sums, factor=10.0) == [30.0, 30.0]

- `gloo.run(n, function, **kwargs)`: n = 1 is the oracle: one rank in a world of its own.
- For a model, call `megatron_moe.parallel.groups.initialize(run)` in the case; the harness destroys the groups and the
  engine's other globals after every case, so the next one may use another layout.
- The function's file is loaded by path in the ranks: it may be the test file itself or a file beside it. Arguments and
  results are pickled: configurations, tensors, plain data; no modules, no process groups.
- An exception on any rank fails the call with `CaseFailed`, which shows every rank's traceback. A case that takes
  longer than `gloo.timeout` seconds (default 300; `gloo.run_within(seconds, n, ...)`) is ended, and the stacks shown.
- Ranks see no CUDA device. RANK, LOCAL_RANK and WORLD_SIZE are set, MASTER_ADDR is not.
"""

import ctypes
import faulthandler
import gc
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.ranks import Child, RankParent

START_SECONDS = 120.0
# After one rank has failed, its peers see closed connections at once; this is for those that compute.
GRACE_SECONDS = 60.0


class CaseFailed(AssertionError):
    """A case raised on some rank, or did not end. The message holds each rank's traceback or stack."""


class _Rank:
    """One process that serves cases, and this side of its connection."""

    def __init__(self, parent: RankParent, number: int, folder: Path, package: Path | None) -> None:
        self.number = number
        self.log = folder / f"rank{number}.log"
        self.log.write_bytes(b"")
        self._parent = parent
        address = folder / f"rank{number}.socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            listener.settimeout(START_SECONDS)
            how = {"address": str(address), "package": None if package is None else str(package)}
            child = Child("tests.helpers.gloo_pool:serve", how, str(self.log), own_session=True)
            (self.pid,) = parent.fork([child])
            self.pipe = Connection(listener.accept()[0].detach())
        address.unlink()

    def status(self, seconds: float = 0.0) -> int | None:
        """Return the exit status, None where the process runs on after that many seconds."""
        return self._parent.statuses([self.pid], seconds)[0]

    def end(self) -> None:
        """Kill the process with everything it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.status(GRACE_SECONDS)
        self.pipe.close()

    def stack(self) -> str:
        """The stacks of the process's threads, asked for by a signal that its faulthandler answers into the log."""
        before = self.log.stat().st_size
        if (status := self.status()) is not None:
            return f"ended with status {status}; its last output:\n{self.output()}"
        os.kill(self.pid, signal.SIGUSR1)
        answer, deadline = b"", time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.5)  # the answer is there when it no longer grows
            so_far, answer = answer, self.log.read_bytes()[before:]
            if answer and answer == so_far:
                break
        return answer.decode(errors="replace") or "no answer"

    def output(self) -> str:
        """The end of what the process has printed."""
        return self.log.read_text(errors="replace")[-3000:]


class GlooPool:
    """Ranks that wait for cases. Started when first needed, as many as were needed so far; `close` ends them.

    Args:
        parent: the process that forks them.
        timeout: seconds that a case may take.
        package: a folder with a copy of the package, which the ranks run (`forked_doctor.py`); None: the package.
    """

    def __init__(self, parent: RankParent, timeout: float = 300.0, package: Path | None = None) -> None:
        self.timeout = timeout
        self._package = package
        self._parent = parent
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="gloo-pool-"))
        self._store: Any = None
        self._cases = 0

    def run(self, world_size: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function(**kwargs)` on `world_size` ranks; returns their results by rank."""
        return self.run_within(self.timeout, world_size, function, **kwargs)

    def run_within(self, seconds: float, world_size: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """As `run`, with a limit of its own."""
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank(self._parent, len(self._ranks), self._folder, self._package))
        if self._store is None:
            # Where the ranks meet. A file would do, but ranks look into one only every ten milliseconds.
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._cases += 1
        case = {
            "file": function.__code__.co_filename,
            "function": function.__qualname__,
            "kwargs": kwargs,
            "number": self._cases,
            "port": self._store.port,
            "world_size": world_size,
            "seconds": seconds,
            "test": os.environ.get("PYTEST_CURRENT_TEST", ""),
        }
        ranks = self._ranks[:world_size]
        answers: dict[int, tuple[bool, Any]] = {}
        for rank in ranks:
            try:
                rank.pipe.send_bytes(pickle.dumps({**case, "rank": rank.number}))
            except BrokenPipeError:
                answers[rank.number] = (False, f"ended before the case; its last output:\n{rank.output()}")
        self._collect(ranks, answers, seconds)
        for rank in ranks:
            if rank.number in answers:
                with suppress(OSError):  # it has ended
                    rank.pipe.send_bytes(b"leave")
        return self._results(ranks, answers, function.__qualname__)

    def close(self) -> None:
        """End all ranks and remove their files."""
        self._end_ranks()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, ranks: list[_Rank], answers: dict[int, tuple[bool, Any]], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        waiting = {rank.pipe: rank for rank in ranks if rank.number not in answers}
        while waiting:
            if any(not good for good, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank.number] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    rank.status(GRACE_SECONDS)  # its pipe closes before it is gone; then it is replaced
                    answers[rank.number] = (False, f"ended during the case; its last output:\n{rank.output()}")

    def _results(self, ranks: list[_Rank], answers: dict[int, tuple[bool, Any]], name: str) -> list[Any]:
        silent = [rank for rank in ranks if rank.number not in answers]
        if not silent and all(good for good, _ in answers.values()):
            return [answers[rank.number][1] for rank in ranks]
        report = [f"case {name} failed on {len(ranks)} ranks"]
        for rank in ranks:
            good, text = answers.get(rank.number, (False, None))
            shown = "returned" if good else text if text is not None else f"did not end:\n{rank.stack()}"
            report.append(f"--- rank {rank.number}: {shown}")
        if silent or any(rank.status() is not None for rank in ranks):
            self._end_ranks()  # a rank that hangs is of no more use; the next case starts fresh ones
        raise CaseFailed("\n".join(report))

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()


# ---- in the ranks


def serve(how: dict[str, str | None]) -> None:
    """Run the cases that come from the socket at `how["address"]`, until the test session closes it."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if how["package"] is not None:
        from tests.tools import forked_doctor

        forked_doctor.take_from(how["package"])
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(how["address"])
    pipe = Connection(connected.detach())
    while True:
        try:
            asked = pipe.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run_case(pickle.loads(asked))))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        pipe.recv_bytes()  # all are done: who leaves earlier would cut off ranks that still connect a group
        _clean_up()


def _end_with(parent: int) -> None:
    """End this process when the one that forked it is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _run_case(case: dict[str, Any]) -> Any:
    import torch.distributed as dist

    rank, world_size = case["rank"], case["world_size"]
    # Anew for each case: the one before may have listened to the signal itself, and cannot put a handler in C back.
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["PYTEST_CURRENT_TEST"] = case["test"]  # as in any process that a test starts
    function: Any = _module_at(case["file"])
    for part in case["function"].split("."):
        function = getattr(function, part)
    limit = timedelta(seconds=case["seconds"])
    store = dist.TCPStore("127.0.0.1", case["port"], is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(case["number"]), store), rank=rank, world_size=world_size, timeout=limit
    )
    dist.barrier()  # a case that leaves its group at once would else cut off ranks that still connect
    return function(**case["kwargs"])


def _clean_up() -> None:
    """Forget the case: its process groups and what the engine keeps in globals."""
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe import moe_utils

    from megatron_moe.parallel import groups

    groups.destroy(abort=True)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:  # what auxiliary losses are logged in, which has the number of layers of its first model
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker as forget_losses
    except ImportError:  # before 0.19
        forget_losses = moe_utils.get_moe_layer_wise_logging_tracker().clear
    forget_losses()
    # The engine hooks closures over its DDP wrapper into autograd nodes, a cycle that Python's collector cannot see; it
    # would keep the model and its process groups, with their threads.
    for thing in gc.get_objects():
        if isinstance(thing, DistributedDataParallel):
            vars(thing).clear()
    gc.collect()
    # Hundreds of cases later a rank would else hold three times what it needs, in pieces that are free.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _module_at(path: str) -> ModuleType:
    """The module in file `path`, loaded once per rank."""
    name = f"case_{Path(path).stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
