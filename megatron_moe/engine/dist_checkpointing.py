"""megatron-core's `dist_checkpointing`: the types by which its modules say where their weights belong."""

from __future__ import annotations

import logging

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

__all__ = ["ShardedTensor", "ShardedTensorFactory", "make_sharded_tensors_for_checkpoint"]

# It announces each of its steps.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
