"""The backend that a run asks for, the engine's version, and the memory of this process."""

from __future__ import annotations

import pytest
import torch

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.platform import hardware

pytestmark = pytest.mark.engine


@pytest.fixture(params=[True, False], ids=["cuda", "no cuda"])
def cuda(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 * request.param)
    return request.param


def test_a_backend_that_cannot_work_here_is_refused_and_a_working_setting_named(cuda):
    assert platform.backend("nccl" if cuda else "gloo") == platform.backend()
    with pytest.raises(ConfigError, match="--distributed-backend .* leave the flag out"):
        platform.backend("gloo" if cuda else "nccl")


def test_the_peak_memory_covers_what_was_allocated():
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert hardware.max_memory_bytes() > held.numel()
    assert hardware.max_memory_bytes() < 2**40
