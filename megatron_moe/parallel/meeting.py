"""Says which ranks are still waited for while the process group is created.

torch waits without a word until all ranks are there. A thread of each rank counts it as arrived in the store through
which the ranks meet, and rank 0's says how many are missing. It changes nothing about the meeting: where the store
cannot be reached, torch's error becomes one line.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_moe.config.errors import MachineError
from megatron_moe.io import launched
from megatron_moe.io.program import note

_POLL_SECONDS = 0.2
_STORE_SECONDS = 10.0


@contextmanager
def watched() -> Iterator[None]:
    """Count this rank as arrived, and on rank 0 say what is waited for, until the block ends.

    Raises:
        MachineError: the store's port is taken, or the ranks could not meet there.
    """
    met = threading.Event()
    thread = threading.Thread(target=_watch, args=(met,), name="meeting", daemon=True)
    if os.environ["WORLD_SIZE"] != "1":
        thread.start()
    try:
        yield
    except dist.DistError as error:
        # The thread is left: a program that is no store and holds the port may never answer it.
        where = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
        raise MachineError(launched.not_met(where, error)) from error
    finally:
        met.set()
    if thread.is_alive():
        thread.join()


def _watch(met: threading.Event) -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A launcher's store outlives the ranks that it starts again.
    key = f"arrived/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    waiting, store = launched.Waiting(), None
    with suppress(RuntimeError):  # of the store, as which torch's own call fails too
        while not met.is_set():
            if store is None and _listens(address, port):
                timeout = timedelta(seconds=_STORE_SECONDS)
                store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
                store.add(key, 1)
            if store is not None and rank != 0:
                return
            if store is not None and waiting.is_due():
                missing = world_size - store.add(key, 0)
                if missing > 0:
                    note(
                        f"{launched.name()}: waiting for {missing} of {world_size} ranks, which meet at "
                        f"{address}:{port}, for {waiting.seconds:.0f} s"
                    )
            met.wait(_POLL_SECONDS)


def _listens(address: str, port: int) -> bool:
    """Return whether the store is there: torch's connection would wait for it, with lines on the screen."""
    try:
        with socket.create_connection((address, port), timeout=_STORE_SECONDS):
            return True
    except OSError:
        return False
