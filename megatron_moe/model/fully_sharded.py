"""Sharded data parallelism (ZeRO stages 2 and 3): a model chunk's weights and gradients, spread over ranks.

Each rank keeps a shard of every weight in fp32: it is the master weight, and the optimizer updates it where it is.
torch's `fully_shard` gathers the weights of a layer in the model's dtype before the layer computes, and adds up and
spreads their gradients after its backward pass. At stage 3 the gathered weights are freed after the layer's forward
pass and gathered again for its backward pass; at stage 2 they stay until then.

Dense weights are spread over the DP x CP ranks, routed experts over the ranks that hold the same experts. Every layer
is a unit that is gathered as a whole; its experts are a unit of their own, and so is each module that `--keep-fp32`
names, whose dtype is another one. What belongs to no layer is the root's: it is gathered with the first layer and stays
until the end of the backward pass, as the output layer is the last to compute and the first to be differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.fully_shard import ShardedWeight, flat_shards, partition_mesh, register_sharded
from megatron_moe.moe.experts import LocalExperts
from megatron_moe.moe.router import TopKRouter
from megatron_moe.parallel.groups import neighbours, partition, ranks_of_machine
from megatron_moe.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, Segments
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups


@dataclass(frozen=True)
class Unit:
    """A module whose weights, without those of the units within, are gathered and freed together.

    group: the ranks that its weights are spread over. dtype: the one that they are gathered in. is_island: whether
    `--keep-fp32` names it. is_root: whether it is the whole model.
    """

    module: torch.nn.Module
    group: ProcessGroup
    dtype: torch.dtype
    is_island: bool = False
    is_root: bool = False


@dataclass(frozen=True)
class Sharding:
    """How weights and gradients are spread and sent.

    keep_gathered: whether gathered weights stay from a layer's forward to its backward pass (stage 2).
    quantized_weights: whether weights are gathered as int8 blocks. machine: ranks of the world, TP ranks included, that
    keep gathered weights among them after the forward pass; None: they are freed. gradient_bits: of the integers that
    gradients are sent as; None: fp32. offload: whether shards and their moments are in host memory.
    """

    keep_gathered: bool
    quantized_weights: bool = False
    machine: int | None = None
    gradient_bits: int | None = None
    offload: bool = False

    @classmethod
    def from_run(cls, run: Run) -> Sharding:
        """Return what a run's flags ask for."""
        layout = run.parallel
        machine = layout.zero_hpz_partition_size
        if machine is not None:
            machine *= layout.tensor_model_parallel_size
        bits = {None: None, "int8": 8, "int4": 4}[layout.zero_quantized_gradients]
        offload = run.optimizer.optimizer_cpu_offload
        return cls(run.derived.zero_stage == 2, layout.zero_quantized_weights, machine, bits, offload)


