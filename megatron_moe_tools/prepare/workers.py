"""Worker processes that write parts, each into a folder that is renamed when it is complete."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatron_moe.config.errors import RunFault
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import publish_files
from megatron_moe_tools.prepare.encoding import Encoder, PreprocessOptions
from megatron_moe_tools.prepare.inputs import Shard
from megatron_moe_tools.prepare.work_folder import worker_lock

Task = tuple[Shard, Path]
"""A shard and the place of its part."""


def write_parts(
    options: PreprocessOptions, tokenizer: Tokenizer, tasks: Sequence[Task], workers_lock: Path
) -> Generator[Task, None, None]:
    """Write the parts of shards, and yield each task when its part is in its place, in any order.

    `workers` processes write them; with one worker, this process does it. Of several shards that raise an error, it is
    the first one's that is raised: it does not depend on the number of workers.
    """
    available = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    workers = min(available, len(tasks))
    if workers <= 1:
        encoder = Encoder(options, tokenizer)
        for task in tasks:
            _write_part(encoder, task)
            yield task
        return
    # spawn, not fork: this process has threads (progress), whose locks a fork would copy.
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options, tokenizer, workers_lock),
    )
    try:
        yield from _as_completed(executor, tasks, 2 * workers)
    except BrokenProcessPool as error:
        raise RunFault(
            "a worker process died (out of memory?); run the same command again with fewer --workers"
        ) from error
    finally:
        _end(executor, set(multiprocessing.active_children()) - others)


def _as_completed(executor: ProcessPoolExecutor, tasks: Sequence[Task], at_once: int) -> Iterable[Task]:
    waiting = iter(tasks)
    running: dict[Future[None], int] = {}
    numbers: dict[int, Task] = {}
    failed: dict[int, BaseException] = {}

    def submit(count: int) -> None:
        for task in islice(waiting, count):
            number = len(numbers)
            numbers[number] = task
            running[executor.submit(_write_part_in_worker, task)] = number

    submit(at_once)
    while running and not (failed and min(failed) < min(running.values())):
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=running.__getitem__):
            number = running.pop(future)
            error = future.exception()
            if error is not None:
                failed[number] = error
                continue
            if not failed:
                submit(1)
            yield numbers[number]
    if failed:
        raise failed[min(failed)]


def _end(executor: ProcessPoolExecutor, processes: set[BaseProcess]) -> None:
    """End the workers; what they are doing after an error or Ctrl-C is not needed any more."""
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    executor.shutdown(wait=True)


_encoder: Encoder | None = None


def _start_worker(options: PreprocessOptions, tokenizer: Tokenizer, workers_lock: Path) -> None:
    """Build this worker's encoder. Ctrl-C reaches every process of the terminal; the parent ends the workers."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker_lock(workers_lock)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(options, tokenizer)


def _end_with_parent() -> None:
    """End this process when its parent has died: a worker would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _write_part_in_worker(task: Task) -> None:
    assert _encoder is not None
    _write_part(_encoder, task)


def _write_part(encoder: Encoder, task: Task) -> None:
    shard, place = task
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    aside.mkdir()
    try:
        encoder.write_part(shard, aside)
        publish_files([(aside, place)])
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
