"""The shared expert: a dense MLP that processes every token, in addition to the routed experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_moe import platform
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.moe.options import MoEOptions
from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.platform import streams
from megatron_moe.platform.isolation import without_autocast
from megatron_moe.precision.contract import mixes_dtypes


@mixes_dtypes("rows in the model's dtype are weighed in fp32 without a copy of them in fp32")
def _weighed(output: Tensor, gate: Tensor) -> Tensor:
    """Return `output` [S, B, H], in the model's dtype, times `gate` [S, B, 1], fp32 or fp64, in the gate's dtype."""
    return output * gate


class SharedExperts(CopiesShareGroups, MLP):
    """The engine's tensor-parallel MLP at the shared width, optionally gated (Qwen2-MoE).

    Args:
        config: the engine's TransformerConfig.
        options: the layer's; width and gate are read from them.
        submodules: the engine's MLPSubmodules (column- and row-parallel linear layers).
        tp_group: the tensor-parallel group.
    """

    def __init__(self, config: Any, options: MoEOptions, submodules: MLPSubmodules, tp_group: Any) -> None:
        # The engine's MLP takes one of its two widths from the configuration, whatever width it is given.
        own_config = copy.copy(config)
        own_config.ffn_hidden_size = options.shared_ffn_hidden_size
        super().__init__(own_config, submodules, ffn_hidden_size=options.shared_ffn_hidden_size, tp_group=tp_group)
        self.gate_weight: torch.nn.Parameter | None = None
        self.fuse_weight_gradients = options.fuse_weight_gradients is not False
        if options.shared_gate:
            self.gate_weight = torch.nn.Parameter(torch.empty(1, options.hidden_size, dtype=config.params_dtype))
            # Under sequence parallelism each TP rank gates its own tokens: gradients are summed over TP.
            self.gate_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            if config.perform_initialization:
                config.init_method(self.gate_weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output [S, B, H] for `hidden` [S, B, H], in the same dtype.

        A surrounding autocast does not change the result, also where the layer recomputes this module alone in a
        backward pass under autocast.
        """
        with without_autocast(hidden.device.type):
            return self._gated(hidden)

    def _gated(self, hidden: Tensor) -> Tensor:
        output, bias = super().forward(hidden)
        if bias is not None:
            output = output + bias
        if self.gate_weight is not None:
            # The gate is one number per token; in fp32 (or in the fp64 of the model) it costs nothing.
            wide = torch.promote_types(hidden.dtype, torch.float32)
            gate = torch.sigmoid(gate_product(hidden, self.gate_weight, wide, self.fuse_weight_gradients))
            output = _weighed(output, gate).to(hidden.dtype)
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the engine's sharded state, which covers submodules but not own parameters, plus the gate."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.gate_weight is not None:
            own = {"gate_weight": self.gate_weight}
            sharded.update(make_sharded_tensors_for_checkpoint(own, prefix, {}, sharded_offsets))
        return sharded


class SequentialSharedExperts:
    """The schedule of a shared expert that computes when the routed experts are done."""

    def fork(self, hidden: Tensor) -> Tensor:
        """Return hidden [S, B, H] as `compute` takes it; called before the tokens are dispatched."""
        return hidden

    def compute(self, shared_experts: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return what `add` takes; called when the dispatch is queued, before the experts compute."""
        return hidden

    def add(self, shared_experts: Callable[[Tensor], Tensor], output: Tensor, shared: Tensor) -> Tensor:
        """Return the combined output [S, B, H] with the shared expert's."""
        return output + shared_experts(shared)


class NoSharedExpert(SequentialSharedExperts):
    """The schedule of a layer without a shared expert."""

    def add(self, shared_experts: Callable[[Tensor], Tensor], output: Tensor, shared: Tensor) -> Tensor:
        return output


class OverlappedSharedExperts(SequentialSharedExperts):
    """The schedule of a shared expert on a stream of its own, next to the dispatch, the experts and the combine.

    It waits for the layer's input alone. In CPU time it comes after the dispatch, so that the all-to-all, which needs
    few multiprocessors, is queued before products that take all of them.
    """

    def fork(self, hidden: Tensor) -> Tensor:
        return streams.fork(hidden)

    def compute(self, shared_experts: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with streams.on_side():
            return shared_experts(hidden)

    def add(self, shared_experts: Callable[[Tensor], Tensor], output: Tensor, shared: Tensor) -> Tensor:
        return output + streams.join(shared)


def shared_schedule(options: MoEOptions) -> SequentialSharedExperts:
    """Return when the shared expert of a layer with these options computes; without CUDA there are no streams."""
    if not options.shared_ffn_hidden_size:
        return NoSharedExpert()
    return OverlappedSharedExperts() if options.shared_overlap and platform.has_streams() else SequentialSharedExperts()
