"""Linear layers that multiply in FP8: the engine's parallel ones, those of latent attention, Transformer Engine's.

Tiles are those of `moe/grouped_gemm_fp8.py`, cut on each rank's part of a weight: where TP cuts a dimension at
multiples of 128, they are those of the whole weight. A layer keeps its weights, keys, checkpoints and communication.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config import module_names
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_moe.engine.modules import with_class
from megatron_moe.model.initialize import global_name
from megatron_moe.model.mla import ReplicatedLinear
from megatron_moe.moe.experts import LocalExperts
from megatron_moe.moe.grouped_gemm_fp8 import (
    Fp8Product,
    fp8_products,
    require_fp8_of_transformer_engine,
    transformer_engine_in_fp8,
)


class _InFp8:
    """A mixin for the engine's parallel linear layers: their product, with the communication around it."""

    fp8_product: Fp8Product

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        **_: Any,
    ) -> Tensor:
        """Return [S, B, out / TP] for an input [S, B, in], or [S / TP, B, in] under sequence parallelism.

        Backward: the input's gradients are summed over TP ranks, in the model's dtype. The gathered input is kept for
        it, which the engine's layers gather again.
        """
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = self.fp8_product.linear(input, weight)
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_InFp8, ColumnParallelLinear):
    """The engine's column-parallel linear layer in FP8."""


class Fp8RowParallelLinear(_InFp8, RowParallelLinear):
    """The engine's row-parallel linear layer in FP8."""


class Fp8ReplicatedLinear(ReplicatedLinear):
    """The down projections of latent attention in FP8."""

    fp8_product: Fp8Product

    def forward(self, x: Tensor) -> Tensor:
        """See `ReplicatedLinear.forward`."""
        return self.fp8_product.linear(x, self.weight)


class _ByTransformerEngine:
    """A mixin for Transformer Engine's linear layers, which cut a gated layer's two matrices as one."""

    fp8_format: str

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the layer in FP8, forward and, as it remembers this, backward."""
        with transformer_engine_in_fp8(self.fp8_format):
            return super().forward(*args, **options)  # type: ignore[misc]


_CLASSES: dict[type, type] = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    ReplicatedLinear: Fp8ReplicatedLinear,
}


@functools.cache
def _of_transformer_engine(stock: type) -> type:
    return type(f"Fp8{stock.__name__}", (_ByTransformerEngine, stock), {})


def multiply_in_fp8(chunk: torch.nn.Module, run: Run) -> None:
    """Replace the linear layers of a GPTModel chunk that `--fp8-format` names by those that multiply in FP8.

    Routed experts have been built with their own kernels.

    Raises:
        ConfigError: Transformer Engine has no FP8 on this device.
    """
    names = set(module_names.multiplied_in_fp8(run))
    if not names:
        return
    gate_up, single = fp8_products(run.precision.fp8_format or "")
    for name, module in list(chunk.named_modules()):
        if global_name(chunk, name) not in names or isinstance(module, LocalExperts):
            continue
        stock = type(module)
        made: Any
        if stock in _CLASSES:
            # The gate and the up projection of a gated layer are two matrices.
            gated = name.endswith(".linear_fc1") and chunk.config.gated_linear_unit
            made = with_class(_CLASSES[stock], module)
            made.fp8_product = gate_up if gated else single
        else:
            require_fp8_of_transformer_engine("--transformer-impl transformer_engine")
            made = with_class(_of_transformer_engine(stock), module)
            made.fp8_format = run.precision.fp8_format
        chunk.set_submodule(name, made)
