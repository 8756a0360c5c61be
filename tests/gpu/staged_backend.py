"""A backend of torch.distributed, for tests, that lets several ranks share one GPU.

NCCL refuses two ranks on one device, and gloo has no all-to-all for CUDA tensors. `StagedGroup` copies tensors into the
CPU's memory, lets gloo do the collective, and copies what was received back when the caller waits. So the kernels and
the placement of a layout can be checked on one card; NCCL, its streams and its speed cannot.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "staged"
_CPU = torch.device("cpu")
# Of the first argument of a collective gloo writes the tensors; torch 2.13 has other names for some than 2.11.
RECEIVING = """
    allgather _allgather_base all_gather_single all_gather_single_coalesced allgather_coalesced
    allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base all_to_all_single broadcast
    gather recv recv_anysource reduce reduce_scatter _reduce_scatter_base reduce_scatter_single
    reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter
""".split()
SENDING = ("send", "barrier")


class _Staged:
    """The copies of one collective's tensors in the CPU's memory."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.copy(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        # Also of a tensor that is in the CPU's memory: a dry run then goes the same way as one on a device.
        here = torch.empty(value.shape, dtype=value.dtype, device=_CPU)
        here.copy_(value.detach())
        self.pairs.append((value, here))
        return here

    def copy_back(self) -> None:
        with torch.no_grad():
            for tensor, here in self.pairs:
                tensor.detach().copy_(here)
        self.pairs = []


class StagedWork(dist.Work):
    """A collective that is under way; `wait` ends it, and writes what was received."""

    def __init__(self, work: Any, received: _Staged, operands: Any) -> None:
        super().__init__()
        self._work, self._received, self._operands = work, received, operands

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        self._received.copy_back()
        self._work = self._operands = None
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class StagedGroup(dist.ProcessGroup):
    """A process group whose collectives go through the CPU's memory and gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._inner = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._inner._register_backend(_CPU, gloo, backend)
        self._inner._set_default_backend(gloo)
        self._register_backend(_CPU, gloo, backend)  # object collectives ask the group for its devices

    def getBackendName(self) -> str:
        return BACKEND

    def abort(self) -> None:
        """End what is under way."""
        self._inner.abort()


def _collective(name: str) -> Any:
    def call(self: StagedGroup, *arguments: Any, **options: Any) -> StagedWork:
        received, operands = _Staged(), _Staged()
        staged = [(operands if number or name in SENDING else received).copy(v) for number, v in enumerate(arguments)]
        options = {key: operands.copy(value) for key, value in options.items()}
        return StagedWork(getattr(self._inner, name)(*staged, **options), received, (staged, operands))

    call.__name__ = name
    return call


for _name in (*RECEIVING, *SENDING):
    if hasattr(dist.ProcessGroup, _name):
        setattr(StagedGroup, _name, _collective(_name))


def register() -> None:
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
