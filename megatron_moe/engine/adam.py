"""Adam with one step count per parameter group, for machines without Transformer Engine and apex.

torch's own Adam keeps a step tensor per parameter. megatron-core's distributed optimizer cannot resume from that: it
shares one tensor between all parameters after a load, and its fully reshardable format looks for the step where apex
keeps it, in the parameter group. This class keeps it there and calls the same kernels of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class Adam(torch.optim.Optimizer):
    """An Adam optimizer (arXiv:1412.6980), by default with decoupled weight decay (AdamW, arXiv:1711.05101).

    The signature is the part of apex's FusedAdam that megatron-core uses. Parameters are fp32 (the engine's main
    weights); state is `exp_avg` and `exp_avg_sq` in fp32, per parameter, and the integer `step` in each group.

    Args:
        betas: decays of the first and second moment.
        eps: added to the root of the second moment.
        adam_w_mode: True decays the weights themselves, False adds the decay to the gradient.
        capturable: must be False; recording the step in a CUDA graph needs Transformer Engine's Adam.

    Raises:
        ValueError: `capturable` is True; `step` raises it for a parameter that is not fp32 (the engine builds the
            optimizer on bf16 weights and replaces them by the main weights before the first step).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable Adam needs Transformer Engine; switch optimizer CUDA graphs off")
        self._update = adamw if adam_w_mode else adam
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def allocate(self) -> None:
        """Allocate the state of all parameters, zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state_of(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Each group's step grows by one, also an empty group's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
            group["step"] += 1
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            self.update(group, params, [p.grad for p in params], [self._state_of(p) for p in params])

    def update(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        beta1, beta2 = group["betas"]
        # The kernels want a step tensor per parameter and add one to each, hence a fresh vector cut into scalars.
        steps = torch.full((len(params),), float(group["step"]), device=params[0].device)
        self._update(
            list(params),
            list(grads),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        if param.dtype != torch.float32:
            raise ValueError(f"Adam updates fp32 weights, not {param.dtype}: give it the main weights")
        state = self.state[param]
        if not state:
            state["exp_avg"] = self._zeros_like(param)
            state["exp_avg_sq"] = self._zeros_like(param)
        return state

    def _zeros_like(self, param: Tensor) -> Tensor:
        return torch.zeros_like(param)
