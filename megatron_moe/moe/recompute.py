"""Recomputation by module: which modules are recomputed, and the two ways there are.

`tensor_parallel.checkpoint` keeps a function's input and runs it again in the backward pass, with the same random
numbers. `forgetting` is for a function whose output is the only large thing: the output is not kept for whoever reads
it, and comes back when the reader's gradient does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor


def forgetting(produce: Callable[..., Any], consume: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """consume(*produce(*inputs)), with the same numbers, without keeping what `produce` returned.

    Its storage is freed after `consume`; when the gradient of the result arrives, `produce` runs again and fills it, so
    that whatever `consume` kept of it, views too, is whole before it is read.

    Args:
        produce: returns a tensor or a tuple of tensors that nobody but `consume` reads. Gradients of inputs and
            parameters are found as usual.
        consume: takes them as its arguments; its result must depend on them.
    """
    checkpoint = CheckpointWithoutOutput(fp8=None)  # its default, False, stands for "FP8, with Transformer Engine"
    produced = checkpoint.checkpoint(produce, *inputs)
    result = consume(*produced) if isinstance(produced, tuple) else consume(produced)
    checkpoint.discard_output_and_register_recompute(result)
    return result
