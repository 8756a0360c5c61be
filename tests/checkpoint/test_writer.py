"""Host memory for saves: as much as the plan says, locked as it is on a GPU's machine, and given back."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe import platform
from megatron_moe.config.schema import build
from megatron_moe.platform import pinned_memory
from megatron_moe_tools.plan.plan import saving_memory
from megatron_moe_tools.plan.tracing import trace_ranks
from tests.helpers.rows import rows
from tests.helpers.trained_steps import OPTIMIZERS, SMALL, TINY

MIB = 2**20
SAVED: dict[str, dict[str, Any]] = {
    **OPTIMIZERS,
    "bf16, distributed, averaged": {**OPTIMIZERS["bf16, distributed"], "ema_decay": 0.9},
    "bf16, distributed, Muon": {**OPTIMIZERS["bf16, distributed"], "optimizer": "muon"},
    "bf16, averaged": {"bf16": True, "ema_decay": 0.9},
    "bf16, ZeRO 2, averaged": {"bf16": True, "data_parallel_sharding_strategy": "optim_grads", "ema_decay": 0.9},
}


class Runtime:
    """CUDA's runtime, which locks pages or refuses to; `locked` has the size by address of what it has locked."""

    def __init__(self) -> None:
        self.answer = 0
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 and not any(abs(address - other) < size for other in self.locked)
        if self.answer == 0:
            self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    """A pretended machine with CUDA."""
    pretended = Runtime()
    monkeypatch.setattr(pinned_memory, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pretended)
    monkeypatch.setattr(pinned_memory, "_reported", False)
    return pretended


def test_what_is_page_locked_is_what_was_asked_for_and_is_given_back(runtime):
    first = platform.host_memory((33, MIB // 32), torch.bfloat16, pinned=True)
    second = platform.host_memory((), torch.float32, pinned=True)
    part = first[7]
    assert first.shape == (33, MIB // 32) and second.shape == () and first.untyped_storage().nbytes() == 33 * MIB // 16
    assert runtime.locked == {first.data_ptr(): 33 * MIB // 16, second.data_ptr(): 4}
    part.fill_(3)
    assert first[7].eq(3).all()
    del first, second
    gc.collect()
    assert list(runtime.locked.values()) == [33 * MIB // 16] and part.eq(3).all()
    del part
    gc.collect()
    platform.host_memory((8,), torch.float32, pinned=False)
    assert platform.host_memory((0, 8), torch.float32, pinned=True).shape == (0, 8)
    assert runtime.locked == {}


def test_where_cuda_refuses_the_memory_is_pageable_and_that_is_reported_once(runtime, capsys, monkeypatch):
    runtime.answer = 2
    tensors = [platform.host_memory((MIB,), torch.float32, pinned=True).fill_(number) for number in range(2)]
    assert [tensor.sum().item() / MIB for tensor in tensors] == [0, 1] and runtime.locked == {}
    said = capsys.readouterr().err
    assert said.count("cannot be page-locked") == 1 and "4.2 MB" in said and "cudaHostRegister: error 2" in said
    del tensors
    gc.collect()  # what was not locked is not unlocked
    # torch without CUDA's runtime
    monkeypatch.delattr(torch.cuda, "cudart")
    assert platform.host_memory((5,), torch.float32, pinned=True).fill_(1).sum() == 5


def allocated(flags: dict[str, Any]) -> tuple[int, int]:
    """The bytes that a run's saves have allocated in host memory: to lock, and all."""
    from megatron_moe.checkpoint import writer
    from megatron_moe.training.run import pretrain

    asked: dict[bool, int] = {True: 0, False: 0}
    host_memory = platform.host_memory

    def counted(shape: Any, dtype: Any, *, pinned: bool) -> torch.Tensor:
        made = host_memory(shape, dtype, pinned=pinned)
        asked[pinned] += made.untyped_storage().nbytes()
        return made

    with mock.patch.object(writer.platform, "host_memory", counted, create=True):
        pretrain(build({**TINY, **SMALL, **flags}))
    return asked[True], sum(asked.values())


@pytest.mark.engine
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("optimizer", rows(SAVED, test=["bf16, distributed"]))
def test_a_save_takes_the_host_memory_that_is_planned(gloo, tmp_path: Path, optimizer, background):
    flags = {**SAVED[optimizer], "expert_model_parallel_size": 2, "train_iters": 1}
    flags |= {"async_save": background, "save": str(tmp_path)}
    run = build({**TINY, **SMALL, **flags})
    traces = trace_ranks(run, 2, run.derived.padded_vocab_size(257), device="cpu", imbalance=1.0)
    plan = saving_memory(run, traces, gpus_per_node=2)
    found = gloo.run(2, allocated, flags=flags)
    assert plan["kept"] == background
    assert plan["host_rank"] == pytest.approx(max(taken for _, taken in found), rel=0.01)
    assert plan["host_node"] == pytest.approx(sum(taken for _, taken in found), rel=0.01)
    if not background:
        assert [to_lock for to_lock, _ in found] == [0, 0]
