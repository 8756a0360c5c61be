"""Ranks that a program starts: they answer, and where one raises, dies or hangs it is named and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.local_ranks import LocalRanks, RankFailure
from tests.io.rank_functions import act

ROOT = Path(__file__).resolve().parents[2]


def pids(ranks: LocalRanks) -> list[int]:
    return [process.process.pid for process in ranks._processes]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_answer_one_request_after_the_other_and_are_gone_at_the_end():
    with LocalRanks(act, 2, seconds=60.0) as ranks:
        assert ranks.call({"act": "sum"}) == [[0, 2, 1], [1, 2, 1]]
        first = pids(ranks)
        assert ranks.call({"act": "sum"}, ranks=1) == [[0, 1, 0]]
        assert ranks.call({"act": "sum"}) == [[0, 2, 1], [1, 2, 1]]
        assert pids(ranks) == first
        folder = ranks.folder
    assert all(map(gone, first)) and not folder.exists()


FAILURES = {
    "raise": "rank 1 raised\nTraceback",
    "die": "rank 1 ended with status 3; its last output:\nlast words",
    "die beside a child": "rank 1 ended with status 3",
    "hang": "2 of 2 ranks did not end within 20 s",
}


def test_a_rank_that_fails_is_named_and_the_next_request_gets_new_ones():
    with LocalRanks(act, 2, seconds=20.0) as ranks:
        ranks.call({"act": "sum"})
        for what, told in FAILURES.items():
            before = pids(ranks)
            with pytest.raises(RankFailure) as failure:
                ranks.call({"act": what})
            assert told in str(failure.value) and failure.value.refusal is None, what
            assert "rank_functions.py" in str(failure.value) or what.startswith("die")
            assert all(map(gone, before))
            assert ranks.call({"act": "sum"}) == [[0, 2, 1], [1, 2, 1]]


def test_a_refusal_is_known_as_one():
    with LocalRanks(act, 1, seconds=30.0) as ranks, pytest.raises(RankFailure) as failure:
        ranks.call({"act": "refuse"})
    assert failure.value.refusal == "--flag 3: too many"
    assert not isinstance(failure.value, ConfigError)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_the_program_that_started_them(number, tmp_path):
    code = (
        "import signal\nfrom megatron_moe.io.local_ranks import LocalRanks\n"
        "from tests.io.rank_functions import act\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has not\n"
        "with LocalRanks(act, 2, seconds=60.0) as ranks:\n"
        "    ranks.call({'act': 'sum'})\n"
        "    print(*(process.process.pid for process in ranks._processes), flush=True)\n"
        "    ranks.call({'act': 'hang'})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        found = [int(word) for word in program.stdout.readline().split()]
        assert len(found) == 2
        program.send_signal(number)
        program.wait(timeout=120)
    deadline = time.monotonic() + 60
    while not all(map(gone, found)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, found))


def test_a_rank_imports_this_package_wherever_the_program_was_started(tmp_path, monkeypatch):
    (tmp_path / "megatron_moe").mkdir()
    (tmp_path / "megatron_moe" / "__init__.py").write_text("raise ImportError('another package')")
    monkeypatch.chdir(tmp_path)
    with LocalRanks(act, 1, seconds=30.0) as ranks:
        assert ranks.call({"act": "where"}) == [str(tmp_path)]
