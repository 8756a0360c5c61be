"""Two micro-batches at a time: the engine's schedule that hides the exchanges of one behind the work of the other.

With `--overlap-moe-expert-parallel-comm` the engine's 1F1B schedule runs the forward pass of a micro-batch next to the
backward pass of the one before, layer by layer (`megatron/core/pipeline_parallel/combined_1f1b.py`). It asks the model
for a plan of a chunk's layers, in which each layer is a row of nodes: what comes before the dispatch, the dispatch, the
experts, the combine. Dispatch and combine run on a stream of their own. A node's inputs are cut off from the graph and
its backward pass is run by itself; gradients are passed on from node to node.

The engine's own nodes take its own MoE layer apart. `ChunkPlan` has nodes for ours, and leaves the order of nodes, the
streams and their waiting, and which inputs are freed, to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.pipeline_parallel.utils import NoopScheduleNode
from torch import Tensor
from torch.nn import Module

from megatron_moe.engine.layers import CheckpointWithoutOutput, TransformerLayer, get_cuda_rng_tracker
from megatron_moe.moe.dispatch import PhasedDispatcher
from megatron_moe.moe.dispatch_by_node import ByNodeDispatcher
from megatron_moe.moe.grouped_gemm import DelayedWgrad
from megatron_moe.moe.layer import MoELayer
from megatron_moe.platform import hardware

try:
    from megatron.core.models.common.utils import TransformerLayerNode  # 0.19.2
except ImportError:
    from megatron.core.models.gpt.fine_grained_callables import TransformerLayerNode  # 0.16.1

# The engine's name of a layer's first node, which holds attention and routing.
_FIRST = "attn" if hasattr(TransformerLayerSchedulePlan, "attn") else "pre_dispatch_computation"


class ChunkPlan(TransformerModelChunkSchedulePlan):
    """The engine's plan of one micro-batch through a model chunk, with nodes for this project's layers.

    Layers of multi-token prediction are in the last node, with the output layer and the loss: our model computes them
    there. Their exchanges are not hidden.
    """

    def _build_layer_schedule_plan(self, module: Module, comp_stream: object, comm_stream: object) -> None:
        if module is not self.state.model.decoder:
            return
        last = len(module.layers) - 1
        for index, layer in enumerate(module.layers):
            where = {"is_first_layer": index == 0, "is_last_layer": index == last}
            plan = LayerPlan(layer, self.event, self.state, comp_stream, comm_stream, where)
            self._transformer_layers.append(plan)


class LayerPlan(TransformerLayerSchedulePlan):
    """The nodes of one layer for one micro-batch."""

    def _build_callable_nodes(
        self, event: object, comp_stream: object, comm_stream: object, extra_args: dict[str, Any]
    ) -> None:
        layer = self.layer
        settings = {**extra_args, "config": layer.config, "is_mtp": False, "is_moe": isinstance(layer.mlp, MoELayer)}
        if settings["is_moe"]:
            settings["num_local_experts"] = layer.mlp.experts.num_local_experts

        def node(
            stream: object, step: Callable[..., Any], name: str, later: _Later | None = None
        ) -> TransformerLayerNode:
            own = {**settings, "delay_wgrad_compute": later is not None}
            parts = (event, self.layer_state, self.chunk_state, step)
            return TransformerLayerNode(stream, *parts, name=name, bwd_dw_callables=later, extra_args=own)

        self.moe_dispatch = self.moe_combine = self.mtp_post_process = NoopScheduleNode()
        if settings["is_moe"]:
            options = layer.mlp.experts.options
            later = _Later(options.fuse_weight_gradients) if options.delay_wgrad else None
            steps = MoESteps(layer, later)
            setattr(self, _FIRST, node(comp_stream, steps.before_dispatch, _FIRST))
            self.moe_dispatch = node(comm_stream, steps.dispatch, "moe_dispatch")
            self.mlp = node(comp_stream, steps.experts, "mlp", later)
            self.moe_combine = node(comm_stream, steps.combine, "moe_combine")
        else:
            dense = DenseSteps(layer)
            setattr(self, _FIRST, node(comp_stream, dense.attention, _FIRST))
            self.mlp = node(comp_stream, dense.mlp, "mlp")


class _Later(DelayedWgrad):
    """Gradients that are left out in a node's backward pass, with the methods that the engine calls."""

    def backward_dw(self) -> None:
        """Compute the gradients; called when the node's backward pass is done and exchanges are on their way."""
        self.compute()

    def parameters(self) -> Iterator[Any]:
        """Return nothing: hooks of the parameters have run in `backward_dw`."""
        return iter(())


