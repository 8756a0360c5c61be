"""Ranks that do not come are told of while the process group is created."""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.config.schema import Run, replace
from megatron_moe.io import launched
from megatron_moe.parallel import groups


@pytest.fixture
def two_ranks(monkeypatch):
    """This process is rank 0 of two, and runs the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(launched, "FIRST_NOTE_SECONDS", 0.05)
    return store


@pytest.fixture
def notes(monkeypatch):
    """What is printed, and whether it was."""
    said, printed = [], threading.Event()
    monkeypatch.setattr(groups, "note", lambda text: (said.append(text), printed.set()))
    return said, printed


def test_rank_0_says_how_many_ranks_it_waits_for(two_ranks, notes, monkeypatch):
    said, printed = notes
    monkeypatch.setattr(groups, "rendezvous", lambda *args, **more: iter([(two_ranks, 0, printed.wait(600) + 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: None)
    groups._init_distributed("gloo", timedelta(seconds=1))
    assert "waiting for 1 of 2 ranks" in said[0] and f"127.0.0.1:{two_ranks.port}" in said[0]


def test_a_rank_that_has_come_is_no_longer_waited_for(two_ranks, notes, monkeypatch):
    said, printed = notes
    monkeypatch.setenv("RANK", "1")
    with groups._watched_rendezvous():
        while two_ranks.add(f"arrived/{groups._meeting()}", 0) == 0:
            pass
    monkeypatch.setenv("RANK", "0")
    with groups._watched_rendezvous():
        while two_ranks.add(f"arrived/{groups._meeting()}", 0) < 2:
            pass
        assert not printed.wait(0.5)
    assert said == []


def test_an_error_of_the_meeting_passes_and_a_port_that_is_held_is_one_line(two_ranks, notes, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match="the original"), groups._watched_rendezvous():
        raise ValueError("the original")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(MachineError, match=f"MASTER_PORT {port}: another program listens there; choose another"):
            groups._init_distributed("gloo", timedelta(seconds=5))
    assert notes[0] == []


# ---- ranks that were given different flags are told so before they build anything


def refusal(odd_rank: int) -> str:
    """One rank asks for fp16 where the others ask for bf16."""
    mine = {"fp16": True} if dist.get_rank() == odd_rank else {"bf16": True}
    try:
        groups.initialize(replace(Run(), **mine))
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_fp16_on_one_rank_and_bf16_on_the_others_is_refused_on_all(gloo):
    wanted = (
        "all ranks need the same flags: --bf16 is False on rank 1 and True on rank 0; --fp16 is True on rank 1 and "
        "False on rank 0; start every node with the same command"
    )
    assert gloo.run(2, refusal, odd_rank=1) == [wanted] * 2
    assert gloo.run(2, refusal, odd_rank=-1) == ["accepted"] * 2
