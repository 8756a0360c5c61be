"""NCCL is set up so that our report on a hang comes before its abort, and its flight recorder can be read."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe import platform
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups
from megatron_moe.training.hang_report import progress
from tests.helpers.gloo_pool import GlooPool

NAMES = (
    "TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE "
    "TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_ASYNC_ERROR_HANDLING"
).split()


@pytest.fixture(autouse=True)
def alone(monkeypatch, one_process):
    for name in (*NAMES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set in the test goes with it
        monkeypatch.delenv(name)


@pytest.fixture
def joined(monkeypatch) -> list[tuple[timedelta, dict[str, str]]]:
    """What NCCL would be started with on a pretended machine with CUDA, by gloo: timeouts and environment."""
    started: list[tuple[timedelta, dict[str, str]]] = []
    init = dist.init_process_group

    def instead(backend: str, *, timeout: timedelta, **options: Any) -> None:
        assert backend == "nccl" and "device_id" not in options, "groups that members make alone would hang"
        started.append((timeout, environment()))
        init("gloo", timeout=timeout, **options)

    monkeypatch.setattr(platform, "backend", lambda _: "nccl")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", instead)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    return started


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_nccl_waits_longer_than_the_watchdog_and_records_what_it_does(joined, tmp_path):
    initialize = groups.parallel_state.initialize_model_parallel
    with mock.patch.object(groups.parallel_state, "initialize_model_parallel", side_effect=initialize) as made:
        groups.initialize(replace(Run(), distributed_timeout_minutes=10), tmp_path / "faults")
    assert made.call_args.kwargs["distributed_timeout_minutes"] == 12
    ((timeout, set_for_it),) = joined
    assert timeout == timedelta(minutes=12)
    assert set_for_it == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "faults" / "nccl_trace_rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(14 * 60),
    }
    assert groups.collectives_record() is groups.nccl_record


def test_without_the_watchdog_nccls_timeout_is_the_runs(joined):
    groups.initialize(replace(Run(), distributed_timeout_minutes=1.5, watchdog=False))
    ((timeout, set_for_it),) = joined
    assert timeout == timedelta(seconds=90)
    assert set_for_it["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "480" and "TORCH_FR_DUMP_TEMP_FILE" not in set_for_it


def test_what_the_user_has_set_stays_and_with_gloo_nothing_is_set(monkeypatch):
    groups.initialize(Run(), Path("faults"))
    assert environment() == {} and groups.collectives_record() is None
    theirs = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/somewhere/else_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    groups.prepare_nccl(timedelta(minutes=10), Path("faults"))
    assert environment() == theirs


def wait_beside_nccl() -> float:
    """The seconds after which a rank that waits in host memory is let go, of 60 that it would wait."""
    begin = time.monotonic()
    with (
        mock.patch.object(dist, "get_backend", lambda *_: "nccl"),
        mock.patch.object(torch.cuda.nccl, "version", lambda: (2,)),
    ):
        groups._make_host_group(timedelta(minutes=1))
        if dist.get_rank() == 0:
            threading.Timer(0.2, groups.abort_collectives).start()
            with pytest.raises(RuntimeError):
                dist.broadcast_object_list([None], src=1, group=groups.host_group())
    return time.monotonic() - begin


def test_a_rank_that_waits_in_host_memory_beside_nccl_is_let_go_too(rank_parent):
    pool = GlooPool(rank_parent)  # its connections are lost
    try:
        assert max(pool.run(2, wait_beside_nccl)) < 30
    finally:
        pool.close()


def begin_some(recorder: bool) -> tuple[Any, ...]:
    """What a rank reads of its own collectives after some of them, the last of which is still open on rank 1."""
    bindings: Any = torch._C._distributed_c10d
    empty = b'{"pg_config": {}, "pg_status": {}, "version": "2.10"}'
    dump = bindings._dump_fr_trace_json if recorder else lambda **_: empty
    whole = dist.new_group([0, 1], group_desc="both of them")
    for _ in range(3):
        dist.all_reduce(torch.ones(4, 2), group=whole)
    dist.barrier()
    work = dist.all_reduce(torch.ones(5), group=whole, async_op=True) if dist.get_rank() == 1 else None
    deadline = time.monotonic() + 20.0
    with mock.patch.object(bindings, "_dump_nccl_trace_json", dump, create=True):
        while True:
            mine = next(group for group in progress(groups.nccl_record()) if group.about == "both of them")
            if not recorder or mine.ended == 3 or time.monotonic() > deadline:  # a thread of torch's records ends
                break
            time.sleep(0.01)
    dist.barrier()
    if work is None:
        dist.all_reduce(torch.ones(5), group=whole)
    else:
        work.wait()
    dist.destroy_process_group(whole)
    return mine.ranks, mine.begun, mine.ended, mine.open


def test_the_recorder_of_this_torch_is_read(rank_parent):
    # On a busy machine torch's recorder has lost an end for good, waited for a minute: such ranks are asked again.
    for _ in range(3):
        pool = GlooPool(rank_parent)  # without a past: it keeps the numbers of destroyed groups, by names used again
        try:
            first, second = pool.run(2, begin_some, recorder=True)
        finally:
            pool.close()
        if first[2] == second[2] == 3:
            break
    assert first == ((0, 1), 3, 3, None)
    assert second == ((0, 1), 4, 3, "all_reduce of Float[5]")


def test_without_the_recorder_the_numbers_are_read(gloo):
    first, second = gloo.run(2, begin_some, recorder=False)
    assert (first[0], first[2:]) == ((0, 1), (None, None)) and second[1] == first[1] + 1
