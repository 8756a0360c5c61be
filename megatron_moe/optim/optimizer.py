"""The engine's optimizer and learning-rate schedule, made to fit a transactional step.

The engine builds one optimizer for the dense parameters and one for the experts and chains them. This file adds what
its `step` leaves open: whether gradients are usable is asked of all ranks before any weight changes, and both
optimizers share one fp16 loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint import sharded
from megatron_moe.checkpoint.state import metadata, unwrapped
from megatron_moe.config.schema import Run
from megatron_moe.engine import optimizer as engine
from megatron_moe.engine.adam import Adam
from megatron_moe.engine.optimizer import named_main_params, owned_part
from megatron_moe.model.engine_config import optimizer_config
from megatron_moe.model.fully_sharded import shard_of
from megatron_moe.model.matrices import mark_matrices
from megatron_moe.optim import param_groups
from megatron_moe.optim.adam import AdamWithMomentsOnHost, PrecisionAwareAdam
from megatron_moe.optim.muon import MatrixWeight, Muon, Orthogonalizer, PackedMuon
from megatron_moe.optim.param_groups import Schedule
from megatron_moe.optim.qk_clip import QKClip, clipped_weights
from megatron_moe.platform.protocols import EngineOptimizer, ProcessGroups
from megatron_moe.precision.packed_state import StochasticRounding

MAIN_PARAM = "main param"
"""What `named_optimizer_state` calls the fp32 weights that an optimizer updates."""


@dataclass(frozen=True)
class Additions:
    """What runs in a step beside the engine's optimizer: Muon's matrices, and QK-clip; None: not in this run."""

    orthogonalizer: Orthogonalizer | None = None
    qk_clip: QKClip | None = None


_ADDITIONS: WeakKeyDictionary[EngineOptimizer, Additions] = WeakKeyDictionary()


def additions(optimizer: EngineOptimizer) -> Additions:
    """Return what runs beside an optimizer that `build_optimizer` has returned."""
    return _ADDITIONS.get(optimizer, Additions())


def build_optimizer(
    run: Run,
    model: Sequence[torch.nn.Module],
    pg_collection: ProcessGroups,
    adam: type[Adam] | None = None,
) -> EngineOptimizer:
    """Return the optimizer of the wrapped model chunks, its moments allocated as zeros (fp32).

    Moments exist from the start, so a checkpoint can be written before the first step was committed.

    Args:
        adam: what updates the fp32 main params; default: what the run's flags say.
    """
    fully_sharded = run.derived.zero_stage >= 2
    chunks: Any = [_Shards(chunk) for chunk in model] if fully_sharded else list(model)
    offloaded: list[torch.nn.Parameter] = []
    for chunk in chunks if fully_sharded else ():
        for _, shard in chunk.named_parameters():
            if shard.device.type != platform.device().type:
                offloaded.append(shard)
    with engine.adam_class(adam or _adam_of(run)), engine.cpu_shards_accepted(offloaded):
        optimizer = engine.get_megatron_optimizer(
            optimizer_config(run),
            chunks,
            config_overrides=param_groups.overrides(run, model),
            use_gloo_process_groups=False,
            pg_collection=pg_collection,
        )
    if run.optimizer.optimizer == "muon" or run.optimizer.qk_clip:
        _ADDITIONS[optimizer] = _build_additions(run, model, optimizer, pg_collection)
    scale: SharedLossScale | None = None
    for part in engine.parts(optimizer):
        if fully_sharded:
            engine.adapt_to_fully_sharded(part)
        if part.is_stub_optimizer:
            continue
        engine.settle_positions(part)
        if isinstance(part.optimizer, (AdamWithMomentsOnHost, Muon, PrecisionAwareAdam)):
            part.optimizer.allocate()  # the engine would allocate them next to the weights, in fp32
        part.init_state_fn(part.optimizer, part.config)
        if run.optimizer.use_precision_aware_optimizer:
            # Each fp32 main param, or this rank's shard of it, becomes its bf16 weight plus 16 low bits.
            packed = [pair for pair in engine.half_precision_pairs(part) if pair[0].dtype == torch.bfloat16]
            for weight, main in packed:
                part.optimizer.pack_main_param(main, weight)
            if packed:
                # The update writes the weights itself; and what is loaded into them alone leaves no low bits.
                engine.leave_copies_to(part, part.optimizer.drop_low_bits)
        # An fp32 optimizer has no loss scale at all, a bf16 one has None.
        if getattr(part, "grad_scaler", None) is not None:
            scale = SharedLossScale(part.grad_scaler) if scale is None else scale
            engine.set_loss_scale(part, scale)
    _place(model, optimizer, pg_collection)
    return optimizer


def _adam_of(run: Run) -> Callable[..., Adam] | None:
    """Return our Adam where those of Transformer Engine and apex do not do what is asked; None: the engine's choice.

    They update memory of a GPU alone. Of offloaded state, shards of a fully sharded model are in host memory as a
    whole; below that, the moments are.
    """
    options, fully_sharded = run.optimizer, run.derived.zero_stage >= 2
    packed, on_host = options.use_precision_aware_optimizer, options.optimizer_cpu_offload and not fully_sharded
    stored: dict[str, Any] = {
        "moment_dtypes": (options.exp_avg_dtype, options.exp_avg_sq_dtype),
        "seed": run.training.seed,
        "on_host": on_host,
    }
    if options.optimizer == "muon":
        return partial(PackedMuon, **stored) if packed or on_host else Muon
    if packed:
        return partial(PrecisionAwareAdam, **stored)
    if options.optimizer_cpu_offload:
        return Adam if fully_sharded else AdamWithMomentsOnHost
    return None


def _build_additions(
    run: Run, model: Sequence[torch.nn.Module], optimizer: EngineOptimizer, pg: ProcessGroups
) -> Additions:
    """Take what is made of matrices from AdamW, before its state is allocated, and have queries and keys scaled.

    Collective.
    """
    adams: dict[int, Any] = {}  # by main param, what updates it
    for part in engine.parts(optimizer):
        if not part.is_stub_optimizer:
            adams.update(dict.fromkeys(map(id, part.get_parameters()), part.optimizer))
    mains = {id(weight): main for weight, main in named_main_params(model, optimizer)}
    orthogonalizer = clip = None
    if run.optimizer.optimizer == "muon":
        matrices = []
        for weight, layout in mark_matrices(run, [unwrapped(chunk) for chunk in model]):
            main = mains.get(id(weight))
            adam = None if main is None else adams[id(main)]
            if main is not None and adam is not None:
                adam.matrices.add(main)
            matrices.append(MatrixWeight(weight, layout, main, adam, owned_part(optimizer, weight)))
        orthogonalizer = Orthogonalizer(run.optimizer, matrices, pg)
    if run.optimizer.qk_clip:
        clip = QKClip(run, pg)
        for chunk in map(unwrapped, model):
            for clipped in clipped_weights(run, chunk):
                main = mains.get(id(clipped.weight))
                if main is not None:  # each update of it is followed by its scaling
                    own = owned_part(optimizer, clipped.weight)
                    adams[id(main)].after_update[main] = partial(clip.scale, clipped, own)
    return Additions(orthogonalizer, clip)


def _place(model: Sequence[torch.nn.Module], optimizer: EngineOptimizer, pg: ProcessGroups) -> None:
    """Give each element that is rounded at random its place in the whole model, which is the same on every layout."""
    adams = [part.optimizer for part in engine.parts(optimizer) if isinstance(part.optimizer, PrecisionAwareAdam)]
    if not any(adam.uses_stochastic_rounding for adam in adams):
        return
    places = {}
    for chunk in model:
        for parameter, rows, column in sharded.places(unwrapped(chunk), metadata(pg)):
            places[id(parameter)] = rows, column
    for parameter, main in named_main_params(model, optimizer):
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
                adam.place(main, StochasticRounding(rows.flatten().to(main.device), width, start, (0, 0), column))


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
            shard = shard_of(parameter)
            if shard.numel():
                yield name, shard


class SharedLossScale:
    """One fp16 loss scale for all chained optimizers, updated once a step by what all ranks agreed on.

    The engine gives each chained optimizer a scale of its own and updates it by that optimizer's gradients alone, while
    the loss is multiplied by the first one's. An overflow in the dense parameters only would leave the experts' scale
    behind, and from then on their gradients would be unscaled by the wrong number. Here `update`, which the engine
    calls within `prepare_grads`, does nothing; the step calls `commit`.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.floor = float(getattr(scaler, "min_scale", math.inf))
        """Overflows make no scale smaller than this; a constant one never."""

    @property
    def scale(self) -> torch.Tensor:
        """The current loss scale, fp32 [1]."""
        return self._scaler.scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """Its reciprocal, fp32 [1]."""
        return self._scaler.inv_scale

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


