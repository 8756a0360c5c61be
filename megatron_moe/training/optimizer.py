"""The engine's optimizer and learning-rate schedule, made to fit a transactional step.

The engine builds one optimizer for the dense parameters and one for the experts and chains them. This file adds what
its `step` leaves open: whether gradients are usable is asked of all ranks before any weight changes, and both
optimizers share one fp16 loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import optimizer as engine_optimizer
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe import platform
from megatron_moe.checkpoint import sharded
from megatron_moe.checkpoint.state import metadata, unwrapped
from megatron_moe.config.schema import Run
from megatron_moe.model.engine_config import optimizer_config
from megatron_moe.model.fully_sharded import own_range, shard_of
from megatron_moe.platform.adam import Adam, AdamWithMomentsOnHost
from megatron_moe.precision.packed_state import Chances
from megatron_moe.training import param_groups
from megatron_moe.training.muon import MatrixWeight, Muon, Orthogonalizer, mark_matrices
from megatron_moe.training.packed_muon import PackedMuon
from megatron_moe.training.param_groups import Schedule
from megatron_moe.training.precision_aware_adam import PrecisionAwareAdam
from megatron_moe.training.qk_clip import QKClip, clipped_weights


def build_optimizer(
    run: Run, model: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> MegatronOptimizer:
    """Return the optimizer of the wrapped model chunks, its moments allocated as zeros (fp32).

    Moments exist from the start, so a checkpoint can be written before the first step was committed.
    """
    fully_sharded = run.derived.zero_stage >= 2
    chunks: Any = [_Shards(chunk) for chunk in model] if fully_sharded else list(model)
    with _adam_of(run):
        optimizer = get_megatron_optimizer(
            optimizer_config(run),
            chunks,
            config_overrides=param_groups.overrides(run, model),
            use_gloo_process_groups=False,
            pg_collection=pg_collection,
        )
    if run.optimizer.optimizer == "muon":
        optimizer.orthogonalizer = _orthogonalizer(run, model, optimizer, pg_collection)
    if run.optimizer.qk_clip:
        optimizer.qk_clip = _qk_clip(run, model, optimizer, pg_collection)
    scale = None
    for part in parts(optimizer):
        if fully_sharded:
            # Where the norm is summed: each element of a weight is on one data-parallel rank.
            part.grad_stats_parallel_group = torch.distributed.group.WORLD
            # In fp16 the engine would copy main weights to the model's by a kernel of Transformer Engine or apex. There
            # are no such copies here, and those kernels refuse empty lists; without this buffer torch copies nothing.
            part._dummy_overflow_buf = None
        if part.is_stub_optimizer:
            continue
        _settle_positions(part)
        if isinstance(part.optimizer, (AdamWithMomentsOnHost, Muon, PrecisionAwareAdam)):
            part.optimizer.allocate()  # the engine would allocate them next to the weights, in fp32
        part.init_state_fn(part.optimizer, part.config)
        if run.optimizer.use_precision_aware_optimizer:
            _pack(part)
        # An fp32 optimizer has no loss scale at all, a bf16 one has None.
        if getattr(part, "grad_scaler", None) is not None:
            scale = SharedLossScale(part.grad_scaler) if scale is None else scale
            part.grad_scaler = scale
    _place(model, optimizer, pg_collection)
    return optimizer


@contextmanager
def _adam_of(run: Run) -> Iterator[None]:
    """Let the engine build our Adam in the block where those of Transformer Engine and apex do not do what is asked.

    They update memory of a GPU alone. Of offloaded state, shards of a fully sharded model are in host memory as a
    whole; below that, the moments are.
    """
    options, fully_sharded = run.optimizer, run.derived.zero_stage >= 2
    packed, on_host = options.use_precision_aware_optimizer, options.optimizer_cpu_offload and not fully_sharded
    kind: Any = None
    if options.optimizer == "muon":
        kind = PackedMuon if packed or on_host else Muon
    elif packed:
        kind = PrecisionAwareAdam
    elif options.optimizer_cpu_offload:
        kind = Adam if fully_sharded else AdamWithMomentsOnHost
    if kind in (PackedMuon, PrecisionAwareAdam):
        moment_dtypes = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
        kind = partial(kind, moment_dtypes=moment_dtypes, seed=run.training.seed, on_host=on_host)
    with mock.patch.object(engine_optimizer, "Adam", kind) if kind is not None else nullcontext():
        yield


def _orthogonalizer(
    run: Run, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, pg: ProcessGroupCollection
) -> Orthogonalizer:
    """Take the weights that are made of matrices from AdamW, before its state is allocated. Collective."""
    adams = _adams(optimizer)
    mains = {id(weight): main for weight, main in mains_of(model, optimizer)}
    weights = []
    for weight, layout in mark_matrices(run, [unwrapped(chunk) for chunk in model]):
        main = mains.get(id(weight))
        adam = None if main is None else adams[id(main)]
        if adam is not None:
            adam.leave_to_muon(main)
        weights.append(MatrixWeight(weight, layout, main, adam, owned_part(optimizer, weight)))
    return Orthogonalizer(run.optimizer, weights, pg)


def _qk_clip(
    run: Run, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, pg: ProcessGroupCollection
) -> QKClip:
    """Have each update of a weight of queries or keys followed by its scaling."""
    clip, adams = QKClip(run, pg), _adams(optimizer)
    mains = {id(weight): main for weight, main in mains_of(model, optimizer)}
    for chunk in map(unwrapped, model):
        for clipped in clipped_weights(run, chunk):
            main = mains.get(id(clipped.weight))
            if main is not None:
                own = owned_part(optimizer, clipped.weight)
                adams[id(main)].after_update[main] = partial(clip.scale, clipped, own)
    return clip


def _adams(optimizer: MegatronOptimizer) -> dict[int, Any]:
    """Return the id of each main weight of this rank -> the optimizer that updates it."""
    every = (part for part in parts(optimizer) if not part.is_stub_optimizer)
    return {id(main): part.optimizer for part in every for main in part.get_parameters()}


def _pack(part: Any) -> None:
    """Store each main weight of a bf16 weight, or its shard, with the weight, from now on."""
    adam = part.optimizer
    pairs = zip(getattr(part, "shard_float16_groups", ()), getattr(part, "shard_fp32_from_float16_groups", ()))
    if not hasattr(part, "shard_float16_groups"):
        pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()))
    packed = False
    for weights, mains in pairs:
        for weight, main in zip(weights, mains):
            if weight.dtype == torch.bfloat16:
                adam.pack_main_weight(main, weight)
                packed = True
    if packed:
        # The update writes the weights itself; and what is loaded into them alone leaves no rests.
        part._copy_main_params_to_model_params = lambda: None
        part._copy_model_params_to_main_params = adam.drop_rests


def _place(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, pg: ProcessGroupCollection) -> None:
    """Give each element that is rounded at random its place in the whole model, which is the same on every layout."""
    adams = [part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, PrecisionAwareAdam)]
    if not any(adam.draws for adam in adams):
        return
    places = {
        id(parameter): (rows, column)
        for chunk in model
        for parameter, rows, column in sharded.places(unwrapped(chunk), metadata(pg))
    }
    for parameter, main in mains_of(model, optimizer):
        (rows, column), width = places[id(parameter)], parameter.shape[-1]
        axis, begin, _ = owned_part(optimizer, parameter)
        start = 0
        if axis is None:
            start = begin
        elif axis == parameter.dim() - 1:
            column, width = column + begin, main.shape[-1]
        else:
            rows = rows.narrow(axis, begin, main.shape[axis])
        for adam in adams:
            if main in adam.state:
                adam.place(main, Chances(rows.flatten().to(main.device), width, start, (0, 0), column))


class _Shards:
    """The shards of a fully sharded chunk for the engine's optimizers, which take them for fp32 weights.

    An optimizer of fp32 weights has no copies of them, and takes their gradients from `main_grad`. It is not given
    empty shards: apex's kernel for many tensors is launched at the last element of the last one.
    """

    def __init__(self, chunk: Any) -> None:
        self.ddp_config = chunk.ddp_config
        self._chunk = chunk

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield each weight's shard under the weight's name, where this rank has an element of it."""
        for name, parameter in self._chunk.named_parameters():
            shard: Any = shard_of(parameter)
            if not shard.numel():
                continue
            if shard.device.type != platform.device().type:
                # The engine's half-precision optimizer asks for a GPU's type, which an offloaded shard does not have.
                shard.type = lambda: "torch.cuda.FloatTensor"
            yield name, shard


