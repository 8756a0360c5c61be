"""Which parts of a model replay CUDA graphs, by `--cuda-graph-impl local` and `--cuda-graph-modules`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_moe import platform
from megatron_moe.config.cuda_graphs import captured_modules
from megatron_moe.config.schema import Run
from megatron_moe.engine.cuda_graphs import CudaGraphs, GraphedCall, NewGraph, TorchGraphs, replace_method
from megatron_moe.engine.layers import TransformerLayer
from megatron_moe.model.attention import SDPACoreAttention
from megatron_moe.moe.layer import MoELayer


def replay_graphs(run: Run, model: Sequence[torch.nn.Module], new_graph: NewGraph | None = None) -> CudaGraphs | None:
    """Let the layers of a wrapped model replay graphs, from now on, in the steps that the result announces.

    Args:
        run: a run that has passed `config.rules.check`.
        model: this rank's chunks, in the engine's DistributedDataParallel.
        new_graph: what stands for torch's graphs; None: those, where there is CUDA.

    Returns:
        None where nothing is captured.
    """
    names = captured_modules(run)
    if not names or (new_graph is None and not platform.has_cuda()):
        return None
    new_graph = TorchGraphs() if new_graph is None else new_graph
    graphs = CudaGraphs(run.training.cuda_graph_warmup_steps, new_graph)
    for pool, chunk in enumerate(model):
        wrapper: Any = chunk
        # A replay runs no module's hooks, of which this one waits for weights.
        wait = wrapper._make_forward_pre_hook() if wrapper.ddp_config.overlap_param_gather else None
        layers: list[Any] = [layer for layer in chunk.modules() if isinstance(layer, TransformerLayer)]
        for layer in layers:
            # What the stage sends comes from its first or its last layer.
            sends = run.parallel.pipeline_model_parallel_size > 1 and layer in (layers[0], layers[-1])
            graphed = partial(GraphedCall, graphs, pool=pool, before_replay=wait, copies=sends)
            routing: dict[str, Any] = {}
            if isinstance(layer.mlp, MoELayer):
                router = layer.mlp.router
                routing = {"beside_replay": router.count_replay, "allowed": partial(operator.not_, router.observers)}
                if "moe_preprocess" in names:
                    replace_method(layer.mlp, "route", graphed, [router], **routing)
                elif "moe_router" in names:  # called as a module, whose hooks run
                    replace_method(router, "forward", partial(graphed, before_replay=None), [router], **routing)
                if "moe" in names:
                    dispatcher = layer.mlp.dispatcher
                    getattr(dispatcher, "inner", dispatcher).fixed_rows = True  # a padded one carries another
            for part in layer.self_attention.modules() if "attn" in names else ():
                if isinstance(part, SDPACoreAttention):
                    # A graph cannot switch to the random stream of a TP rank. Without TP the device's own will do.
                    part.own_stream = False
            has_attention, has_mlp = "attn" in names, ("moe" if routing else "mlp") in names
            if has_attention and has_mlp:
                replace_method(layer, "forward", graphed, [layer], **routing)
            elif has_attention:
                replace_method(layer, "_forward_attention", graphed, [layer.input_layernorm, layer.self_attention])
            elif has_mlp:
                replace_method(layer, "_forward_mlp", graphed, [layer.pre_mlp_layernorm, layer.mlp], **routing)
    return graphs
