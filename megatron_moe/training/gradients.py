"""What a step does with reduced gradients: unscaling, norms, zeros, clipping, and whether all is finite.

The numbers are the engine's. Its own functions read from the device once per gradient or per part, and some of them ask
for a GPU; here nothing is read, but where a function returns plain numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.engine.optimizer import ChainedOptimizer, parts
from megatron_moe.optim.optimizer import main_param, shared_loss_scale
from megatron_moe.platform.protocols import EngineOptimizer


def main_gradients(part: EngineOptimizer) -> list[Tensor]:
    """Return the gradients that this rank's updates use, once they are prepared.

    Their norm is no substitute: of a weight that tensor parallel ranks replicate it counts the first rank's gradient.
    """
    if part.is_stub_optimizer:
        return []
    return [main.grad for main in part.get_parameters() if main.grad is not None]


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor], exactly: bool = False) -> Tensor:
    """Return whether every element is finite, a bool on the device.

    Each element is read once, to be summed. A sum of finite numbers may overflow: what is not finite by its sum has to
    be looked at again, element by element (`exactly`).
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
def prepare_gradients(optimizer: EngineOptimizer) -> Tensor:
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
def grad_norm_squares(optimizer: EngineOptimizer) -> Tensor:
    """Return the squared norms of the parts' gradients, fp32 [N]; `joint_norm` makes one of them. Collective.

    The gradients and groups are those of the engine's `get_grad_norm`, which reads from the device once per gradient
    where neither Transformer Engine nor apex is installed, and once per part where one is.
    """
    every = parts(optimizer)
    if isinstance(optimizer, ChainedOptimizer) and optimizer.grads_states_parallel_group_is_shared():
        return _norm_square(every)
    return torch.cat([_norm_square([part]) for part in every])


def _norm_square(members: Sequence[Any]) -> Tensor:
    """Return the squared norm of the gradients of parts that share a group, fp32 [1]. Collective over the group."""
    gradients: list[Tensor] = []
    for part in members:
        gradients += _gradients_of_norm(part)
    square = torch.zeros(1, dtype=torch.float32, device=platform.device())
    if gradients:
        square += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) ** 2.0
    torch.distributed.all_reduce(square, group=members[0].get_grad_stats_parallel_group())
    return square


def _gradients_of_norm(part: Any) -> list[Tensor]:
    # The second engine release has another name for it.
    return (getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm)()


def joint_norm(squares: Sequence[float]) -> float:
    """Return the norm of all gradients from the squares of the parts' norms, rounded as the engine's."""
    if len(squares) == 1:
        return squares[0] ** 0.5
    return math.sqrt(sum((square**0.5) ** 2 for square in squares))


@torch.no_grad()
def part_grad_norms(optimizer: EngineOptimizer) -> tuple[float, float]:
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
def count_zeros(optimizer: EngineOptimizer) -> Tensor:
    """Return how many elements of the prepared gradients are 0, over the whole model: fp64 [1], exact. Collective.

    The gradients are those of the norm: what several TP ranks have counts once, and so does a table that two stages
    share. Rows that pad the vocabulary are among them.
    """
    zeros = []
    for part in parts(optimizer):
        zeros.append([one.numel() - one.count_nonzero() for one in _gradients_of_norm(part)])
    return _over_groups(optimizer, zeros)


@torch.no_grad()
def weights_norm(optimizer: EngineOptimizer) -> float:
    """Return the norm of the fp32 weights of the whole model, each element counted once. Collective over all ranks.

    Call it while the gradients of the last step are there: the weights are those whose gradients are in their norm.
    """
    squares: list[list[Tensor]] = []
    for part in parts(optimizer):
        counted = set(map(id, _gradients_of_norm(part)))
        squares.append([])
        for main in part.get_parameters():
            if main.grad is not None and id(main.grad) in counted:
                squares[-1].append(torch.linalg.vector_norm(main_param(part, main)).double().square())
    return math.sqrt(_over_groups(optimizer, squares).item())


def _over_groups(optimizer: EngineOptimizer, numbers: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum of the numbers of each part, each over the ranks that share it, fp64 [1]. Collective."""
    sums = []
    for part, own in zip(parts(optimizer), numbers):
        total = torch.zeros(1, dtype=torch.float64, device=platform.device())
        if own:
            total += torch.stack(list(own)).sum().to(total)  # of offloaded weights they are on the host
        torch.distributed.all_reduce(total, group=part.get_grad_stats_parallel_group())
        sums.append(total)
    return torch.stack(sums).sum(dim=0)


@torch.no_grad()
def clip_gradients(optimizer: EngineOptimizer, grad_norm: float) -> None:
    """Scale all main gradients in place so that their joint norm is at most `--clip-grad`; 0 leaves them alone."""
    for part in parts(optimizer):
        gradients = main_gradients(part)
        if not gradients or part.config.clip_grad <= 0.0:
            continue
        share = part.config.clip_grad / (grad_norm + 1e-6)  # the engine's formula
        if share < 1.0:
            torch._foreach_mul_(gradients, share)
