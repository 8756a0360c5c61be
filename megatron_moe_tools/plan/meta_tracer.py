"""Run operations on torch's meta device, which has shapes and no storage, and count bytes, FLOPs and collectives.

A multiply-add counts as 2 FLOPs. Matrix products and attention are counted; norms, activations and softmax are not.
Causal attention is counted as half of the full square (S / 2 keys per query, not (S + 1) / 2), and its backward pass as
twice its forward, although the flash kernels compute the scores once more. `run.derived.flops_per_token`, from which
MFU is computed, is this count of one forward and backward pass without recomputation, divided by the tokens.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from megatron_moe import platform
from megatron_moe.engine.patching import replaced
from megatron_moe.model.context_parallel import attend_pieces, piece_gradients
from megatron_moe.platform.protocols import AutogradContext

# ---- The bytes of all live tensors, storage by storage, while operations run.
#
# The same counter observes a real step on real ranks and a step on the meta device, so that a plan and a measurement
# mean the same quantity. What a kernel allocates inside itself, and what a communication library keeps, is not counted.


HOST = "host"
"""The label of storages in a device's host memory."""


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts every storage that an operation returns, until the storage is freed.

    Storages that are older than the mode are counted from when an operation first returns them. Those with the label
    `HOST` are counted under their label alone.

    Attributes:
        live: bytes now.
        peak: largest `live` since `restart_peak`.
        label_peaks: the same peak of the storages with one label.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.label_peaks: dict[str, int] = defaultdict(int)
        self._label_live: dict[str, int] = defaultdict(int)
        self._label: str | None = None
        self._storages: dict[int, tuple[int, str | None, weakref.ref]] = {}

    def __enter__(self) -> LiveBytes:
        """Start counting; storages that are resized without an operation are counted too.

        Recomputation frees and refills an output by `UntypedStorage.resize_`, which no dispatch mode sees.
        """
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None:
                self._forget(storage._cdata)
                self._remember(storage, storage.nbytes(), known[1])
            return result

        self._patched_resize = replaced([torch.UntypedStorage], resize_=counted_resize)
        self._patched_resize.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        self._patched_resize.__exit__(*error)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = self.run(func, args, dict(kwargs or {}))
        leaves = (result,) if isinstance(result, Tensor) else tree_iter(result)
        for leaf in leaves:
            # A DTensor has no memory but its shard's, and the zeros of an added gradient have none.
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.layout == torch.strided:
                self._see(leaf)
        return result

    def run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the operation; a subclass may do it in another way."""
        return func(*args, **kwargs)

    def label_of(self, tensor: Tensor) -> str | None:
        """Return the label of a new tensor: that of the `labelled` block, unless a subclass decides otherwise."""
        return self._label

    def restart_peak(self) -> None:
        """Forget earlier peaks: from now on peaks are those of what follows."""
        self.peak = self.live
        self.label_peaks = defaultdict(int, self._label_live)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label the storages that are made in this context."""
        outer, self._label = self._label, label
        try:
            yield
        finally:
            self._label = outer

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        size = storage.nbytes()
        if known is None:
            self._remember(storage, size, self.label_of(tensor))
        elif known[0] != size:  # resized in place
            self._forget(storage._cdata)
            self._remember(storage, size, known[1])

    def _remember(self, storage: torch.UntypedStorage, size: int, label: str | None) -> None:
        key = storage._cdata
        self._storages[key] = (size, label, weakref.ref(storage, lambda _: self._forget(key)))
        if label != HOST:
            self.live += size
            self.peak = max(self.peak, self.live)
        if label is not None:
            self._label_live[label] += size
            self.label_peaks[label] = max(self.label_peaks[label], self._label_live[label])

    def _forget(self, key: int) -> None:
        size, label, _ = self._storages.pop(key, (0, None, None))
        if label != HOST:
            self.live -= size
        if label is not None:
            self._label_live[label] -= size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of some tensors."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


# ---- Operations and collectives on the meta device.

_aten = torch.ops.aten
_META = torch.device("meta")
Shape = Sequence[int]

# FLOPs.


def attention_flops(query: Shape, key: Shape, value: Shape, causal: bool) -> int:
    """Return the FLOPs of attention over [B, n, S, dk], [B, g, T, dk], [B, g, T, dv].

    There are two products per query and key. Causal queries are the last S of T, and see half of their own square.
    """
    batch, heads, queries, width = query
    keys = key[2]
    if causal:
        keys -= queries // 2
    return 2 * batch * heads * queries * keys * (width + value[-1])


def grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product [R, k] [e, k, n] or [m, R] [R, n]: every row meets one matrix."""
    return 2 * left[0] * left[1] * right[-1]


# Formulas that torch's FlopCounterMode does not have, in the form of its argument `custom_mapping`.
FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: grouped_flops,
    # [b, m, k] [b, k, n]; torch's own does not take a product into another dtype
    _aten.bmm: lambda left, right, *_, **__: 2 * math.prod(left) * right[-1],
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, dropout=0.0, causal=False, **_: attention_flops(
        q, k, v, causal
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, out, lse, dropout, causal, **_: (
        2 * attention_flops(q, k, v, causal)
    ),
    _aten._scaled_dot_product_efficient_attention: lambda q, k, v, bias, lse, dropout=0.0, causal=False, **_: (
        attention_flops(q, k, v, causal)
    ),
    _aten._scaled_dot_product_efficient_attention_backward: (
        lambda grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, **_: (
            2 * attention_flops(q, k, v, causal)
        )
    ),
}

_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


# The tracer.

# Operation of torch.ops.c10d -> (kind, which argument carries the bytes, which the group).
_COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all-reduce", 0, 1),
    "allreduce_coalesced_": ("all-reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "_allgather_base_": ("all-gather", 0, 2),
    "allgather_": ("all-gather", 0, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "reduce_scatter_": ("reduce-scatter", 1, 2),
    "alltoall_base_": ("all-to-all", 1, 2),
}


@dataclass(frozen=True)
class Collective:
    """A collective call.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "broadcast".
        ranks: the ranks that take part, see `ranks_of`.
        bytes: size of the whole tensor: of what is reduced, of the gathered result, or of what this rank sends (its own
            share included).
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return a group's ranks, counted from this rank on: so they are those of any stage that is like this one."""
    return tuple(rank - dist.get_rank() for rank in dist.get_process_group_ranks(group))


class MetaTracer(LiveBytes):
    """A dispatch mode that allocates on the meta device, whatever device the code asks for, and computes nothing.

    A number that is read back from a tensor (`.item()`) is 1.

    Args:
        logits_shape: (tokens, vocabulary) of this rank; tensors of that many elements are labelled "logits".
        attended: share of the pairs of a query and a key that documents leave of a sequence's.

    Attributes:
        collectives: collectives so far.
        flops: FLOPs so far.
    """

    def __init__(self, logits_shape: tuple[int, int], attended: float = 1.0) -> None:
        super().__init__()
        self.attended = attended
        self.collectives: list[Collective] = []
        self.flops = 0
        self._logits_shape = logits_shape

    def run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the operation's result on meta tensors; a collective is recorded instead of called."""
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in _COLLECTIVES:
                kind, tensors, group = _COLLECTIVES[name]
                ranks = ranks_of(ProcessGroup.unbox(args[group]))
                self.collectives.append(Collective(kind, ranks, _bytes(args[tensors])))
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        if not _makes_a_tensor(func):
            result, flops = _compute(func, args, kwargs)
            if func.overloadpacket in _ATTENTION:
                flops = round(flops * self.attended)
            self.flops += flops
            return result
        key = (func, *map(_key_of, args), *map(_key_of, kwargs.items()))
        known = _results.get(key)
        if known is not None:
            self.flops += known.flops
            return torch.empty_strided(known.size, known.stride, dtype=known.dtype, device=_META)
        result, flops = _compute(func, args, kwargs)
        self.flops += flops
        if result.is_meta and result.layout == torch.strided:  # what is made of tensors from outside has values
            _results[key] = _Result(result.shape, result.stride(), result.dtype, flops)
        return result

    def once(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function that calls this one once for arguments of certain shapes, and then takes what it took.

        For attention over a window: its many small operations are alike in all layers and layouts.
        """

        def call(*args: Any) -> tuple[Tensor, ...]:
            key = (function, platform.has_cuda(), self.attended, *map(_key_of, args[:-1]), repr(args[-1]))
            flops, live, peak = self.flops, self.live, self.peak
            known = _taken.get(key)
            if known is None:
                self.peak = live
                results = function(*args)
                of_results = tuple(
                    (one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in results
                )
                _taken[key] = (of_results, self.flops - flops, self.peak - live)
                self.peak = max(self.peak, peak)
                return results
            of_results, more_flops, more_bytes = known
            self.flops += more_flops
            self.peak = max(peak, live + more_bytes)
            return tuple(
                torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=_META).as_strided(shape, stride)
                for shape, stride, dtype, nbytes in of_results
            )

        return call

    def label_of(self, tensor: Tensor) -> str | None:
        """Return "logits" for a tensor of their shape, otherwise the label of the `labelled` block."""
        tokens, vocabulary = self._logits_shape
        if tensor.dim() > 1 and tensor.shape[-1] == vocabulary and tensor.numel() == tokens * vocabulary:
            return "logits"
        return super().label_of(tensor)


@contextmanager
def meta_device(device: str, logits_shape: tuple[int, int], attended: float = 1.0) -> Iterator[MetaTracer]:
    """Trace all operations in this context as on a machine with `device` ("cuda" or "cpu").

    Two fused kernels are replaced by stand-ins that keep for the backward pass what the kernels keep: attention without
    a score matrix, and the norm. On the meta device torch decomposes these, and keeps every intermediate result. Host
    memory of a device is labelled `HOST`.
    """
    tracer = MetaTracer(logits_shape, attended)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
    ) -> Tensor:
        # A mask comes from a context-parallel rank: its queries are the last of these keys, causal among themselves.
        return _Attend.apply(query, key, value, is_causal or attn_mask is not None, tracer)

    def host_memory(shape: Shape, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        with tracer.labelled(HOST):
            return torch.empty(tuple(shape), dtype=dtype, device=_META)

    kernels: dict[Callable, Callable] = {
        F.scaled_dot_product_attention: attend,
        F.rms_norm: lambda x, shape, weight, eps: _Normalise.apply(x, weight),
        platform.host_memory: host_memory,
        attend_pieces: tracer.once(attend_pieces),
        piece_gradients: tracer.once(piece_gradients),
    }
    with platform.fake_device(device, kernels), tracer:
        yield tracer


class _Attend(torch.autograd.Function):
    """Attention of [B, n, S, dk], [B, g, T, dk], [B, g, T, dv] -> [B, n, S, dv].

    It saves operands, result and logsumexp (fp32).
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, causal: bool, tracer: MetaTracer
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        context = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # as the kernels lay it out
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, context, logsumexp)
        flops = attention_flops(query.shape, key.shape, value.shape, causal)
        ctx.tracer, ctx.flops = tracer, round(flops * tracer.attended)
        tracer.flops += ctx.flops
        return context

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.tracer.flops += 2 * ctx.flops
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


