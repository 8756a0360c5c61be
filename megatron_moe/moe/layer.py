"""The MoE layer, which routes tokens, dispatches them to their experts and combines the results."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.config.setting import DISPATCHERS, EXPERT_BACKENDS
from megatron_moe.engine.dist_checkpointing import make_sharded_tensors_for_checkpoint
from megatron_moe.engine.fully_shard import gathered_dtype
from megatron_moe.engine.layers import (
    MLP,
    ColumnParallelLinear,
    MegatronModule,
    MLPSubmodules,
    RowParallelLinear,
    checkpoint,
)
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.moe.dispatch import ExpertInput, build_layer_dispatcher
from megatron_moe.moe.dispatch_by_node import alltoall_dispatcher
from megatron_moe.moe.experts import GroupedExperts, GroupedExpertsFp8, LocalExperts
from megatron_moe.moe.flex import flex_dispatcher
from megatron_moe.moe.grouped_gemm import DelayedWgrad, TransformerEngineProduct, gate_product, grouped_linear_loop
from megatron_moe.moe.grouped_gemm_fp8 import TransformerEngineFp8, fp8_products
from megatron_moe.moe.options import MoEGroups, MoEOptions, moe_groups
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe.platform import hardware
from megatron_moe.platform.numerics import is_autocast_on, without_autocast
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups
from megatron_moe.precision.contract import PrecisionError, mixes_dtypes


def _grouped_experts(config: EngineConfig, options: MoEOptions, groups: MoEGroups) -> LocalExperts:
    if options.fp8_format is None:
        return GroupedExperts(config, options, groups)
    products = gate_up, down = fp8_products(options.fp8_format, fused=bool(options.fuse_weight_gradients))
    if down.form == "triton":
        return GroupedExpertsFp8(config, options, groups, products)
    return GroupedExperts(config, options, groups, down, down.form == "scaled", gate_up)


def _te_experts(config: EngineConfig, options: MoEOptions, groups: MoEGroups) -> LocalExperts:
    hardware.require_transformer_engine("--moe-expert-backend te", "--moe-expert-backend grouped_mm")
    product = TransformerEngineProduct() if options.fp8_format is None else TransformerEngineFp8(options.fp8_format)
    return GroupedExperts(config, options, groups, product, offsets_on_host=True)


EXPERT_BACKENDS.register("grouped_mm", _grouped_experts)
EXPERT_BACKENDS.register("loop", partial(GroupedExperts, kernel=grouped_linear_loop, offsets_on_host=True))
EXPERT_BACKENDS.register("te", _te_experts)
DISPATCHERS.register("alltoall", alltoall_dispatcher)
DISPATCHERS.register("flex", flex_dispatcher)


@mixes_dtypes("rows in the model's dtype are weighed in fp32 without a copy of them in fp32")
def _weighed(output: Tensor, gate: Tensor) -> Tensor:
    """Return `output` [S, B, H], in the model's dtype, times `gate` [S, B, 1], fp32 or fp64, in the gate's dtype."""
    return output * gate


class SharedExperts(DeepcopyKeepsGroups, MLP):
    """The engine's tensor-parallel MLP at the shared width, optionally gated (Qwen2-MoE).

    Args:
        config: the engine's TransformerConfig.
        options: the layer's; width and gate are read from them.
        submodules: the engine's MLPSubmodules (column- and row-parallel linear layers).
        tp_group: the tensor-parallel group.
    """

    def __init__(
        self, config: EngineConfig, options: MoEOptions, submodules: MLPSubmodules, tp_group: ProcessGroup
    ) -> None:
        # The engine's MLP takes one of its two widths from the configuration, whatever width it is given.
        own_config, width = copy.copy(config), options.shared_ffn_hidden_size
        assert width is not None
        own_config.ffn_hidden_size = width
        super().__init__(own_config, submodules, ffn_hidden_size=width, tp_group=tp_group)
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


@dataclass(frozen=True)
class MoESubmodules:
    """The classes of the shared expert's two linear layers: the engine's own, or Transformer Engine's."""

    linear_fc1: type = ColumnParallelLinear
    linear_fc2: type = RowParallelLinear


