"""Audit any torch module: one forward and backward under the tracer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_moe.precision.audit import Audit
from megatron_moe.precision.tracer import Tracer


def audit_module(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    about: dict[str, Any] | None = None,
) -> Audit:
    """Trace one forward and backward of `module(*args, **kwargs)`.

    The backward starts from the output's `loss` if it has one, else from the sum, in fp32, of all outputs that have a
    graph. What the module raises is in the audit's `error`; KeyboardInterrupt and the like pass.

    Args:
        about: facts for the report's head, such as `subject` and `dtype`.
    """
    tracer = Tracer(module, about)
    try:
        with tracer:
            output = module(*args, **(kwargs or {}))
            loss = getattr(output, "loss", None)
            outputs = [loss] if loss is not None else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            total = [value.float().sum() for value in outputs if value.requires_grad]
            if total:
                torch.stack(total).sum().backward()
    except Exception:  # the tracer wrote it down: the report says what and where
        assert tracer.audit.error is not None
    return tracer.audit
