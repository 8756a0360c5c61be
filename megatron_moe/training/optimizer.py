"""The engine's optimizer and learning-rate schedule, made to fit a transactional step.

The engine builds one optimizer for the dense parameters and one for the experts and chains them. This file adds what
its `step` leaves open: whether gradients are usable is asked of all ranks before any weight changes, and both
optimizers share one fp16 loss scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import optimizer as engine_optimizer
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.model.engine_config import optimizer_config
from megatron_moe.model.fully_sharded import own_range, shard_of
from megatron_moe.platform.adam import Adam, AdamWithMomentsOnHost


def build_optimizer(
    run: Run, model: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> MegatronOptimizer:
    """Return the optimizer of the wrapped model chunks, its moments allocated as zeros (fp32).

    Moments exist from the start, so a checkpoint can be written before the first step was committed.
    """
    sharded, offloaded = run.derived.zero_stage >= 2, run.optimizer.optimizer_cpu_offload
    chunks: Any = [_Shards(chunk) for chunk in model] if sharded else list(model)
    with _adam_on_host(Adam if sharded else AdamWithMomentsOnHost) if offloaded else nullcontext():
        optimizer = get_megatron_optimizer(
            optimizer_config(run), chunks, use_gloo_process_groups=False, pg_collection=pg_collection
        )
    scale = None
    for part in parts(optimizer):
        if sharded:
            # Where the norm is summed: each element of a weight is on one data-parallel rank.
            part.grad_stats_parallel_group = torch.distributed.group.WORLD
            # In fp16 the engine would copy main weights to the model's by a kernel of Transformer Engine or apex. There
            # are no such copies here, and those kernels refuse empty lists; without this buffer torch copies nothing.
            part._dummy_overflow_buf = None
        if part.is_stub_optimizer:
            continue
        _settle_positions(part)
        if isinstance(part.optimizer, AdamWithMomentsOnHost):
            part.optimizer.allocate()  # the engine would allocate them next to the weights
        part.init_state_fn(part.optimizer, part.config)
        # An fp32 optimizer has no loss scale at all, a bf16 one has None.
        if getattr(part, "grad_scaler", None) is not None:
            scale = SharedLossScale(part.grad_scaler) if scale is None else scale
            part.grad_scaler = scale
    return optimizer


@contextmanager
def _adam_on_host(kind: type[Adam]) -> Iterator[None]:
    """Let the engine build our Adam in the block: those of Transformer Engine and apex update memory of a GPU alone.

    Shards of a fully sharded model are in host memory as a whole; below that, the moments are.
    """
    with mock.patch.object(engine_optimizer, "Adam", kind):
        yield


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
    """Yield the weights that this rank updates, and their moments; all are fp32."""
    for part in parts(optimizer):
        if part.is_stub_optimizer:
            continue
        for master in part.get_parameters():
            yield master
            state = part.optimizer.state[master].values()
            yield from (value for value in state if isinstance(value, Tensor) and value.dim() > 0)


def main_gradients(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the gradients that this rank's updates use, once they are prepared.

    Their norm is no substitute: of a weight that tensor parallel ranks replicate it counts the first rank's gradient.
    """
    for part in parts(optimizer):
        if not part.is_stub_optimizer:
            yield from (master.grad for master in part.get_parameters() if master.grad is not None)


def named_moments_and_masters(
    model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[torch.nn.Parameter, str, Tensor]]:
    """Yield the same tensors, each with its model parameter and what it is: master weight, exp_avg, ..."""
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
        for master in part.get_parameters():
            yield owners[id(master)], "master weight", master
            for name, value in part.optimizer.state[master].items():
                if isinstance(value, Tensor):
                    yield owners[id(master)], name, value


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor], exactly: bool = False) -> Tensor:
    """Return whether every element is finite, a bool on the device.

    Each element is read once, to be summed. A sum of finite numbers may overflow: what is not finite by its sum has to
    be looked at again, element by element.

    Args:
        exactly: whether to look at each element.
    """
    finite = torch.ones((), dtype=torch.bool, device=platform.device())
    for found in _by_device(tensors):
        if exactly:
            whole = torch.stack([tensor.isfinite().all() for tensor in found]).all()
        else:
            whole = torch.stack([tensor.sum(dtype=torch.float32) for tensor in found]).sum().isfinite()
        finite &= whole.to(finite.device)
    return finite