class DenseSteps:
    """The steps of a layer without experts, each a function of (node, tensors) -> tensors."""

    def __init__(self, layer: TransformerLayer) -> None:
        self.layer = layer

    def random_streams(self) -> AbstractContextManager[Any]:
        """Return the context in which dropout draws, under sequence parallelism other numbers on each rank."""
        return get_cuda_rng_tracker().fork() if self.layer.config.sequence_parallel else nullcontext()

    def attention(self, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
        """Return the residual stream [S, B, H] after attention."""
        chunk = node.chunk_state
        with self.random_streams():
            hidden, _ = self.layer._forward_attention(
                hidden_states=hidden,
                attention_mask=chunk.attention_mask,
                rotary_pos_emb=chunk.rotary_pos_emb,
                rotary_pos_cos=chunk.rotary_pos_cos,
                rotary_pos_sin=chunk.rotary_pos_sin,
                packed_seq_params=chunk.packed_seq_params,
                sequence_len_offset=chunk.sequence_len_offset,
            )
        return hidden

    def mlp(self, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
        """Return the residual stream after the dense MLP."""
        with self.random_streams():
            return self.after_layer(node, self.layer._forward_mlp(hidden))

    def after_layer(self, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
        """Return the stream after the layer, normalised if it is the model's last one."""
        norm = node.chunk_state.model.decoder.final_layernorm
        return norm(hidden) if norm is not None and node.is_last_layer else hidden


class MoESteps(DenseSteps):
    """The steps of a layer with experts. What they have in common for a micro-batch is in the node's `layer_state`.

    Tensors that a step takes from `layer_state` are cut off by `node.detach`, which has their gradients passed on; the
    engine frees the memory of some inputs when a step is done, so that no step saves its inputs for backward.
    """

    def __init__(self, layer: TransformerLayer, later: DelayedWgrad | None) -> None:
        super().__init__(layer)
        self.moe: MoELayer = layer.mlp
        assert isinstance(self.moe.dispatcher, PhasedDispatcher), "rules.moe.expert_overlap_can_work"
        self.dispatcher = self.moe.dispatcher
        self.later = later

    def before_dispatch(self, node: TransformerLayerNode, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return what the dispatch sends, after attention, norm, routing and the shared expert."""
        state = node.layer_state
        hidden = self.attention(node, hidden)
        with self.random_streams():
            norm, state.norm_checkpoint = self.layer.pre_mlp_layernorm, None
            if self.layer.recompute_pre_mlp_layernorm:
                state.norm_checkpoint = CheckpointWithoutOutput(fp8=None)
                normed = state.norm_checkpoint.checkpoint(norm, hidden)
            else:
                normed = norm(hidden)
            tokens = normed.reshape(-1, normed.shape[-1])
            padding = node.chunk_state.padding_mask
            is_padding = None if padding is None else padding.transpose(0, 1).reshape(-1)
            decision = self.moe.router.route(tokens, is_padding, num_sequences=normed.shape[1])
            leaving, state.plan = self.dispatcher.prepare(tokens, decision)
            if isinstance(self.dispatcher, ByNodeDispatcher):
                # The engine frees what an all-to-all has sent, and here that is what other steps need too.
                leaving = tuple(one.clone() for one in leaving)
            # After the routing, as in the layer: gradients of `normed` are then added in the same order.
            shared = None if self.moe.shared_experts is None else self.moe.compute_shared(normed)
        state.residual = node.detach(hidden)
        state.shared = None if shared is None else node.detach(shared)
        return leaving

    def dispatch(self, node: TransformerLayerNode, *leaving: Tensor) -> tuple[Tensor, ...]:
        """Return what arrived for this rank's experts."""
        state = node.layer_state
        hardware.keep(state.plan)
        arrived, state.plan = self.dispatcher.send(leaving, state.plan)
        return arrived

    def experts(self, node: TransformerLayerNode, *arrived: Tensor) -> Tensor:
        """Return the experts' results, as the combine sends them."""
        state = node.layer_state
        hardware.keep(state.plan)
        with self.random_streams():
            expert_input, state.plan = self.dispatcher.arrange(arrived, state.plan)
            results = self.moe.compute_experts(expert_input, self.later)
            leaving = self.dispatcher.collect(results, state.plan)
        if state.norm_checkpoint is not None:
            state.norm_checkpoint.discard_output_and_register_recompute(leaving)
        return leaving

    def combine(self, node: TransformerLayerNode, results: Tensor) -> Tensor:
        """Return the residual stream after the layer."""
        state, layer = node.layer_state, self.layer
        hardware.keep((state.plan, state.residual, state.shared))
        returned_rows = self.dispatcher.send_back(results, state.plan)
        output = self.dispatcher.add_up(returned_rows, state.plan).view(state.residual.shape)
        if state.shared is not None:
            output = output + state.shared
        with self.random_streams(), layer.bias_dropout_add_exec_handler():
            add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
            hidden = add((output, None), state.residual, layer.hidden_dropout)
        vars(state).clear()
        return self.after_layer(node, hidden)
