"""The optimizer's part of a checkpoint, in a form that any layout and both kinds of optimizers can read.

    optimizer.state.param.NAME        the fp32 main weight of NAME; not in an fp32 run, where NAME itself is that
    optimizer.state.exp_avg.NAME      Adam's moments, fp32
    optimizer.state.exp_avg_sq.NAME
    plain values: per optimizer {"optimizer": {"param_groups": [...]}, "grad_scaler": {...}}

The engine's distributed optimizer, its optimizer for half precision and the one for fp32 each have a form of their own.
The distributed one's is the common one here, and `_to_common` and `_from_common` turn the others into it and back.

A distributed optimizer's shards are gathered for a save by `gather.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_moe.checkpoint.dist import not_saved, sharded_parts
from megatron_moe.config.schema import Run
from megatron_moe.engine.optimizer import compact_buckets, every_main_param, parts
from megatron_moe.model.matrices import is_matrix

_MAIN_WEIGHTS = "fp32_from_fp16_params"
_SHARDING = "param_state_sharding_type"
_OWN_PREFIX, _COMMON_PREFIX = "optimizer.state.fp32_param.", "optimizer.state.param."
FORMAT: dict[str, Any] = {
    # One tensor per parameter and moment, named for the parameter: independent of TP, PP, EP, DP and of bucket sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


def sharded_state(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool) -> Any:
    """Return the optimizer's sharded state dict. Collective: a distributed optimizer gathers its shards."""
    with compact_buckets(optimizer), every_main_param(optimizer), _unpacked(optimizer, of_distributed=loading):
        state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        for tensor in sharded_parts(state):
            tensor.data = tensor.data.detach()  # of what was unpacked, which goes back at the block's end
    _leave_empty_groups_out(state)
    for part, own in _parts(optimizer, state):
        _to_common(part, own)
        if loading:
            del own["optimizer"]["param_groups"]  # a list of other groups would not fit into it; see `load`
    return state


def _leave_empty_groups_out(state: object) -> None:
    """Drop groups without a parameter on this rank from the lists of main weights; `_from_common` puts them back.

    Plain values are saved once, by the first rank. If that has no experts (a pipeline whose first stage is dense) its
    empty list of main weights would be everyone's, and no stage with experts could be loaded.
    """
    if isinstance(state, dict):
        if _MAIN_WEIGHTS in state:
            groups = [group for group in state.pop(_MAIN_WEIGHTS) if group]
            if groups:
                state[_MAIN_WEIGHTS] = groups
        else:
            for part in state.values():
                _leave_empty_groups_out(part)


@torch.no_grad()
def load(optimizer: Any, state: Any, run: Run) -> None:
    """Load a state into the optimizer: main weights, moments, step count, loss scale.

    Which parameters form a group, its learning rate and decay, betas and epsilon are settings, not state: those of the
    present run are used.
    """
    step = saved_step(state)
    for part, common in _parts(optimizer, state):
        present = [] if part.is_stub_optimizer else part.optimizer.state_dict()["param_groups"]
        common["optimizer"]["param_groups"] = [{**group, "step": step} for group in present]
        _from_common(part, common)
    with every_main_param(optimizer), _unpacked(optimizer, of_distributed=True, keep=True):
        optimizer.load_state_dict(state)
    for part in parts(optimizer):
        # Packing makes weights of the main weights, on each rank those of its shard; the others get them here.
        if run.derived.packs_main_weights and part.config.use_distributed_optimizer:
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)


def _parts(optimizer: Any, state: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the engine's optimizers in a chain with their states, which have no number for a single optimizer."""
    chain = parts(optimizer)
    states = [state] if len(chain) == 1 else [state[index] for index in range(len(chain))]
    return [(part, own) for part, own in zip(chain, states) if own]


def _to_common(part: Any, own: dict[str, Any]) -> None:
    """Change an optimizer's sharded state into the common form; nothing is copied."""
    if part.config.use_distributed_optimizer:
        del own[_SHARDING]
        buffers = getattr(part, "buffers", None) or []  # none where this rank has no parameter for it
        for number, weight in enumerate(weight for buffer in buffers for weight in buffer.param_index_map):
            if not _has_main_weights(part):
                # The main weight of an fp32 weight is the weight: it is in the step already, and loaded with the model.
                own["param_state"][number]["param"] = not_saved(weight)
            if is_matrix(weight):
                own["param_state"][number]["exp_avg_sq"] = not_saved(_zeros(weight))
    elif _has_main_weights(part):
        for tensor in sharded_parts(own.get(_MAIN_WEIGHTS, [])):
            tensor.key = _COMMON_PREFIX + tensor.key.removeprefix(_OWN_PREFIX)
    else:
        own["optimizer"] = {name: own.pop(name) for name in ("param_groups", "state")}
    if not part.config.use_distributed_optimizer and hasattr(part.optimizer, "matrices"):
        mains = (main for group in part.optimizer.param_groups for main in group["params"])
        for number, main in enumerate(mains):
            if main in part.optimizer.matrices:
                own["optimizer"]["state"][number]["exp_avg_sq"] = not_saved(_zeros(main))


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape, without memory: the second moment of a weight that Muon updates."""
    return torch.zeros((), device=like.device).expand(like.shape)


def _from_common(part: Any, common: dict[str, Any]) -> None:
    """Undo `_to_common` on what was loaded."""
    if part.config.use_distributed_optimizer:
        common[_SHARDING] = FORMAT["distrib_optim_sharding_type"]
        return
    # Of an optimizer without a parameter on this rank: what is empty is in no file.
    common["optimizer"].setdefault("state", {})
    if _has_main_weights(part):
        loaded = iter(common.get(_MAIN_WEIGHTS, ()))
        groups = common["optimizer"]["param_groups"]
        common[_MAIN_WEIGHTS] = [next(loaded) if group["params"] else [] for group in groups]
    else:
        common.update(common.pop("optimizer"))


def _has_main_weights(part: Any) -> bool:
    """Return whether the run's weights have fp32 copies that the optimizer updates."""
    return part.config.bf16 or part.config.fp16


def saved_step(state: object) -> int:
    """Return how many updates a loaded state has had, which all of its parameters had."""
    return max((int(group.get("step", 0)) for group in _param_groups(state)), default=0)


def _param_groups(state: object) -> Iterator[dict[str, Any]]:
    """Yield every parameter group in a nested optimizer state."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key == "param_groups":
                yield from value
            elif key == "optimizer" or isinstance(key, int):
                yield from _param_groups(value)


@contextlib.contextmanager
def _unpacked(optimizer: Any, *, of_distributed: bool, keep: bool = False) -> Iterator[None]:
    """Put fp32 tensors in the place of state that is packed (`optim/adam.py`).

    Args:
        of_distributed: also that of distributed optimizers, whose shards a save gathers by themselves.
        keep: pack what is there at the end of the block.
    """
    with contextlib.ExitStack() as stack:
        for part in parts(optimizer):
            if hasattr(part.optimizer, "unpacked") and (of_distributed or not part.config.use_distributed_optimizer):
                stack.enter_context(part.optimizer.unpacked(keep=keep))
        yield
