"""How often the host waits for the device, on the pretended CUDA machine: one more wait than docs/gpu.md says fails."""

from __future__ import annotations

import pytest

from tests.helpers.host_sync_page import CASES, PAGE, rows, written

PAGE_ROWS = written(PAGE.read_text(encoding="utf-8")).splitlines()


def test_the_host_waits_as_often_on_one_rank_as_the_page_says() -> None:
    found = rows([case for case in CASES if case.ranks == 1])
    assert [row for row in found if row not in PAGE_ROWS] == []
    assert found[0].split("|")[2].strip() == "0"


@pytest.mark.engine
def test_the_host_waits_as_often_with_expert_parallelism_as_the_page_says() -> None:
    (found,) = rows([case for case in CASES if case.what == "EP 2"])
    assert found in PAGE_ROWS and found.split("|")[2].strip() == "0 + 1 hidden"
