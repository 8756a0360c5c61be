"""fp16: the loss scale halves at an overflow, doubles after a window, and scales every loss alike."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.stepped_trainer import SMALL, Trainer

pytestmark = pytest.mark.engine

SIZES = {**SMALL, "seq_length": 32, "micro_batch_size": 4}


def reported(flags: dict[str, Any], spoiled: list[bool]) -> list[tuple[bool, float, float, bool]]:
    """Of each step: was it applied, its loss scale, the next step's, and whether it was an overflow."""
    trainer = Trainer({**SIZES, "fp16": True, "initial_loss_scale": 256.0, "hysteresis": 1, **flags})
    weight = next(p for name, p in trainer.model[0].named_parameters() if name.endswith("mlp.experts.weight1"))
    seen = []
    for bad in spoiled:
        hook = weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf"))) if bad else None
        result = trainer.step()
        if hook is not None:
            hook.remove()
        seen.append((result.committed, result.loss_scale, result.next_loss_scale, result.overflow))
    return seen


def test_the_scale_doubles_after_a_window_without_overflow_and_halves_at_one_down_to_its_floor(gloo):
    flags = {"min_loss_scale": 128.0, "loss_scale_window": 2}
    spoiled = [False, False, True, True, True, False, True, False, False]
    (seen,) = gloo.run(1, reported, flags=flags, spoiled=spoiled)
    assert seen == [
        (True, 256.0, 256.0, False),
        (True, 256.0, 512.0, False),
        (False, 512.0, 256.0, True),
        (False, 256.0, 128.0, True),
        (False, 128.0, 128.0, False),  # it cannot fall any more: no overflow, but a fault
        (True, 128.0, 128.0, False),
        (False, 128.0, 128.0, False),  # which starts the window anew
        (True, 128.0, 128.0, False),
        (True, 128.0, 256.0, False),
    ]


def test_a_constant_scale_stays_and_an_overflow_is_skipped_all_the_same(gloo):
    (seen,) = gloo.run(1, reported, flags={"loss_scale": 64.0}, spoiled=[False, True, False])
    assert [step[:3] for step in seen] == [(True, 64.0, 64.0), (False, 64.0, 64.0), (True, 64.0, 64.0)]


AUX = {"moe_router_num_groups": None, "moe_router_group_topk": None, "clip_grad": 0.0}
AUX |= {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (3.0, 2.0)}
AUX |= {"moe_z_loss_coeff": 1.0}


def router_gradients(flags: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients of all routers' weights as the optimizer uses them: fp32, unscaled."""
    from megatron_moe.training import step as step_file

    trainer = Trainer({**SIZES, **flags})
    weights = [p for name, p in trainer.model[0].named_parameters() if name.endswith("router.weight")]
    seen: list[torch.Tensor] = []
    clip = step_file.clip_gradients

    def noting(*args: Any) -> None:
        clip(*args)
        seen.extend(getattr(weight, "main_param", weight).grad.clone() for weight in weights)

    with mock.patch.object(step_file, "clip_gradients", noting):
        assert trainer.step().committed
    return seen


@pytest.mark.parametrize("per_token", [False, True])
def test_auxiliary_and_z_losses_are_scaled_with_the_loss_and_unscaled_with_it(gloo, per_token):
    flags = {**AUX, "calculate_per_token_loss": per_token}
    nothing = {"moe_aux_loss_coeff": (1e-9, 1e-9), "moe_z_loss_coeff": 0.0}
    (plain,) = gloo.run(1, router_gradients, flags=flags)
    (without,) = gloo.run(1, router_gradients, flags={**flags, **nothing})
    # A loss per token is divided by the tokens at the end only: the same scale is 256 times as much on the way.
    scale = 16.0 if per_token else 4096.0
    (scaled,) = gloo.run(1, router_gradients, flags={**flags, "fp16": True, "loss_scale": scale})
    for wanted, bare, found in zip(plain, without, scaled):
        assert found.dtype == torch.float32
        assert (wanted - bare).norm() > 2 * bare.norm(), "the losses in question do not rule the gradient"
        assert (found - wanted).norm() < 0.01 * wanted.norm()


def gradients_around_a_step(flags: dict[str, Any]) -> dict[str, Any]:
    """The router's gradient of a layer's own backward pass, outside a run, before and after a step of a run."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_moe.moe.router import routers

    def outside() -> torch.Tensor:
        probs = router.route(hidden).probs
        (gradient,) = torch.autograd.grad((probs * 0.0).sum(), router.weight)
        router.reset_counts()
        return gradient.clone()

    trainer = Trainer({**SIZES, **AUX, **flags})
    router = next(iter(routers(trainer.model)))
    router.weight.register_hook(lambda _: None)  # so that its gradient is handed on, and not added to its sum
    hidden = torch.randn(32, router.weight.shape[1]).to(router.weight.dtype)
    weight, bias = router.weight.detach().clone(), router.expert_bias.clone()
    first = outside()
    left = MoEAuxLossAutoScaler.main_loss_backward_scale
    committed = [trainer.step().committed for _ in range(2)]
    with torch.no_grad():
        router.weight.copy_(weight)
        router.expert_bias.copy_(bias)
    return {"left": left, "committed": committed, "before": first, "after": outside()}


def test_a_backward_outside_a_run_leaves_no_scale_to_a_run_and_gets_none_from_it(gloo):
    (seen,) = gloo.run(1, gradients_around_a_step, flags={"fp16": True, "loss_scale": 256.0})
    assert seen["left"] is None
    assert seen["committed"] == [True, True]
    assert seen["before"].abs().max() > 0
    assert torch.equal(seen["before"], seen["after"])


def steps_after_the_engines_own_backward() -> list[bool]:
    """The engine's function leaves a scale without dimensions where no schedule has set one."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    trainer = Trainer({**SIZES, **AUX})
    loss = torch.ones((), requires_grad=True)
    MoEAuxLossAutoScaler.apply(torch.ones(3, requires_grad=True), loss).sum().backward()
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.dim() == 0
    return [trainer.step().committed]


def test_a_scale_that_somebody_else_left_in_the_process_stops_no_step(gloo):
    assert gloo.run(1, steps_after_the_engines_own_backward) == [[True]]