def _settle_positions(part: Any) -> None:
    """Correct the positions that a distributed optimizer has recorded for its parameters.

    It puts the fp32 parameters of a group before those with an fp32 copy, and looks them up in the order of its
    buffers. In a model of two dtypes these differ, and a checkpoint would get one weight's state under another's name.
    """
    for index, groups in enumerate(
        zip(getattr(part, "model_fp32_groups", ()), getattr(part, "model_float16_groups", ()))
    ):
        for order, param in enumerate(param for group in groups for param in group):
            part.model_param_group_index_map[param] = (index, order)


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the engine's optimizers in a chain, or the one optimizer there is."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


class OwnedPart(NamedTuple):
    """A range of a weight along an axis, or of all its elements in their order where the axis is None."""

    axis: int | None
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a contiguous tensor of the weight's shape, in the same memory."""
        along = tensor.view(-1) if self.axis is None else tensor
        return along.narrow(self.axis or 0, self.begin, self.end - self.begin)


def owned_part(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> OwnedPart:
    """Return the part of a parameter whose reduced gradient this rank has, and which it updates.

    It is the whole parameter; with a distributed optimizer or in a fully sharded model it is the rank's shard, which
    may be empty.
    """
    if isinstance(parameter, DTensor):
        return OwnedPart(*own_range(parameter))
    sharded = [part for part in parts(optimizer) if hasattr(part, "model_param_gbuf_map")]
    for part in sharded:
        if parameter in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            return OwnedPart(None, owned.start, owned.end)
    return OwnedPart(None, 0, 0 if sharded else parameter.numel())


class SharedLossScale:
    """One fp16 loss scale for all chained optimizers, updated once a step by what all ranks agreed on.

    The engine gives each chained optimizer a scale of its own and updates it by that optimizer's gradients alone, while
    the loss is multiplied by the first one's. An overflow in the dense parameters only would leave the experts' scale
    behind, and from then on their gradients would be unscaled by the wrong number. Here `update`, which the engine
    calls within `prepare_grads`, does nothing; the step calls `commit`.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._floor = float(getattr(scaler, "min_scale", math.inf))

    @property
    def scale(self) -> torch.Tensor:
        """The current loss scale, fp32 [1]."""
        return self._scaler.scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """Its reciprocal, fp32 [1]."""
        return self._scaler.inv_scale

    def can_fall(self, scale: float) -> bool:
        """Return whether overflows make this scale smaller: not a constant one, and not below its floor."""
        return scale > self._floor

    def update(self, found_inf: bool) -> None:
        """Ignore the call: each engine optimizer makes it before all ranks have agreed on the step."""

    def commit(self, found_inf: bool) -> None:
        """Count the step: halve the scale after overflows, double it after a window without."""
        self._scaler.update(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state of the scale."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the engine's state of the scale."""
        self._scaler.load_state_dict(state_dict)


def shared_loss_scale(optimizer: MegatronOptimizer) -> SharedLossScale | None:
    """Return the fp16 loss scale, or None where there is none."""
    scales = (getattr(part, "grad_scaler", None) for part in parts(optimizer))
    return next((scale for scale in scales if isinstance(scale, SharedLossScale)), None)


def moments_and_masters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the weights that this rank updates, and their moments, as they are stored, in floating dtypes.

    Of moments in codes, which are finite themselves, it is NaN for each group that is not.
    """
    for part in parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part.optimizer, PrecisionAwareAdam):
            yield from part.optimizer.evidence()
            continue
        for master in part.get_parameters():
            yield master
            state = part.optimizer.state[master].values()
            yield from (value for value in state if isinstance(value, Tensor) and value.dim() > 0)


def main_weight(master: Tensor) -> Tensor:
    """Return the fp32 values of a main weight, which may be packed with the model's weight."""
    adam = getattr(master, "packed_by", None)
    return master if adam is None else adam.main_weight(master)


def mains_of(
    model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield each main weight that this rank updates with its model parameter; see `main_weight` for its values."""
    owners: dict[int, torch.nn.Parameter] = {}
    for chunk in model:
        for parameter in chunk.parameters():
            # An fp32 parameter is its own master; under the distributed optimizer a rank has masters of its shard only.
            master = getattr(parameter, "main_param", None)
            owners[id(parameter if master is None else master)] = parameter
    for part in parts(optimizer):
        if part.is_stub_optimizer:
            continue
        # Shards of fp32 parameters do not know whose they are.
        for whole, shards in zip(getattr(part, "model_fp32_groups", ()), getattr(part, "shard_fp32_groups", ())):
            owners.update({id(shard): parameter for parameter, shard in zip(whole, shards)})
        yield from ((owners[id(master)], master) for master in part.get_parameters())


def named_moments_and_masters(
    model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[torch.nn.Parameter, str, Tensor]]:
    """Yield what is stored, each with its model parameter and what it is: master weight, exp_avg, ...

    A packed master weight has no values of its own: its `rest` and `ties` are yielded in its place.
    """
    state: dict[Tensor, Any] = {}
    for part in parts(optimizer):
        if not part.is_stub_optimizer:
            state.update(part.optimizer.state)
    for parameter, master in mains_of(model, optimizer):
        if not hasattr(master, "packed_by"):
            yield parameter, "master weight", master
        for name, value in state[master].items():
            if isinstance(value, Tensor):
                yield parameter, name, value


def build_scheduler(run: Run, optimizer: MegatronOptimizer) -> Schedule:
    """Return the learning-rate schedule, counted in committed iterations or in their sequences.

    The flags of the present run decide; a checkpoint gives the position only, so a run can be prolonged or its rate
    changed by flags. The first step of a warm-up uses `--lr-warmup-init`.
    """
    options = run.optimizer
    decay = max(run.derived.lr_decay_length or 0, 1)
    return Schedule(
        optimizer,
        in_samples=run.derived.schedule_unit == "sequences",
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=min(run.derived.lr_warmup_length, decay - 1),  # the engine wants warm-up < decay
        lr_decay_steps=decay,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        # A tenth of the run is the share that WSD was proposed with (MiniCPM, arXiv 2404.06395).
        wsd_decay_steps=run.derived.lr_wsd_decay_length or max(decay // 10, 1),
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )
