"""Ranks that a program starts: they answer, and where one raises, dies or hangs it is named and none is left."""

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.launch.local_ranks import LocalRanks, RankFailure
from tests.helpers.rows import rows
from tests.helpers.sources import ROOT
from tests.launch.rank_functions import act


def pids(ranks: LocalRanks) -> list[int]:
    return [process.process.pid for process in ranks._processes]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def failure(ranks: LocalRanks, what: str) -> RankFailure:
    """How a request fails; all ranks are gone then."""
    before = pids(ranks)
    with pytest.raises(RankFailure) as caught:
        ranks.call({"act": what})
    assert all(map(gone, before))
    return caught.value


def test_ranks_answer_one_request_after_the_other_and_one_that_dies_is_named():
    both = [[0, 2, 1], [1, 2, 1]]
    with LocalRanks(act, 2, seconds=300.0) as ranks:
        assert ranks.call({"act": "sum"}) == both
        first = pids(ranks)
        assert ranks.call({"act": "sum"}, ranks=1) == [[0, 1, 0]]
        assert ranks.call({"act": "sum"}) == both and pids(ranks) == first
        died = failure(ranks, "die beside a child")
        assert "rank 1 ended with status 3; its last output:\nlast words" in str(died) and died.refusal is None
        folder = ranks.folder
    assert not folder.exists()


def test_a_rank_is_of_this_package_and_what_it_raises_or_hangs_in_is_told(tmp_path, monkeypatch):
    (tmp_path / "megatron_moe").mkdir()
    (tmp_path / "megatron_moe" / "__init__.py").write_text("raise ImportError('another package')")
    monkeypatch.chdir(tmp_path)
    with LocalRanks(act, 1, seconds=300.0) as ranks:
        assert ranks.call({"act": "where"}) == [str(tmp_path)]
        refused = failure(ranks, "refuse")
        assert "rank 0 raised\nTraceback" in str(refused) and "rank_functions.py" in str(refused)
        assert refused.refusal == "--flag 3: too many" and not isinstance(refused, ConfigError)
        assert ranks.call({"act": "sum"}) == [[0, 1, 0]]  # the next request gets new ones
        with mock.patch.object(ranks, "_seconds", 10.0):
            hung = failure(ranks, "hang")
        assert "1 of 1 ranks did not end within 10 s" in str(hung) and "rank_functions.py" in str(hung)


@pytest.mark.parametrize("number", rows([signal.SIGKILL, signal.SIGINT], test=[signal.SIGKILL]))
def test_ranks_end_with_the_program_that_started_them(number):
    code = (
        "import signal\nfrom megatron_moe_tools.launch.local_ranks import LocalRanks\n"
        "from tests.launch.rank_functions import act\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has not\n"
        "with LocalRanks(act, 1, seconds=600.0) as ranks:\n"
        "    ranks.call({'act': 'sum'})\n"
        "    print(*(process.process.pid for process in ranks._processes), flush=True)\n"
        "    ranks.call({'act': 'hang'})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        rank = int(program.stdout.readline())
        program.send_signal(number)
        program.wait(timeout=600)
    deadline = time.monotonic() + 300
    while not gone(rank):
        assert time.monotonic() < deadline
        time.sleep(0.1)
