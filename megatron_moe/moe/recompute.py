"""Recomputation of a function's output in the backward pass.

The engine's `tensor_parallel.checkpoint` keeps a function's input and runs the function again in the backward pass,
with the same random numbers. `without_output` is for a function whose output alone is large: the output is not kept
for the function that reads it, and is computed again when the gradient of that function's result arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor


def without_output(produce: Callable[..., Any], consume: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return consume(*produce(*inputs)), with the same numbers, without keeping what `produce` returned.

    The storage is freed after `consume`. When the gradient of the result arrives, `produce` runs again and fills the
    storage, so that everything `consume` saved of it, views included, is complete before it is read.

    Args:
        produce: returns a tensor or a tuple of tensors that no function but `consume` reads. Gradients of inputs and
            parameters are found as usual.
        consume: takes them as its arguments; its result must depend on them.
    """
    checkpoint = CheckpointWithoutOutput(fp8=None)  # its default, False, stands for "FP8, with Transformer Engine"
    produced = checkpoint.checkpoint(produce, *inputs)
    result = consume(*produced) if isinstance(produced, tuple) else consume(produced)
    checkpoint.discard_output_and_register_recompute(result)
    return result
