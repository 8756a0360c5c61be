"""Small jobs under the watchdog: collectives in a loop, and a fault in one rank of each. For test_watchdog.py."""

import ctypes
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe.config.errors import RunFault
from megatron_moe.parallel import groups
from megatron_moe.training import hang_report
from megatron_moe.training.watchdog import Watchdog

FAULTY_STEP = 3


def sum_of_gradients() -> None:
    dist.all_reduce(torch.ones(8))


def count_of_tokens() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int64))


def hold_the_interpreter() -> None:
    """Wait in C for a mutex that never comes free, with Python's own lock held: no thread of this process runs."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


WORKS: list[Any] = []
"""The collectives that this rank has begun for its device."""


class OnDevice:
    """Stands for a tensor on a device that waits for a collective, as under NCCL: what reads it waits in C."""

    def __init__(self, work: Any) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.item = lock.acquire
        if work is not None:
            work.get_future().add_done_callback(lambda _: lock.release())


def step_on_device(fault: str | None) -> None:
    """One step of this rank, whose host goes on while the device waits for the other ranks."""
    if fault == "sleep":
        time.sleep(1000)
    WORKS.append(dist.all_reduce(torch.ones(8), async_op=True))
    OnDevice(WORKS[-1]).item()
    if fault == "kernel":
        OnDevice(None).item()


def step(fault: str | None) -> None:
    """One step of this rank, which differs from the others' where it has a fault."""
    if fault == "exception":
        raise ValueError("layer 3 is upside down")
    if fault == "exit":
        os._exit(7)
    if fault in ("KILL", "STOP"):
        os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))
    if fault == "sleep":
        time.sleep(1000)
    if fault == "interpreter":
        hold_the_interpreter()
    if fault == "wrong order":
        count_of_tokens()
    if fault != "skipped":
        sum_of_gradients()
    if fault != "wrong order":
        count_of_tokens()
    dist.barrier()


def read_errors_slowly(seconds: float) -> None:
    """Let this rank take its time over the report on its error, as on a machine that is busy."""
    of_error = hang_report.of_error

    def slow(error: BaseException) -> hang_report.ThreadActivity:
        time.sleep(seconds)
        return of_error(error)

    hang_report.of_error = slow


def recorded() -> dict[str, Any]:
    """The flight recorder as the run reads it under NCCL, of gloo's collectives.

    A gloo thread that ends a collective before it is recorded leaves it open for ever: what has ended is asked of the
    collectives too.
    """
    bindings: Any = torch._C._distributed_c10d
    bindings._dump_nccl_trace_json = bindings._dump_fr_trace_json
    dump = groups.nccl_record()
    for entry in dump.get("entries", ()):
        if WORKS[int(entry["collective_seq_id"]) - 1].is_completed():
            entry["state"] = "completed"
    return dump


def rank_of_job(job: dict[str, Any]) -> None:
    """What a rank does; its errors are its exit status, as in a program."""
    read_errors_slowly(job["slow"])
    fault, rank, world, timeout = job["fault"], job["rank"], job["world"], job["timeout"]
    store, of_group = (dist.TCPStore("127.0.0.1", job["port"], wait_for_workers=False) for _ in range(2))
    group = dist.PrefixStore("group", of_group)
    # NCCL's timeout is behind ours.
    patience = timedelta(seconds=timeout + 60 * job["device"])
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=patience)
    on_device: dict[str, Any] = {"on_device": True, "recorded": recorded} if job["device"] else {}
    with Watchdog(store, rank, world, timeout, Path(job["folder"]), settle=5.0, **on_device) as watchdog:
        for number in range(1, FAULTY_STEP + 2):
            watchdog.at(f"iteration {number}", limited=True)
            if fault == "shared" and number == FAULTY_STEP:
                raise RunFault("all ranks found the same")
            is_faulty = rank in job["faulty"] and number == FAULTY_STEP
            (step_on_device if job["device"] else step)(fault if is_faulty else None)
