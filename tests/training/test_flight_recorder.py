"""NCCL's flight recorder names the rank that did not join a collective, and never holds the report up.

The records are those of torch's dump (version 2.10), cut down to what a rank has in it after a few steps.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.training.flight_recorder import GroupProgress, behind, progress, within
from megatron_moe.training.hang_report import RankStatus, conclusion

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
WORLD, TP, DP = ("0", "default_pg", [0, 1, 2, 3]), ("1", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1]), ("7", "dp", [0, 2])


def entry(group: tuple, number: int, name: str = "all_reduce", shape: Any = (8,), **other: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": int(group[0]), "process_group": [group[0], group[1]],
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795390141560673582 + number, "input_sizes": [list(shape)], "input_dtypes": ["Float"],
        "output_sizes": [list(shape)], "output_dtypes": ["Float"], "state": "completed",
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": True,
        "timeout_ms": 720000, "is_p2p": False, **other,
    }  # fmt: skip


def dump(*groups: tuple[tuple, int, int], last: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A rank's record: for each group, how many collectives it has begun and how many have ended there."""
    entries = [
        {**entry(group, number), "state": "completed" if number <= ended else "scheduled", **(last or {})}
        if number > ended
        else entry(group, number)
        for group, begun, ended in groups
        for number in range(max(1, begun - 3), begun + 1)
    ]
    return {
        "version": "2.10",
        "pg_config": {group[0]: {"name": group[0], "desc": group[1], "ranks": str(group[2])} for group, _, _ in groups},
        "pg_status": {
            group[0]: {
                "last_enqueued_collective": str(begun),
                "last_started_collective": "-1",
                "last_completed_collective": str(ended),
            }
            for group, begun, ended in groups
        },
        "entries": entries,
        **changes,
    }


def test_a_ranks_record_is_read():
    sent = entry(WORLD, 99, "send 0->1", is_p2p=True)
    record = dump((WORLD, 37, 36), (TP, 5, 5), (("9", "one", [0]), 3, 2))
    record["entries"].append(sent)
    assert progress(record) == (
        GroupProgress("0", "default_pg", (0, 1, 2, 3), 37, 36, "all_reduce of Float[8]"),
        GroupProgress("1", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), 5, 5, None),
    )
    without = dump((WORLD, 37, 36), pg_status={})
    assert progress(without)[0] == progress(record)[0]
    # With the recorder off there are numbers alone.
    off = dump((WORLD, 37, 36), entries=[], pg_status={"0": {"last_enqueued_collective": 37}})
    assert progress(off) == (GroupProgress("0", "default_pg", (0, 1, 2, 3), 37, None, None),)
    # The number of the last one that has ended may be behind what is known of each.
    behind_itself = dump((WORLD, 37, 37))
    behind_itself["pg_status"]["0"]["last_completed_collective"] = "36"
    assert progress(behind_itself)[0].ended == 37
    # An earlier group of the same name has come further.
    record["entries"][:0] = [entry(("0", "of an earlier run"), 1000)]
    assert progress(record)[0].begun == 37
    # Nothing has ended yet, and one that has been lost from the ring.
    assert progress(dump((WORLD, 2, -1)))[0].ended == 0
    assert progress(dump((WORLD, 40, 30)))[0].open is None


def said(*records: dict[str, Any]) -> tuple[tuple[int, ...], str] | None:
    return behind({rank: progress(record) for rank, record in enumerate(records)})


def test_the_rank_that_did_not_join_is_named_with_the_collective():
    late = "did not join all_reduce of Float[8], number 37 of process group 0 (default_pg), in which ranks 0, 2, 3 wait"
    assert said(*[dump((WORLD, n, 36)) for n in (37, 36, 37, 37)]) == ((1,), late)
    two = said(*[dump((WORLD, n, 36)) for n in (37, 36, 37, 36)])
    assert two is not None and two[0] == (1, 3) and two[1].endswith("in which ranks 0, 2 wait")


def test_a_rank_that_waits_for_another_one_itself_is_not_to_blame():
    # 2 waits for 0 in dp; 0 waits for 1 in tp, where 1 left out one.
    found = said(dump((TP, 12, 11), (DP, 4, 4)), dump((TP, 11, 11)), dump((DP, 5, 4)))
    assert found is not None
    assert (
        found[0] == (1,)
        and "number 12 of process group 1 (TENSOR_MODEL_PARALLEL_GROUP), in which rank 0 wait" in found[1]
    )


