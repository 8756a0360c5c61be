"""megatron-core's `dist_checkpointing` and torch's checkpoints beneath it: types, plans, and pickles kept in bounds."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing import load
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import SavePlanner

from megatron_moe.engine.patching import replaced

_FORCED = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}

# It announces each of its steps at every save.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)


@contextmanager
def restricted_pickles(load_pickle: Callable[[Any], Any]) -> Iterator[None]:
    """Have torch's reader read pickles by this function in the block, and `torch.load` weights alone.

    The engine and torch, in all releases, read `.metadata` and values that are no tensors without restriction.
    """
    before = {name: os.environ.get(name) for name in _FORCED}
    os.environ.update(_FORCED)
    try:
        with replaced([filesystem], pickle=SimpleNamespace(load=load_pickle)), without_warnings():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence torch's warnings about how the engine calls it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed|megatron\.core")
        yield


def save_planner(state: dict[str, Any]) -> tuple[SavePlanner, dict[str, Any], dict[str, Any]]:
    """Return what plans a save of a sharded state dict, its tensors as torch takes them, and its other values."""
    with without_warnings():
        sharded, common = save_preprocess(state)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        return planner, mcore_to_pyt_state_dict(by_key, False), common