def shared_loss_scale(optimizer: EngineOptimizer) -> SharedLossScale | None:
    """Return the fp16 loss scale, or None where there is none."""
    for part in engine.parts(optimizer):
        scale = getattr(part, "grad_scaler", None)
        if isinstance(scale, SharedLossScale):
            return scale
    return None


def optimizer_tensors(optimizer: EngineOptimizer) -> Iterator[Tensor]:
    """Yield the weights that this rank updates, and their moments, as they are stored, in floating dtypes.

    Of moments in codes, which are finite themselves, it is NaN for each group that is not.
    """
    for part in engine.parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part.optimizer, PrecisionAwareAdam):
            yield from part.optimizer.evidence()
            continue
        for master in part.get_parameters():
            yield master
            for value in part.optimizer.state[master].values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield value


def packing_adam(optimizer: EngineOptimizer, main: Tensor) -> PrecisionAwareAdam | None:
    """Return the Adam that has a main param packed with the model's weight; None: the main param has its values."""
    for part in engine.parts(optimizer):
        adam = part.optimizer
        if isinstance(adam, PrecisionAwareAdam) and main in adam.packed:
            return adam
    return None


def main_param(optimizer: EngineOptimizer, main: Tensor) -> Tensor:
    """Return the fp32 values of a main param, which may be packed with the model's weight."""
    adam = packing_adam(optimizer, main)
    return main if adam is None else adam.main_param(main)