class MoELayer(DeepcopyKeepsGroups, MegatronModule):
    """A mixture of experts that takes the place of the MLP in megatron-core's TransformerLayer.

    The output has the dtype of the input. A surrounding torch.autocast does not change the result: the layer computes
    in the dtype of its weights, to which under autocast an input of another dtype is cast.

    Args:
        config: the engine's TransformerConfig; dtype, sequence parallelism and initialisation are read from it.
        submodules: linear classes of the shared expert.
        layer_number: global, one-based number of the layer; the engine sets it.
        pg_collection: the engine's process groups; its default ones if None.
        is_mtp_layer, name: accepted for the engine's protocol.
        options: what the layer does; None in a megatron-core program, where they are read from `config`.
    """

    def __init__(
        self,
        config: EngineConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroups | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        options: MoEOptions | None = None,
    ) -> None:
        super().__init__(config)
        options = options or MoEOptions.from_engine_config(config)
        groups = moe_groups(pg_collection)
        self.router = TopKRouter(config, pg_collection, is_mtp_layer, options)
        self.experts: LocalExperts = EXPERT_BACKENDS[options.backend](config, options, groups)
        self.dispatcher = build_layer_dispatcher(options, groups, self.experts.copies_rows)
        self.shared_experts: SharedExperts | None = None
        if options.shared_ffn_hidden_size:
            linears = submodules or MoESubmodules()
            products = MLPSubmodules(linear_fc1=linears.linear_fc1, linear_fc2=linears.linear_fc2)
            self.shared_experts = SharedExperts(config, options, products, groups.tp)
        # The shared expert computes on a stream of its own, next to the dispatch, the experts and the combine, or, also
        # without CUDA, which has no streams, when the routed experts are done.
        self.shared_overlaps = self.shared_experts is not None and options.shared_overlap and hardware.has_streams()
        self.recompute = options.recompute
        self.recompute_shared_experts = options.recompute_shared_experts
        self.layer_number = layer_number
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the global, one-based number of this layer and of its router; called by the engine."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return the layer's output [S, B, H] for `hidden` [S, B, H], and None in place of a bias.

        Args:
            hidden: activations, this rank's part of the sequence under sequence parallelism.
            padding_mask: [B, S] bool, True for padding (the engine's name and layout); None if no token is padding. Or
                int64, the documents of the tokens, see `routing.MicroBatch`.
        """
        is_padding = None if padding_mask is None else padding_mask.transpose(0, 1).reshape(-1)
        if self.recompute and self.training:
            return checkpoint(self.mixture, False, hidden, is_padding), None
        return self.mixture(hidden, is_padding), None

    def mixture(self, hidden: Tensor, is_padding: Tensor | None) -> Tensor:
        """Compute the layer for hidden [S, B, H] and the router's is_padding [S x B]; called again by recomputation."""
        if not is_autocast_on(hidden.device.type):
            return self._mixture(hidden, is_padding)
        with without_autocast(hidden.device.type):
            weight = next(self.experts.parameters())
            # A fully sharded weight is an fp32 shard until the experts compute.
            dtype = gathered_dtype(weight)
            return self._mixture(hidden.to(dtype), is_padding).to(hidden.dtype)

    def _mixture(self, hidden: Tensor, is_padding: Tensor | None) -> Tensor:
        """Route, dispatch, compute the experts and the shared one, and combine."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        decision = self.route(tokens, is_padding, hidden.shape[1])
        for_shared = hardware.fork(hidden) if self.shared_overlaps else hidden
        expert_input, plan = self.dispatcher.dispatch(tokens, decision)
        if self.shared_overlaps:
            # It waits for the layer's input alone. In CPU time it comes after the dispatch, so that the all-to-all,
            # which needs few multiprocessors, is queued before products that take all of them.
            with hardware.on_side():
                shared = self.compute_shared(for_shared)
        output = self.dispatcher.combine(self.compute_experts(expert_input), plan).view(hidden.shape)
        if self.shared_experts is None:
            return output
        return output + (hardware.join(shared) if self.shared_overlaps else self.compute_shared(hidden))

    def route(self, tokens: Tensor, is_padding: Tensor | None, num_sequences: int) -> RoutingDecision:
        """Return the router's decision on tokens [T, H], and what the dispatcher makes of it without other ranks."""
        return self.dispatcher.preprocess(self.router.route(tokens, is_padding, num_sequences=num_sequences))

    def compute_experts(self, expert_input: ExpertInput, later: DelayedWgrad | None = None) -> Tensor:
        """Return the routed experts' output [R, H]; see `LocalExperts.forward`.

        Raises:
            PrecisionError: a backend returns another dtype than its rows have.
        """
        # An own backend need not know of `later`.
        output = self.experts(expert_input) if later is None else self.experts(expert_input, later)
        wanted = expert_input.rows.dtype
        if output.dtype != wanted:
            raise PrecisionError(
                f"layer {self.layer_number}: the experts' output from {type(self.experts).__name__} is {output.dtype}, "
                f"must be {wanted}; an expert backend returns the dtype of its rows; cast before it returns"
            )
        return output

    def compute_shared(self, hidden: Tensor) -> Tensor:
        """Return the shared expert's output [S, B, H]."""
        assert self.shared_experts is not None
        if self.recompute_shared_experts and self.training:
            return checkpoint(self.shared_experts, False, hidden)
        return self.shared_experts(hidden)