class FullyShardedDataParallel(torch.nn.Module):
    """A wrapper that spreads a chunk's weights, gradients and optimizer state over the data-parallel ranks.

    It has the methods of the engine's DistributedDataParallel that a training step calls. Weights are DTensors in fp32
    with the names and attributes that they had, see `engine.fully_shard.ShardedWeight`; each has what the engine reads:

        main_param: this rank's shard as a plain fp32 parameter in the same memory, which the optimizer updates,
        main_grad: the shard's reduced gradient, fp32, from `finish_grad_sync` to `zero_grad_buffer`; the shard has it
            too.

    Args:
        config: the engine's TransformerConfig.
        ddp_config: the engine's configuration of data parallelism.
        module: the chunk, in Float16Module where the run is bf16 or fp16, with its weights drawn.
        sharding: how weights and gradients are spread and sent.
        pg_collection: the engine's process groups.
    """

    def __init__(
        self,
        config: EngineConfig,
        ddp_config: object,
        module: torch.nn.Module,
        sharding: Sharding,
        pg_collection: ProcessGroups,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self._keeps_gathered = sharding.keep_gathered
        # Gradients are summed over the ranks. A loss per token is divided by the global batch's tokens at the end of
        # the step; any other is a mean over the ranks, for experts too, which get tokens of EP times as many ranks.
        self._scale = 1.0 if config.calculate_per_token_loss else 1.0 / pg_collection.dp_cp.size()
        model = module
        while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
            model = inner
        self._units: list[Any] = [_shard(unit, sharding) for unit in units(model, pg_collection)]
        self._weights: list[Any] = list(model.parameters())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the wrapped module returns."""
        output = self.module(*inputs, **named)
        if not torch.is_grad_enabled():
            self._free_gathered()  # no backward pass does: a save that follows would find weights in shards' places
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gathered weights from one micro-batch to the next in the block, at stage 2.

        The engine's schedules enter it for all micro-batches but the last. Gradients are reduced at each of them: they
        would not be spread over the ranks otherwise.
        """
        for unit in self._units:
            unit.set_reshard_after_backward(not self._keeps_gathered, recurse=False)
        try:
            yield
        finally:
            for unit in self._units:
                unit.set_reshard_after_backward(True, recurse=False)

    def _free_gathered(self) -> None:
        for unit in self._units:
            unit.reshard()

    def gathered(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield each weight as the model computes with it, under its name. Collective over the data-parallel ranks.

        One unit's weights are gathered at a time, and have no memory afterwards; the parameters stay the same ones.
        """
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for unit in self._units:
            places = {
                names[id(parameter)]: (part, key)
                for part in unit.modules()
                for key, parameter in part._parameters.items()
                if parameter is not None
            }
            unit.unshard()
            for name, (part, key) in places.items():
                parameter = part._parameters[key]
                if parameter is not None and not isinstance(parameter, DTensor):  # else another unit's
                    yield name, parameter
            unit.reshard()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self._free_gathered()  # where an error ended a pass before its end
        for parameter in self._weights:
            parameter.grad = None
            parameter.main_grad = parameter.main_param.main_grad = None

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: each unit's gradients are reduced as soon as they are there."""

    def finish_grad_sync(self, *unused: Any, **named: Any) -> None:
        """Put each shard's reduced gradient into `main_grad`; zeros where no backward pass reached it."""
        for parameter in self._weights:
            gradient = parameter.grad
            shard = torch.zeros_like(local(parameter)) if gradient is None else local(gradient)
            parameter.main_grad = parameter.main_param.main_grad = shard.mul_(self._scale)

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all reduced gradients by a factor, which is on the device also where they are offloaded."""
        if isinstance(scaling_factor, Tensor):
            scaling_factor = scaling_factor.to(self._weights[0].main_grad.device)
        for parameter in self._weights:
            parameter.main_grad.mul_(scaling_factor)

    def broadcast_params(self) -> None:
        """Do nothing: each element of a weight is on one data-parallel rank."""


def units(model: Any, pg_collection: ProcessGroups) -> Iterator[Unit]:
    """Yield the units of a language model, each after those within it; the last one is the model itself."""
    dtype = model.config.params_dtype
    for part in model.modules():
        weights = list(part.parameters(recurse=False))
        if isinstance(part, LocalExperts):
            yield Unit(part, pg_collection.expt_dp, weights[0].dtype, is_island=weights[0].dtype != dtype)
        elif any(weight.dtype != dtype for weight in weights):
            yield Unit(part, pg_collection.dp_cp, torch.float32, is_island=True)
    further = [] if getattr(model, "mtp", None) is None else [depth.transformer_layer for depth in model.mtp.layers]
    for layer in (*model.decoder.layers, *further):
        yield Unit(layer, pg_collection.dp_cp, dtype)
    yield Unit(model, pg_collection.dp_cp, dtype, is_root=True)


def _shard(unit: Unit, sharding: Sharding) -> FSDPModule:
    """Spread a unit's weights over its ranks, and give the shards the attributes of the weights."""
    own = [
        (part, name, parameter)
        for part in unit.module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    attributes = [(part, name, dict(vars(parameter))) for part, name, parameter in own]
    for _, _, weight in own:
        weight.data = weight.data.float()
    size = unit.group.size()
    with secondary_mesh(unit.group, sharding.machine) as reshard:
        sharded = fully_shard(
            unit.module,
            mesh=DeviceMesh.from_group(unit.group, platform.device().type),
            reshard_after_forward=False if sharding.keep_gathered or unit.is_root else reshard,
            shard_placement_fn=lambda parameter: Shard(shard_axis(tuple(parameter.shape), size)),
            mp_policy=MixedPrecisionPolicy(unit.dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=platform.has_cuda()) if sharding.offload else OffloadPolicy(),
        )
    # Sums in fp32: gloo has no mean, and NCCL's would divide before adding. All ranks reduce the same weights by
    # themselves (torch can be asked to from 2.13 on): those of experts without a token get zeros as gradient, not none.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    if size > 1 and not unit.is_island:
        # ZeRO++ (arXiv 2306.10209) sends integers.
        segments = cache(partial(_segments, sharded))
        if sharding.quantized_weights:
            sharded.set_custom_all_gather(QuantizedAllGather(segments, size))  # type: ignore[arg-type]
        if sharding.gradient_bits is not None:
            inside = neighbours(dist.get_process_group_ranks(unit.group), sharding.machine or ranks_of_machine())
            # With one rank a machine nothing is added up inside it.
            parts = partition(unit.group, inside) if 1 < inside < size else (None, None)
            reduce_scatter: Any = QuantizedReduceScatter(segments, sharding.gradient_bits, *parts)
            sharded.set_custom_reduce_scatter(reduce_scatter)
    for part, name, values in attributes:
        parameter: Any = part._parameters[name]
        vars(parameter).update(values)
        master: Any = torch.nn.Parameter(local(parameter).detach(), requires_grad=parameter.requires_grad)
        vars(master).update(values)
        parameter.main_param = master
        axis, rank = shard_axis(tuple(parameter.shape), size), unit.group.rank()
        length = parameter.shape[axis]
        share = -(-length // size)
        own_range = (axis, min(rank * share, length), min((rank + 1) * share, length))
        register_sharded(parameter, ShardedWeight(own_range, unit.dtype))
        parameter.main_grad = master.main_grad = None
    return sharded


def shard_axis(shape: tuple[int, ...], ranks: int) -> int:
    """Return the axis along which a weight is cut: the first one that divides among the ranks, else the first.

    Other axes than the first have to divide; along the first one the last ranks get less, or nothing.
    """
    return next((axis for axis, length in enumerate(shape) if length % ranks == 0), 0)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(parameter: Tensor) -> torch.nn.Parameter:
    """Return this rank's shard of a sharded weight, which the optimizer updates."""
    return parameter.main_param  # type: ignore[attr-defined]


@contextmanager
def secondary_mesh(group: ProcessGroup, machine: int | None) -> Iterator[bool | int]:
    """Yield what `fully_shard` takes as `reshard_after_forward` in the block: the size of ZeRO++'s secondary partition.

    It is the ranks of the group among `machine` neighbours of the world. Where that is one, as of experts that a
    machine has once, weights stay gathered: False.

    The partition's groups are made here, see `partition_mesh`.
    """
    ranks = dist.get_process_group_ranks(group)
    size = group.size() if machine is None else neighbours(ranks, machine)
    if size in (1, group.size()):
        yield size == group.size()
        return
    inside, across = partition(group, size)
    places = torch.tensor(ranks).view(-1, size)
    names = ("parts", "ranks of a part")
    mesh = DeviceMesh.from_group([across, inside], platform.device().type, mesh=places, mesh_dim_names=names)
    with partition_mesh(mesh):
        yield size


def _segments(module: FSDPModule) -> Segments:
    """Return the parts of a unit's flat shards in the order in which torch sends them."""
    shards = flat_shards(module)
    lengths = [shard.length for shard in shards]
    return Segments(tuple(lengths), tuple(is_quantized(shard.module, shard.shape) for shard in shards))


def is_quantized(module: torch.nn.Module, shape: torch.Size) -> bool:
    """Return whether a module's weight is: not vectors (norms, biases, gates of one row), nor router weights."""
    return shape[:-1].numel() > 1 and not isinstance(module, TopKRouter)