def optimizer_state(optimizer: EngineOptimizer) -> dict[Tensor, Any]:
    """Return the state of each main param that this rank updates."""
    state: dict[Tensor, Any] = {}
    for part in engine.parts(optimizer):
        if not part.is_stub_optimizer:
            state.update(part.optimizer.state)
    return state


def named_optimizer_state(
    model: Sequence[torch.nn.Module], optimizer: EngineOptimizer
) -> Iterator[tuple[torch.nn.Parameter, str, Tensor]]:
    """Yield what is stored, each with its model parameter and what it is: main param, exp_avg, ...

    A packed main param has no values of its own: its `low_bits` and `carry_bits` are yielded in its place.
    """
    state = optimizer_state(optimizer)
    for parameter, main in named_main_params(model, optimizer):
        if "low_bits" not in state[main]:
            yield parameter, MAIN_PARAM, main
        for name, value in state[main].items():
            if isinstance(value, Tensor):
                yield parameter, name, value


def build_scheduler(run: Run, optimizer: EngineOptimizer) -> Schedule:
    """Return the learning-rate schedule, counted in committed iterations or in their sequences.

    The flags of the present run decide; a checkpoint gives the position only, and where the schedule began, so a run
    can be prolonged or its rate changed by flags. The first step of a warm-up uses `--lr-warmup-init`.
    """
    options = run.optimizer
    decay = max(run.derived.lr_decay_length or 0, 1)
    return Schedule(
        optimizer,
        in_samples=run.derived.schedule_unit == "sequences",
        restart_at=options.lr_restart_at or 0,
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