class _Normalise(torch.autograd.Function):
    """A norm of [..., H] with weight [H] -> [..., H]. It saves both, and one fp32 number per row."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Result(NamedTuple):
    """The result of an operation for arguments of certain shapes, cached: torch's own rules for it are slow Python."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    flops: int


# Cache of this process, by function and arguments; a result on the meta device depends on nothing else.
_results: dict[Hashable, _Result] = {}
_taken: dict[Hashable, tuple[tuple[tuple[Any, ...], ...], int, int]] = {}
"""Cache of `MetaTracer.once`: size, stride, dtype and bytes of each result; FLOPs; peak above what was live."""


def _compute(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Return the result of an operation on meta tensors, and its FLOPs; 0 of what is no product."""
    if func is torch.ops.aten._grouped_mm.default:
        # [R, k] [e, k, n] -> [R, n], or [m, R] [R, n] -> [e, m, n]; torch's own accepts bf16 only
        left, right, offsets = args[:3]
        groups = () if right.dim() == 3 else offsets.shape
        product = left.new_empty((*groups, left.shape[0], right.shape[-1]), dtype=kwargs.get("out_dtype"))
        return product, grouped_flops(left.shape, right.shape)
    result = func(*args, **kwargs)
    packet = func._overloadpacket
    if packet in FORMULAS:
        shapes = [one.shape if isinstance(one, Tensor) else one for one in args]
        return result, FORMULAS[packet](*shapes, **kwargs)
    if packet in flop_registry:
        return result, flop_registry[packet](*args, **kwargs, out_val=result)
    return result, 0


def _key_of(argument: object) -> Hashable:
    """Return a key with all that the result of an operation on meta tensors depends on."""
    kind = type(argument)
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (tuple, list)) and kind in (tuple, list):
        return tuple(map(_key_of, argument))
    return kind, argument  # 1, 1.0 and True are equal, and promote differently


@functools.cache
def _makes_a_tensor(func: OpOverload) -> bool:
    """Return whether an operation returns one tensor with a storage of its own, and writes to none."""
    returns, arguments = func._schema.returns, func._schema.arguments
    if func is torch.ops.aten._unsafe_view.default:  # a view, and its schema does not say so
        return False
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    return all(one.alias_info is None for one in (*returns, *arguments))


def _bytes(argument: Tensor | Sequence) -> int:
    """Return the bytes of a tensor, or of all in nested lists."""
    return argument.nbytes if isinstance(argument, Tensor) else sum(map(_bytes, argument))
