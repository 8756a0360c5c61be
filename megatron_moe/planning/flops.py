"""Counting floating-point operations as operations run, by one definition.

A multiply-add is 2. Matrix products and attention are counted, nothing else: no norm, no activation, no softmax. Causal
attention is counted as half of the full square (S / 2 keys per query, not (S + 1) / 2), and its backward pass as twice
its forward, although the flash kernels compute the scores once more. `config.derived.flops_per_token`, which MFU goes
by, is this count of one forward and backward pass without recomputation, divided by the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
Shape = Sequence[int]


def attention_flops(query: Shape, key: Shape, value: Shape, causal: bool) -> int:
    """[B, n, S, dk], [B, g, T, dk], [B, g, T, dv]: two products per query and key; causal queries are the last S of T,
    and see half of their own square."""
    batch, heads, queries, width = query
    keys = key[2] - queries // 2 if causal else key[2]
    return 2 * batch * heads * queries * keys * (width + value[-1])


def grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """[R, k] [e, k, n] or [m, R] [R, n]: every row meets one matrix."""
    return 2 * left[0] * left[1] * right[-1]


def _flash(query: Shape, key: Shape, value: Shape, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return attention_flops(query, key, value, causal)


def _flash_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, out: Shape, lse: Shape, dropout: float, causal: bool, **_: Any
) -> int:
    return 2 * attention_flops(query, key, value, causal)


# What torch's FlopCounterMode does not know: its argument `custom_mapping`.
FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}


def operation_flops(operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one call of an overload, from `FORMULAS` or torch's own; 0 for what is no product."""
    packet = operation._overloadpacket
    if packet in FORMULAS:
        return FORMULAS[packet](*map(_shape, args), **kwargs)
    formula = flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _shape(argument: Any) -> Any:
    return argument.shape if isinstance(argument, torch.Tensor) else argument
