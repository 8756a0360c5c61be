"""The MoE layer, which routes tokens, dispatches them to their experts and combines the results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.registry import DISPATCHERS, EXPERT_BACKENDS
from megatron_moe.moe.all_to_all import AllToAllDispatcher
from megatron_moe.moe.capacity import build_layer_dispatcher
from megatron_moe.moe.dispatch import ExpertInput
from megatron_moe.moe.experts import GroupedExperts, LocalExperts
from megatron_moe.moe.flex import flex_dispatcher
from megatron_moe.moe.grouped_gemm import DelayedWgrad, TransformerEngineProduct, grouped_linear_loop
from megatron_moe.moe.grouped_gemm_fp8 import TransformerEngineFp8, fp8_products
from megatron_moe.moe.groups import MoEGroups, moe_groups
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.shared_experts import SharedExperts, shared_schedule
from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.platform.isolation import is_autocast_on, without_autocast
from megatron_moe.precision.gates import require_dtype


def _grouped_experts(config: Any, options: MoEOptions, groups: MoEGroups) -> LocalExperts:
    if options.fp8_format is None:
        return GroupedExperts(config, options, groups)
    gate_up, down = fp8_products(options.fp8_format)
    return GroupedExperts(config, options, groups, down, down.form == "scaled", gate_up)


def _te_experts(config: Any, options: MoEOptions, groups: MoEGroups) -> LocalExperts:
    platform.require_transformer_engine("--moe-expert-backend te", "--moe-expert-backend grouped_mm")
    product = TransformerEngineProduct() if options.fp8_format is None else TransformerEngineFp8(options.fp8_format)
    return GroupedExperts(config, options, groups, product, offsets_on_host=True)


EXPERT_BACKENDS.register("grouped_mm", _grouped_experts)
EXPERT_BACKENDS.register("loop", partial(GroupedExperts, kernel=grouped_linear_loop, offsets_on_host=True))
EXPERT_BACKENDS.register("te", _te_experts)
DISPATCHERS.register("alltoall", AllToAllDispatcher)
DISPATCHERS.register("flex", flex_dispatcher)


@dataclass(frozen=True)
class MoESubmodules:
    """The classes of the shared expert's two linear layers: the engine's own, or Transformer Engine's."""

    linear_fc1: type = ColumnParallelLinear
    linear_fc2: type = RowParallelLinear


class MoELayer(CopiesShareGroups, MegatronModule):
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
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        options: MoEOptions | None = None,
    ) -> None:
        super().__init__(config)
        options = options or MoEOptions.from_engine_config(config)
        groups = moe_groups(pg_collection)
        self.router = TopKRouter(config, pg_collection, is_mtp_layer, options)
        self.dispatcher = build_layer_dispatcher(options, groups)
        self.experts: LocalExperts = EXPERT_BACKENDS[options.backend](config, options, groups)
        self.shared_experts: SharedExperts | None = None
        if options.shared_ffn_hidden_size:
            linears = submodules or MoESubmodules()
            products = MLPSubmodules(linear_fc1=linears.linear_fc1, linear_fc2=linears.linear_fc2)
            self.shared_experts = SharedExperts(config, options, products, groups.tp)
        self.schedule = shared_schedule(options)
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
            padding_mask: [B, S] bool, True for padding (the engine's name and layout); None if no token is padding.
        """
        is_padding = None if padding_mask is None else padding_mask.transpose(0, 1).reshape(-1).bool()
        if self.recompute and self.training:
            return tensor_parallel.checkpoint(self.mixture, False, hidden, is_padding), None
        return self.mixture(hidden, is_padding), None

    def mixture(self, hidden: Tensor, is_padding: Tensor | None) -> Tensor:
        """Compute the layer for hidden [S, B, H] and is_padding [S x B]; recomputation calls it again in backward."""
        if not is_autocast_on(hidden.device.type):
            return self._mixture(hidden, is_padding)
        with without_autocast(hidden.device.type):
            weight = next(self.experts.parameters())
            # A fully sharded weight is an fp32 shard until the experts compute: it says what it is gathered in.
            dtype = getattr(weight, "gathered_dtype", weight.dtype)
            return self._mixture(hidden.to(dtype), is_padding).to(hidden.dtype)

    def _mixture(self, hidden: Tensor, is_padding: Tensor | None) -> Tensor:
        """Route, dispatch, compute the experts, and combine; the shared expert computes when its schedule says."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        decision = self.router.route(tokens, is_padding, num_sequences=hidden.shape[1])
        for_shared = self.schedule.fork(hidden)
        expert_input, plan = self.dispatcher.dispatch(tokens, decision)
        shared = self.schedule.compute(self.compute_shared, for_shared)
        output = self.dispatcher.combine(self.compute_experts(expert_input), plan).view(hidden.shape)
        return self.schedule.add(self.compute_shared, output, shared)

    def compute_experts(self, expert_input: ExpertInput, later: DelayedWgrad | None = None) -> Tensor:
        """Return the routed experts' output [R, H]; see `LocalExperts.forward`.

        Raises:
            PrecisionError: a backend returns another dtype than its rows have.
        """
        # An own backend need not know of `later`.
        output = self.experts(expert_input) if later is None else self.experts(expert_input, later)
        require_dtype(
            output,
            expert_input.rows.dtype,
            what=f"layer {self.layer_number}: the experts' output",
            producer=type(self.experts).__name__,
            remedy="an expert backend returns the dtype of its rows; cast before it returns",
        )
        return output

    def compute_shared(self, hidden: Tensor) -> Tensor:
        """Return the shared expert's output [S, B, H]."""
        assert self.shared_experts is not None
        if self.recompute_shared_experts and self.training:
            return tensor_parallel.checkpoint(self.shared_experts, False, hidden)
        return self.shared_experts(hidden)
