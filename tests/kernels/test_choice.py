"""Which form of an operation computes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from megatron_moe import platform
from megatron_moe.kernels import choice
from megatron_moe.kernels.choice import takes_kernels
from megatron_moe.platform import switches


class OnGpu(NamedTuple):
    """What is asked of a tensor, of one that this machine cannot have."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cuda:0")


def test_a_kernel_computes_on_a_gpu_unless_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switches.KERNELS, raising=False)
    monkeypatch.setattr(choice, "why_no_triton", lambda: None)
    assert takes_kernels(OnGpu()) and not takes_kernels(OnGpu(torch.float64))
    assert not takes_kernels(torch.empty(2))
    with platform.fake_device("cuda", {}):  # a plan is the same where there is no Triton
        assert not takes_kernels(torch.empty(2, device="meta"))
    monkeypatch.setattr(choice, "why_no_triton", lambda: "not installed")
    assert not takes_kernels(OnGpu())
    monkeypatch.setattr(choice, "why_no_triton", lambda: None)
    monkeypatch.setenv(switches.KERNELS, "triton")
    assert takes_kernels(torch.empty(2)) and not takes_kernels(torch.empty(2, dtype=torch.float64))
    monkeypatch.setenv(switches.KERNELS, "torch")
    assert not takes_kernels(OnGpu())


def test_what_a_kernel_does_not_cover_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(*arguments: object) -> object:
        asked.append(arguments)
        return NotImplemented

    monkeypatch.setenv(switches.KERNELS, "triton")
    monkeypatch.setattr(choice, "_kernel", lambda module, name: refuses)
    doubled = choice.has_kernel("anywhere")(lambda x: x * 2)
    assert doubled(torch.ones(2)).tolist() == [2, 2] and len(asked) == 1
