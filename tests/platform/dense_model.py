"""A small dense GPT of megatron-core's own parts, for tests of the platform and of the layouts: nothing of our model.

Its weights are a function of each tensor's global name and shape, and its data are one fixed batch, so that every
layout trains the same model on the same tokens.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_moe.config.schema import Run
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, GLOBAL_BATCH = 2, 32, 4, 64, 16, 4
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class LayerNorm(torch.nn.LayerNorm):
    """The engine's local norm refuses sequence parallelism; all that is missing is this mark on the weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def train_from_scratch(run: Run, steps: int, dropout: float = 0.0) -> list[tuple[float, float]]:
    """Build and train; returns (loss, gradient norm) per step, the same on every rank."""
    collection = groups.initialize(run)
    seed_everything(run)
    model, optimizer, config = build(run, collection, dropout)
    return [train_step(collection, model, optimizer, config) for _ in range(steps)]


def save_and_go_on(run: Run, folder: str) -> list[tuple[float, float]]:
    """Two steps, a checkpoint in the fully reshardable format, two more steps; returns the last two."""
    collection = groups.initialize(run)
    seed_everything(run)
    model, optimizer, config = build(run, collection)
    for _ in range(2):
        train_step(collection, model, optimizer, config)
    weights = model.module.sharded_state_dict()
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=SHARDING)}
    dist_checkpointing.save(state, folder)
    return [train_step(collection, model, optimizer, config) for _ in range(2)]


def load_and_go_on(run: Run, folder: str) -> tuple[list[tuple[float, float]], list[int]]:
    """A fresh model and optimizer, the checkpoint, two steps; returns them, and the step of each parameter group."""
    collection = groups.initialize(run)
    seed_everything(run)
    model, optimizer, config = build(run, collection)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    weights = model.module.sharded_state_dict()
    request = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=SHARDING)}
    state = dist_checkpointing.load(request, folder)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    going_on = [train_step(collection, model, optimizer, config) for _ in range(2)]
    return going_on, [group["step"] for group in optimizer.param_groups]


def build(
    run: Run, collection: ProcessGroupCollection, dropout: float = 0.0
) -> tuple[DistributedDataParallel, MegatronOptimizer, TransformerConfig]:
    layout = run.parallel
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=torch.float32,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        recompute_granularity=run.training.recompute_granularity,
        recompute_method=run.training.recompute_method,
        recompute_num_layers=run.training.recompute_num_layers,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = LayerNorm
    layer.submodules.pre_mlp_layernorm = LayerNorm
    block = TransformerBlockSubmodules([layer] * (LAYERS // collection.pp.size()), layer_norm=LayerNorm)
    model = GPTModel(
        config,
        block,
        VOCABULARY,
        SEQUENCE,
        pre_process=collection.pp.rank() == 0,
        post_process=collection.pp.rank() == collection.pp.size() - 1,
        position_embedding_type="rope",
        pg_collection=collection,
    )
    set_weights(model, collection)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=run.optimizer.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        grad_reduce_in_fp32=True,
    )
    wrapped = DistributedDataParallel(config, ddp, model, pg_collection=collection)
    settings = OptimizerConfig(
        lr=1e-2, clip_grad=1.0, use_distributed_optimizer=run.optimizer.use_distributed_optimizer
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer, config


def set_weights(model: GPTModel, collection: ProcessGroupCollection) -> None:
    """Fill every tensor from its global name; a tensor-parallel one with its slice of the whole."""
    first_layer = collection.pp.rank() * (LAYERS // collection.pp.size())
    for name, parameter in model.named_parameters():
        if "layernorm" in name or name.endswith("bias"):
            continue
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"{int(layer) + first_layer}.{rest}"
        sharded = getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if sharded:
            shape[parameter.partition_dim] *= collection.tp.size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.05
        if sharded:
            whole = whole.chunk(collection.tp.size(), parameter.partition_dim)[collection.tp.rank()]
        parameter.data.copy_(whole)


def train_step(
    collection: ProcessGroupCollection,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    config: TransformerConfig,
) -> tuple[float, float]:
    """One step on the one global batch; returns its mean loss per token and the gradient norm before clipping."""
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000))
    mine = iter(tokens.chunk(collection.dp.size())[collection.dp.rank()])
    positions = torch.arange(SEQUENCE)[None]
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = losses.float().sum()
        return total, torch.tensor(losses.numel(), dtype=torch.int), {"sum": total.detach().clone()}

    def forward_step(rows: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        row = next(rows)[None]
        return chunk(row[:, :-1], positions, future, labels=row[:, 1:]), loss_function

    model.zero_grad_buffer()
    optimizer.zero_grad()
    shown = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=mine,
        model=[model],
        num_microbatches=GLOBAL_BATCH // collection.dp.size(),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    updated, norm, _ = optimizer.step()
    assert updated
    # Only the last stage has losses, and every tensor-parallel rank has the same ones.
    total = torch.tensor(sum(one["sum"].item() for one in shown) / collection.tp.size(), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / (GLOBAL_BATCH * SEQUENCE), float(norm)