def _by_device(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors on one device each; offloaded ones are on the host."""
    found: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.device].append(tensor)
    yield from found.values()


@torch.no_grad()
def prepare_gradients(optimizer: MegatronOptimizer) -> Tensor:
    """Put the gradients into the optimizer's fp32 ones, divided by the loss scale.

    It does what the engine's `prepare_grads` does, which reads from the device whether each part has overflown.

    Returns:
        How many parts of this rank have fp16 gradients that are not finite, fp32, on the device.
    """
    overflows = torch.zeros((), dtype=torch.float32, device=platform.device())
    if shared_loss_scale(optimizer) is None:
        optimizer.prepare_grads()
        return overflows
    for part in parts(optimizer):
        if part.is_stub_optimizer:
            continue
        part._copy_model_grads_to_main_grads()
        for gradients in _by_device(part._collect_main_grad_data_for_unscaling()):
            device = gradients[0].device
            found = torch.zeros(1, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, part.grad_scaler.inv_scale.to(device))
            overflows += found.squeeze().to(overflows.device)
    return overflows


@torch.no_grad()
def grad_norm_squares(optimizer: MegatronOptimizer) -> Tensor:
    """Return the squared norms of the parts' gradients, fp32 [N]; `joint_norm` makes one of them. Collective.

    The gradients and groups are those of the engine's `get_grad_norm`, which reads from the device once per gradient
    where neither Transformer Engine nor apex is installed, and once per part where one is.
    """
    sets = [[part] for part in parts(optimizer)]
    if isinstance(optimizer, ChainedOptimizer) and optimizer.grads_states_parallel_group_is_shared():
        sets = [parts(optimizer)]
    return torch.cat([_norm_square(members) for members in sets])


def _norm_square(members: Sequence[Any]) -> Tensor:
    """Return the squared norm of the gradients of parts that share a group, fp32 [1]. Collective over the group."""
    gradients = [gradient for part in members for gradient in _gradients_of_norm(part)]
    square = torch.zeros(1, dtype=torch.float32, device=platform.device())
    if gradients:
        square += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) ** 2.0
    torch.distributed.all_reduce(square, group=members[0].get_grad_stats_parallel_group())
    return square


def _gradients_of_norm(part: Any) -> list[Tensor]:
    # The second engine release has another name for it.
    gradients = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
    return gradients()


def joint_norm(squares: Sequence[float]) -> float:
    """Return the norm of all gradients from the squares of the parts' norms, rounded as the engine's."""
    norms = [square**0.5 for square in squares]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


@torch.no_grad()
def part_grad_norms(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """Return the norms of the dense parameters' and of the experts' gradients. Collective over all ranks.

    The squares add up to the square of `optimizer.get_grad_norm()`. The engine builds the dense optimizer first, on
    every rank, and the experts' after it if any rank has one. Each gradient is read once more. It does not call the
    engine's method for each part: with Transformer Engine or apex that reads a GPU's memory alone, and offloaded
    gradients are on the host.
    """
    dense, *experts = parts(optimizer)
    assert all(group["is_expert_parallel"] for part in experts for group in part.param_groups)
    squares = torch.cat([_norm_square([part]) for part in (dense, *experts)]).tolist()
    return joint_norm(squares[:1]), math.hypot(*(square**0.5 for square in squares[1:]))


@torch.no_grad()
def count_zeros(optimizer: MegatronOptimizer) -> Tensor:
    """Return how many elements of the prepared gradients are 0, over the whole model: fp64 [1], exact. Collective.

    The gradients are those of the norm: what several TP ranks have counts once, and so does a table that two stages
    share. Rows that pad the vocabulary are among them.
    """
    return _over_groups(
        optimizer, lambda part: [gradient.numel() - gradient.count_nonzero() for gradient in _gradients_of_norm(part)]
    )


@torch.no_grad()
def weights_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the fp32 weights of the whole model, each element counted once. Collective over all ranks.

    Call it while the gradients of the last step are there: the weights are those whose gradients are in their norm.
    """
    squares = _over_groups(
        optimizer, lambda part: [norm.double().square() for norm in torch._foreach_norm(_weights_of_norm(part))]
    )
    return math.sqrt(squares.item())


def _weights_of_norm(part: Any) -> list[Tensor]:
    gradients = _gradients_of_norm(part)
    counted = {id(gradient) for gradient in gradients}
    return [master for master in part.get_parameters() if master.grad is not None and id(master.grad) in counted]


def _over_groups(optimizer: MegatronOptimizer, numbers: Callable[[Any], Sequence[Tensor]]) -> Tensor:
    """Return the sum of the numbers of all parts, each over the ranks that share it, fp64 [1]. Collective."""
    sums = []
    for part in parts(optimizer):
        total = torch.zeros(1, dtype=torch.float64, device=platform.device())
        own = numbers(part)
        if own:
            total += torch.stack(list(own)).sum().to(total)  # of offloaded weights they are on the host
        torch.distributed.all_reduce(total, group=part.get_grad_stats_parallel_group())
        sums.append(total)
    return torch.stack(sums).sum(dim=0)


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Scale all main gradients in place so that their joint norm is at most `--clip-grad`; 0 leaves them alone."""
    for part in parts(optimizer):
        gradients = [] if part.is_stub_optimizer else [p.grad for p in part.get_parameters() if p.grad is not None]
        if not gradients or part.config.clip_grad <= 0.0:
            continue
        share = part.config.clip_grad / (grad_norm + 1e-6)  # the engine's formula
        if share < 1.0:
            torch._foreach_mul_(gradients, share)


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the learning rate that the next update uses."""
    return float(optimizer.param_groups[0]["lr"])


def build_scheduler(run: Run, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the learning-rate schedule, counted in committed iterations.

    The flags of the present run decide; a checkpoint gives the position only, so a run can be prolonged or its rate
    changed by flags. The first step of a warm-up uses `--lr-warmup-init`.
    """
    options = run.optimizer
    decay = max(run.derived.lr_decay_iters or 0, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=min(run.derived.lr_warmup_iters, decay - 1),  # the engine wants warm-up < decay
        lr_decay_steps=decay,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=run.derived.lr_wsd_decay_iters or _default_wsd_decay(decay),
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


def _default_wsd_decay(decay_iters: float) -> int:
    """Return a tenth of the run, the share that WSD was proposed with (MiniCPM, arXiv 2404.06395)."""
    return max(int(decay_iters // 10), 1)
