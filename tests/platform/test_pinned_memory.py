"""Storages that go to host memory and come back: their bytes, the host memory, and which copy waits for which."""

import contextlib
import gc

import pytest
import torch

from megatron_moe import platform
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.activation_offload import ActivationOffload
from megatron_moe.platform import pinned_memory
from megatron_moe.platform.pinned_memory import CopyStream, OffloadedStorage, PinnedPool

pytestmark = pytest.mark.engine


def test_views_are_what_they_were_and_the_memory_is_gone_in_between():
    whole = torch.randn(64, 32).bfloat16()
    expected, half, turned = whole.clone(), whole[:32], whole.t()
    pool, lane = PinnedPool(), CopyStream()
    moved = OffloadedStorage(half, pool, lane)
    moved.free()
    assert whole.untyped_storage().nbytes() == 0
    moved.return_to_device(lane)
    assert torch.equal(whole, expected) and torch.equal(half, expected[:32]) and torch.equal(turned, expected.t())
    assert pool.in_use == 0


def test_what_was_not_freed_stays_and_is_not_copied_back():
    tensor = torch.ones(100)
    pool, lane = PinnedPool(), CopyStream()
    moved = OffloadedStorage(tensor, pool, lane)
    tensor.fill_(2)
    moved.return_to_device(lane)
    moved.free()  # too late: its backward pass has begun
    assert tensor.sum() == 200
    assert pool.in_use == 0


@pytest.mark.parametrize("freed", [False, True])
def test_host_memory_comes_back_where_nobody_holds_the_storage(freed):
    pool, lane = PinnedPool(), CopyStream()
    tensor = torch.ones(100)
    moved = OffloadedStorage(tensor, pool, lane)
    if freed:
        moved.free()
    del tensor
    moved.return_to_device(lane)
    assert pool.in_use == 0

    moved = OffloadedStorage(torch.ones(100), pool, lane)
    assert pool.in_use > 0
    del moved
    gc.collect()
    assert pool.in_use == 0


def test_no_more_buffers_are_made_than_are_used_at_a_time(monkeypatch):
    made = []

    def counted(shape, dtype, *, pinned):
        assert pinned
        made.append(shape[0])
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(pinned_memory, "host_memory", counted)
    pool = PinnedPool()
    for sizes in ([10_000, 50_000], [9_000, 52_000], [50_000, 10_000], [70_000, 50_000], [70_000, 70_000]):
        held = [pool.take(size) for size in sizes]
        assert all(buffer.size >= size for buffer, size in zip(held, sizes))
        for buffer in held:
            pool.give(buffer, None)
        assert len(pool._free) == 2
    assert all(size <= made_for * 9 / 8 + 4096 for size, made_for in zip(made, [10_000, 50_000, 70_000, 70_000]))
    assert len(made) == 4


class Stream:
    """A stream that writes down what it waits for and when it copies."""

    def __init__(self, name, log):
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.events += 1
        self.log.append(f"{self.name} copies")
        return f"{self.name}'s copy {self.events}"


def test_a_run_without_a_device_says_that_nothing_is_offloaded(monkeypatch):
    from megatron_moe.training.start_notes import _sharding_notes

    run = replace(Run(), fine_grained_activation_offloading=True, offload_modules=("core_attn",))
    assert ActivationOffload.from_run(run) is None
    (note,) = _sharding_notes(run, 1)
    assert note.startswith("--fine-grained-activation-offloading has no effect")
    assert _sharding_notes(Run(), 1) == []
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    assert _sharding_notes(run, 1) == []
    assert isinstance(ActivationOffload.from_run(run), ActivationOffload)


def test_each_copy_waits_for_what_it_reads_and_for_who_reads_what_it_writes(monkeypatch):
    log = []
    names = iter(["there", "back"])
    main = Stream("main", log)
    monkeypatch.setattr(pinned_memory, "has_streams", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    pool, there, back = PinnedPool(), CopyStream(), CopyStream()
    tensor = torch.ones(2000)
    moved = OffloadedStorage(tensor, pool, there)
    assert log == ["there waits for main", "there copies"]
    moved.free()
    assert log[2:] == ["main waits for there's copy 1"]
    arrived = moved.return_to_device(back)
    assert log[3:] == ["back waits for main", "back waits for there's copy 1", "back copies"]
    back.make_current_wait(arrived)
    assert log[6:] == ["main waits for back's copy 1"]
    # The host's bytes are written again when they have been read.
    again = OffloadedStorage(torch.ones(2000), pool, there)
    assert log[7:] == ["there waits for main", "there waits for back's copy 1", "there copies"]
    del again
