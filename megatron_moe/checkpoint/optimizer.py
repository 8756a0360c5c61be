"""The optimizer's part of a checkpoint, in a form that any layout and both kinds of optimizers can read.

    optimizer.state.param.NAME        the fp32 main weight of NAME; not in an fp32 run, where NAME itself is that
    optimizer.state.exp_avg.NAME      Adam's moments, fp32
    optimizer.state.exp_avg_sq.NAME
    plain values: per optimizer {"optimizer": {"param_groups": [...]}, "grad_scaler": {...}}

The engine's distributed optimizer, its optimizer for half precision and the one for fp32 each have a form of their own.
The distributed one's is the common one here: `sharded_state` turns the others into it, and `load` turns them back.

A distributed optimizer's shards are gathered for a save at the end of this file.
"""

from __future__ import annotations

import gc
import itertools
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatron_moe import platform
from megatron_moe.checkpoint.dist import sharded_parts
from megatron_moe.config.schema import Run
from megatron_moe.engine.dist_checkpointing import LocalNonpersistentObject
from megatron_moe.engine.optimizer import compact_buckets, every_main_param, gathered_by, parts
from megatron_moe.model.matrices import is_matrix
from megatron_moe.platform.protocols import EngineOptimizer, OptimizerPart

_MAIN_WEIGHTS = "fp32_from_fp16_params"
_SHARDING = "param_state_sharding_type"
_OWN_PREFIX, _COMMON_PREFIX = "optimizer.state.fp32_param.", "optimizer.state.param."
FORMAT: dict[str, Any] = {
    # One tensor per parameter and moment, named for the parameter: independent of TP, PP, EP, DP and of bucket sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


State = dict[Any, Any]
"""A nested optimizer state: of one optimizer, or of several by their numbers."""


class SavedOptimizer(OptimizerPart, Protocol):
    """One of the engine's optimizers, or their chain; the last attributes are a distributed optimizer's."""

    param_groups: list[dict[str, Any]]
    grad_scaler: Any
    model_chunks: list[Any]
    buffers: list[Any]
    data_parallel_group: torch.distributed.ProcessGroup
    gbuf_ranges: list[dict[Any, list[dict[str, Any]]]]

    def sharded_state_dict(self, model_state: State, *, is_loading: bool, metadata: State) -> Any: ...

    def load_state_dict(self, state: State) -> None: ...

    def _get_main_param_and_optimizer_states(self, weight: torch.Tensor) -> dict[str, torch.Tensor]: ...


def sharded_state(
    optimizer: SavedOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> Any:
    """Return the optimizer's sharded state dict. Collective: a distributed optimizer gathers its shards."""
    with compact_buckets(optimizer), every_main_param(optimizer), _unpacked(optimizer, of_distributed=loading):
        state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        for tensor in sharded_parts(state):
            tensor.data = tensor.data.detach()  # of what was unpacked, which goes back at the block's end
    for part, own in parts_with_state(optimizer, state):
        # Change it into the common form; nothing is copied.
        if part.config.use_distributed_optimizer:
            del own[_SHARDING]
            buffers = getattr(part, "buffers", None) or []  # none where this rank has no parameter for it
            for number, weight in enumerate(weight for buffer in buffers for weight in buffer.param_index_map):
                if not has_main_weights(part):
                    # The main weight of an fp32 weight is the weight: in the step already, and loaded with the model.
                    own["param_state"][number]["param"] = LocalNonpersistentObject(weight)
                if is_matrix(weight):
                    own["param_state"][number]["exp_avg_sq"] = LocalNonpersistentObject(_zeros(weight))
        elif has_main_weights(part):
            # Plain values are saved once, by the first rank. If that has no experts (a pipeline whose first stage is
            # dense) an empty list of main weights would be everyone's: groups without a parameter on this rank are
            # left out, and `load` puts them back.
            groups = [group for group in own.pop(_MAIN_WEIGHTS, []) if group]
            if groups:
                own[_MAIN_WEIGHTS] = groups
            for tensor in sharded_parts(groups):
                tensor.key = _COMMON_PREFIX + tensor.key.removeprefix(_OWN_PREFIX)
        else:
            own["optimizer"] = {name: own.pop(name) for name in ("param_groups", "state")}
        if not part.config.use_distributed_optimizer and hasattr(part.optimizer, "matrices"):
            mains = (main for group in part.optimizer.param_groups for main in group["params"])
            for number, main in enumerate(mains):
                if main in part.optimizer.matrices:
                    own["optimizer"]["state"][number]["exp_avg_sq"] = LocalNonpersistentObject(_zeros(main))
        if loading:
            del own["optimizer"]["param_groups"]  # a list of other groups would not fit into it; see `load`
    return state


@torch.no_grad()
def load(optimizer: SavedOptimizer, state: State, run: Run) -> None:
    """Load a state into the optimizer: main weights, moments, step count, loss scale.

    Which parameters form a group, its learning rate and decay, betas and epsilon are settings, not state: those of the
    present run are used.
    """
    step = saved_step(optimizer, state)
    for part, common in parts_with_state(optimizer, state):
        present = [] if part.is_stub_optimizer else part.optimizer.state_dict()["param_groups"]
        common["optimizer"]["param_groups"] = [{**group, "step": step} for group in present]
        if part.config.use_distributed_optimizer:
            common[_SHARDING] = FORMAT["distrib_optim_sharding_type"]
            continue
        # Of an optimizer without a parameter on this rank: what is empty is in no file.
        common["optimizer"].setdefault("state", {})
        if has_main_weights(part):
            loaded = iter(common.get(_MAIN_WEIGHTS, ()))
            groups = common["optimizer"]["param_groups"]
            common[_MAIN_WEIGHTS] = [next(loaded) if group["params"] else [] for group in groups]
        else:
            common.update(common.pop("optimizer"))
    with every_main_param(optimizer), _unpacked(optimizer, of_distributed=True, keep=True):
        optimizer.load_state_dict(state)
    for part in parts(optimizer):
        # Packing makes weights of the main weights, on each rank those of its shard; the others get them here.
        if run.derived.packs_main_weights and part.config.use_distributed_optimizer:
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)


def parts_with_state(optimizer: EngineOptimizer, state: State) -> list[tuple[Any, State]]:
    """Return the engine's optimizers in a chain with their states, which have no number for a single optimizer."""
    chain = parts(optimizer)
    states = [state] if len(chain) == 1 else [state[index] for index in range(len(chain))]
    return [(part, own) for part, own in zip(chain, states) if own]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape, without memory: the second moment of a weight that Muon updates."""
    return torch.zeros((), device=like.device).expand(like.shape)


def has_main_weights(part: EngineOptimizer) -> bool:
    """Return whether the run's weights have fp32 copies that the optimizer updates."""
    return part.config.bf16 or part.config.fp16


def saved_step(optimizer: EngineOptimizer, state: State) -> int:
    """Return how many updates a loaded state has had, which all of its parameters had."""
    every = (own["optimizer"].get("param_groups", ()) for _, own in parts_with_state(optimizer, state))
    return max((int(group.get("step", 0)) for groups in every for group in groups), default=0)


@contextmanager
def _unpacked(optimizer: EngineOptimizer, *, of_distributed: bool, keep: bool = False) -> Iterator[None]:
    """Put fp32 tensors in the place of state that is packed (`optim/adam.py`).

    Args:
        of_distributed: also that of distributed optimizers, whose shards a save gathers by themselves.
        keep: pack what is there at the end of the block.
    """
    with ExitStack() as stack:
        for part in parts(optimizer):
            if hasattr(part.optimizer, "unpacked") and (of_distributed or not part.config.use_distributed_optimizer):
                stack.enter_context(part.optimizer.unpacked(keep=keep))
        yield


# Gathering a distributed optimizer's shards for a save, into host memory of the rank that writes them
#
# The engine would copy every shard four times and gather all of them on every rank of a data-parallel group, of which
# one writes them; in every kind of save the training waits for that. Here each shard goes to that rank alone, in
# pieces: what a save takes on the device is bounded by `GATHERED_BYTES`, however large a bucket of the optimizer is,
# and is freed at its end. Names and shapes in the state dict stay the engine's.

GATHERED_BYTES = 64 * 2**20
"""What one gather brings to the writer from all ranks together. Two are in turn, and so are the pieces sent."""

Buffers = dict[Any, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and the tensor that is to be copied there."""


@dataclass
class Gathered:
    """The storages, by address, of the tensors that `gathered_into` put into a state dict.

    private: storages that the training does not use, so that they need not be copied before it goes on. absent:
    storages of ranks that do not write, which are not filled. rest: what is left to copy into the private ones.
    """

    private: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    rest: list[Copy] = field(default_factory=list)


@contextmanager
def gathered_into(optimizer: EngineOptimizer, buffers: Buffers, *, later: bool) -> Iterator[Gathered]:
    """Make distributed optimizers gather into `buffers` while a state dict is built in the block.

    Missing buffers are allocated, and hold the state until the next save. With `later`, copies that need no other rank
    are left to be made later (`Gathered.rest`), and the buffers are page-locked: they are worth it where they are kept.
    """
    gathered = Gathered()
    sharded = [part for part in parts(optimizer) if hasattr(part, "get_parameter_state_dp_zero")]
    # The engine collects garbage after each optimizer, which takes the longer the more objects there are. What somebody
    # has frozen before stays so: there is no freezing of some objects alone.
    freezing = bool(sharded) and not gc.get_freeze_count()
    if freezing:
        gc.freeze()
    try:
        with ExitStack() as stack:
            for number, part in enumerate(sharded):
                stack.enter_context(gathered_by(part, partial(_gather, part, number, buffers, gathered, later)))
            yield gathered
    finally:
        if freezing:
            gc.unfreeze()


@torch.no_grad()
def _gather(
    part: SavedOptimizer, number: int, buffers: Buffers, gathered: Gathered, later: bool, *_: object, **__: object
) -> dict[Any, Any]:
    """Do what the engine's `DistributedOptimizer.get_parameter_state_dp_zero` does, with the same result.

    Of each gradient buffer it has main weights and moments without its buckets' padding: fp32, [numel_unpadded].
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    group = part.data_parallel_group
    for index, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges)):
        ((dtype, bucket_ranges),) = by_dtype.items()
        whole: dict[str, Any] = {"numel_unpadded": buffer.numel_unpadded}
        state[index] = {dtype: whole}
        keys = ("param", *getattr(part, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))
        if all(is_matrix(weight) for weight in buffer.param_index_map):
            # Weights that Muon updates have no second moment, and none is saved.
            keys = tuple(key for key in keys if key != "exp_avg_sq")
            whole["exp_avg_sq"] = torch.zeros(()).expand(buffer.numel_unpadded)
            gathered.private.add(whole["exp_avg_sq"].data_ptr())
        for key in keys:
            if group.rank() == 0:
                place = (number, index, key)
                kept = buffers.get(place)
                if kept is None or kept.numel() < buffer.numel_unpadded:
                    kept = platform.host_memory((buffer.numel_unpadded,), torch.float32, pinned=later)
                    buffers[place] = kept
                whole[key] = kept[: buffer.numel_unpadded]
                gathered.private.add(whole[key].data_ptr())
            else:
                whole[key] = torch.empty(buffer.numel_unpadded)  # its pages are never touched
                gathered.absent.add(whole[key].data_ptr())
        offset = 0
        for bucket, ranges in zip(buffer.buckets, bucket_ranges):
            shard = _Shard(part, ranges["param_map"], bucket.grad_data.numel() // group.size())
            there = {key: whole[key][offset : offset + bucket.numel_unpadded] for key in keys}
            if group.size() > 1:
                _gather_bucket(shard, there, group)
            elif later and not hasattr(part.optimizer, "values_of"):
                gathered.rest += shard.copies(there)
            else:
                for target, source in shard.copies(there):
                    target.copy_(source)
            offset += bucket.numel_unpadded
    return state


class _Shard:
    """A rank's shard of one bucket: the parameters, or parts of them, whose state it holds, by their places."""

    def __init__(self, part: SavedOptimizer, param_map: dict[torch.nn.Parameter, Any], numel: int) -> None:
        self._part, self.numel = part, numel
        places = [(where["gbuf_local"].start, where["gbuf_local"].end, weight) for weight, where in param_map.items()]
        self._places = sorted(places, key=lambda place: place[0])
        self._ends = [end for _, end, _ in self._places]

    def _state(self, weight: torch.nn.Parameter, key: str, begin: int, end: int) -> torch.Tensor:
        adam = self._part.optimizer
        if hasattr(adam, "values_of"):  # packed: optim/adam.py
            group, order = self._part.model_param_group_index_map[weight]
            return adam.values_of(adam.param_groups[group]["params"][order], key, begin, end)
        return self._part._get_main_param_and_optimizer_states(weight)[key].view(-1)[begin:end]

    def copies(self, targets: dict[str, torch.Tensor]) -> Iterator[Copy]:
        """Yield the copies that put the whole shard into targets of its size, by the names of the state.

        What is unpacked for it is there until it is copied.
        """
        for start, end, weight in self._places:
            for key, target in targets.items():
                yield target[start:end], self._state(weight, key, 0, end - start)

    def read(self, key: str, begin: int, piece: torch.Tensor) -> None:
        """Copy one kind of state into `piece` from element `begin` on. Padding between parameters is left as it is."""
        end = begin + piece.numel()
        for start, stop, weight in self._places[bisect_right(self._ends, begin) :]:
            if start >= end:
                break
            first, last = max(start, begin), min(stop, end)
            piece[first - begin : last - begin].copy_(self._state(weight, key, first - start, last - start))


def _gather_bucket(shard: _Shard, there: dict[str, torch.Tensor], group: torch.distributed.ProcessGroup) -> None:
    """Gather all ranks' shards of a bucket in `there` on the group's first rank. Collective.

    While one piece is copied to the host the next one is gathered. No event is needed for the two places that they
    take in turn: NCCL begins a gather after what was queued before it, the copy of the last piece from the same place
    among it, and what is queued after `wait` begins when the gather is done.
    """
    size, first = group.size(), torch.distributed.get_global_rank(group, 0)
    length = piece_numel(shard.numel, size)
    sent = torch.empty(2, length, device=platform.device())
    received = torch.empty(2, size * length, device=platform.device()) if group.rank() == 0 else None
    pending: list[tuple[torch.distributed.Work, list[torch.Tensor], str, int]] = []

    def copy_gathered() -> None:
        """Copy the pieces of all ranks of the last gather to their places, but no padding at the end."""
        for work, pieces, key, begin in pending:
            work.wait()
            for rank, piece in enumerate(pieces):
                place = there[key][rank * shard.numel + begin :][: piece.numel()]
                place.copy_(piece[: place.numel()], non_blocking=True)

    for number, (key, begin) in enumerate(itertools.product(there, range(0, shard.numel, length))):
        numel = min(length, shard.numel - begin)
        piece, pieces = sent[number % 2, :numel], None
        shard.read(key, begin, piece)
        if received is not None:
            pieces = list(received[number % 2, : size * numel].chunk(size))
        work = torch.distributed.gather(piece, pieces, dst=first, group=group, async_op=True)
        copy_gathered()
        pending = [(work, pieces or [], key, begin)]
    copy_gathered()
    platform.synchronize()


def piece_numel(of_rank: int, size: int) -> int:
    """Return how many elements of each rank's shard of `of_rank` elements one gather over `size` ranks brings."""
    return max(min(GATHERED_BYTES // (4 * size), of_rank), 1)
