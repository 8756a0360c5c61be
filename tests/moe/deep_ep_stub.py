"""A stub of DeepEP (`deep_ep`), with the signatures of its buffers, that moves tokens over any process group.

megatron-core looks for the package when its wrapper `fused_a2a` is imported; `installed` imports that once more over
the stub, and again without it at the end. What the stub takes and returns is what DeepEP's documentation says: rows
once for each rank, indices of local experts with -1 elsewhere, counts as a list on the host, sums of rows in fp32.
HybridEP's buffer is that of its branch `hybrid-ep`: rows by expert, each expert's in the order of ranks and tokens,
as its kernels and their tests have it; counts as a tensor on the host; probs by token and expert on the tokens' side.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventOverlap:
    """An event that has happened, also in the place of `EventHandle`."""

    def __init__(self, event: Any = None) -> None:
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

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **_: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        to_expert = torch.stack([(topk_idx == expert).any(dim=1) for expert in range(num_experts)], dim=1)
        to_rank = to_expert.unflatten(1, (self.group.size(), -1)).any(dim=2)
        return to_rank.sum(0).int(), None, to_expert.sum(0).int(), to_rank, EventOverlap()

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Any = None, is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None, **_: Any,
    ) -> tuple[Tensor, Any, Any, Any, Any, EventOverlap]:  # fmt: skip
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            tokens, sent, received, _ = handle
            return _exchanged(x[tokens], sent, received, self.group), None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32
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
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.is_contiguous()
        tokens, sent, received, num_tokens = handle

        def home(values: Tensor) -> Tensor:
            back = _exchanged(values, received, sent, self.group)
            return values.new_zeros((num_tokens, values.shape[1])).float().index_add(0, tokens, back.float())

        weights = None if topk_weights is None else home(topk_weights)
        return home(x).to(x.dtype), weights, EventOverlap()


class HybridEPBuffer:
    """The buffer of a group of ranks that send equally many tokens, with the methods that the wrapper calls."""

    def __init__(
        self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
        use_fp8: bool = False, num_sms_dispatch_api: Any = None, num_sms_combine_api: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        assert not use_fp8
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self.num_sms = num_sms_dispatch_api, num_sms_combine_api

    def dispatch_with_permute(
        self, *, hidden: Tensor, routing_map: Any = None, probs: Tensor | None = None, num_permuted_tokens: Any = None,
        pad_multiple: Any = None, handle: Any = None, **_: Any,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, Any]:  # fmt: skip
        assert hidden.is_contiguous() and hidden.shape[1] == self.hidden_dim and not pad_multiple
        if handle is None:
            assert routing_map.dtype == torch.bool and num_permuted_tokens is None
            handle = self._handle(routing_map)
        (tokens, sent, received, order), counts = handle[:4], handle[5]
        weights = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.shape[0] == hidden.shape[0]
            weights = _exchanged(probs.t()[handle[6], tokens], sent, received, self.group)[order]
        rows = _exchanged(hidden[tokens], sent, received, self.group)[order]
        return rows, weights, None, counts, handle

    def _handle(self, routing_map: Tensor) -> tuple[Any, ...]:
        experts, tokens = routing_map.t().nonzero(as_tuple=True)  # by expert, then by token
        sent_counts = routing_map.sum(dim=0)
        counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(counts, sent_counts, group=self.group)
        by_rank = counts.view(-1, self.num_local_experts)
        sent = sent_counts.view(-1, self.num_local_experts).sum(dim=1).tolist()
        local = torch.arange(self.num_local_experts).repeat(by_rank.shape[0]).repeat_interleave(counts)
        order = local.sort(stable=True).indices
        return tokens, sent, by_rank.sum(1).tolist(), order, routing_map.shape, by_rank.sum(0).int(), experts

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None, pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert hidden.is_contiguous() and not pad_multiple
        tokens, sent, received, order, shape, _, experts = handle

        def home(values: Tensor) -> Tensor:
            arrived = torch.empty_like(values)
            arrived[order] = values
            return _exchanged(arrived, received, sent, self.group)

        weights = None
        if probs is not None:
            weights = probs.new_zeros(shape)
            weights[tokens, experts] = home(probs)
        sums = torch.zeros((self.group.size(), shape[0], hidden.shape[1]))  # one of each rank, rounded, then all
        sums.index_put_((experts // self.num_local_experts, tokens), home(hidden).float(), accumulate=True)
        return sums.to(hidden.dtype).sum(dim=0, dtype=torch.float32).to(hidden.dtype), weights


@contextmanager
def installed() -> Iterator[None]:
    """Within the block the engine's wrapper finds DeepEP and HybridEP, which are this stub."""
    from megatron.core.transformer.moe import fused_a2a

    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    vars(package).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    vars(utils).update(EventHandle=EventOverlap, EventOverlap=EventOverlap)
    here = {"deep_ep": package, "deep_ep.utils": utils}
    sys.modules.update(here)
    try:
        importlib.reload(fused_a2a)
        yield
    finally:
        for name in here:  # and nothing that was imported in between, as `mock.patch.dict` would
            del sys.modules[name]
        importlib.reload(fused_a2a)