def test_with_the_recorder_off_numbers_tell_who_is_behind():
    numbers = [
        dump((WORLD, n, 0), entries=[], pg_status={"0": {"last_enqueued_collective": n}}) for n in (37, 37, 36, 37)
    ]
    assert said(*numbers) == (
        (2,), "did not join a collective, number 37 of process group 0 (default_pg), in which ranks 0, 1, 3 wait"
    )  # fmt: skip
    assert said(*numbers[:2]) is None


def test_ranks_that_brought_different_collectives_are_shown():
    other = dump((WORLD, 37, 36), last={"profiling_name": "nccl:_all_gather_base"})
    found = said(dump((WORLD, 37, 36)), other)
    assert found is not None and found[0] == ()
    assert "different collectives as number 37 of process group 0" in found[1]
    assert found[1].endswith("rank 0: all_reduce of Float[8]; rank 1: _all_gather_base of Float[8]")
    # To an all-to-all each brings what it has.
    uneven = [dump((WORLD, 37, 36), last={"profiling_name": "nccl:all_to_all", "input_sizes": [[n]]}) for n in (3, 5)]
    found = said(*uneven)
    assert found is not None and found[1].startswith("all ranks have joined all_to_all of Float[3], number 37")


def test_nothing_is_said_of_ranks_that_are_through():
    assert said(dump((WORLD, 37, 37)), dump((WORLD, 37, 37))) is None
    assert behind({0: (), 1: ()}) is None


def test_the_conclusion_goes_by_the_recorder_and_survives_the_store():
    records = [dump((WORLD, n, 36)) for n in (37, 36, 37)]
    answers = {}
    for rank, record in enumerate(records):
        at = (
            "megatron_moe/training/step.py:80 in train_step" if rank != 1 else "megatron_moe/data/batches.py:90 in read"
        )
        waits = None if rank == 1 else "item, for the device"
        status = RankStatus(rank, "doing", "iteration 3", at, waits, groups=progress(record))
        answers[rank] = RankStatus.of_json(status.to_json())
        assert answers[rank] == status
    text = conclusion(answers, {}, {})
    joined = "did not join all_reduce of Float[8], number 37 of process group 0 (default_pg), in which ranks 0, 2 wait"
    assert text.startswith(f"rank 1 {joined}: at megatron_moe/data/batches.py:90 in read (iteration 3). ")
    assert "ranks 0, 2: waiting in item, for the device, at megatron_moe/training/step.py:80" in text
    # A rank that is gone is the cause, whatever the others have begun.
    assert conclusion({0: answers[0]}, {1: "gone"}, {1: "iteration 3"}).startswith("rank 1 is gone")
    through = {rank: RankStatus(rank, "doing", "", "a.py:1 in f", "item, for the device", groups=progress(
        dump((WORLD, 37, 37)))) for rank in range(2)}  # fmt: skip
    assert "every collective that was begun has ended, and a kernel has not" in conclusion(through, {}, {})


@pytest.mark.parametrize("record", [{}, {"pg_config": {}, "pg_status": {}, "entries": [{"pg_id": 1}]}, [], None])
def test_a_record_of_another_format_is_said_and_no_error(record):
    groups, why = within(60.0, lambda: record)
    assert groups == () and why.startswith("NCCL's flight recorder cannot be read: ")


def test_a_recorder_that_does_not_answer_is_not_waited_for():
    begin = time.monotonic()
    assert within(0.1, lambda: time.sleep(3) or {}) == ((), "NCCL's flight recorder did not answer within 0.1 s")
    assert time.monotonic() - begin < 2
    assert within(60.0, lambda: {"pg_config": {}, "pg_status": {}}) == ((), "NCCL's flight recorder is empty")


def test_a_recorder_that_holds_the_interpreter_ends_the_process():
    program = (
        "import ctypes\n"
        "from megatron_moe.training.flight_recorder import within\n"
        "def hold_the_interpreter():\n"
        "    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)\n"
        "    libc.pthread_mutex_init(mutex, None)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "within(0.1, hold_the_interpreter)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "hold_the_interpreter" in done.stderr
