"""A stub of DeepEP (`deep_ep`), with the signatures of its Buffer, that moves tokens over any process group.

megatron-core looks for the package when its wrapper `fused_a2a` is imported; `installed` imports that once more over
the stub, and again without it at the end. What the stub takes and returns is what DeepEP's documentation says: rows
once for each rank, indices of local experts with -1 elsewhere, counts as a list on the host, sums of rows in fp32.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class EventHandle:
    """An event of DeepEP's."""


class EventOverlap:
    """An event that has happened."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None: ...


class Config:
    """The sizes of a buffer, which a stub does not need."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Buffer:
    """The buffer of a group of ranks."""

    num_sms = 20

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False, **_: Any
    ) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        to_expert = torch.stack([(topk_idx == expert).any(dim=1) for expert in range(num_experts)], dim=1)
        to_rank = to_expert.unflatten(1, (self.group.size(), -1)).any(dim=2)
        return to_rank.sum(0).int(), None, to_expert.sum(0).int(), to_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Any, Any, Any, Any, EventOverlap]:
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            tokens, sent, received, _ = handle
            return _exchanged(x[tokens], sent, received, self.group), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert is_token_in_rank is not None and num_tokens_per_rank is not None and num_tokens_per_expert is not None
        tokens = is_token_in_rank.t().nonzero()[:, 1]  # by rank, then by token
        sent = num_tokens_per_rank.tolist()
        counts = num_tokens_per_rank.clone()
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        received = counts.tolist()
        local = num_tokens_per_expert.shape[0] // self.group.size()
        ids = _exchanged(topk_idx[tokens], sent, received, self.group) - self.group.rank() * local
        here = (ids >= 0) & (ids < local)
        weights = _exchanged(topk_weights[tokens], sent, received, self.group).masked_fill(~here, 0.0)
        ids = ids.masked_fill(~here, -1)
        per_expert = [int((ids == expert).sum()) for expert in range(local)]
        rows = _exchanged(x[tokens], sent, received, self.group)
        return rows, ids, weights, per_expert, (tokens, sent, received, x.shape[0]), EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.is_contiguous()
        tokens, sent, received, num_tokens = handle

        def home(values: Tensor) -> Tensor:
            back = _exchanged(values, received, sent, self.group)
            return values.new_zeros((num_tokens, values.shape[1])).float().index_add(0, tokens, back.float())

        weights = None if topk_weights is None else home(topk_weights)
        return home(x).to(x.dtype), weights, EventOverlap()


@contextmanager
def installed() -> Iterator[None]:
    """Within the block the engine's wrapper finds DeepEP, which is this stub."""
    from megatron.core.transformer.moe import fused_a2a

    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    vars(package).update(Buffer=Buffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    with mock.patch.dict(sys.modules, {"deep_ep": package, "deep_ep.utils": utils}):
        importlib.reload(fused_a2a)
        yield
    importlib.reload(fused_a2a)
