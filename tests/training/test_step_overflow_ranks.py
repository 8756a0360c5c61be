"""An overflow or a NaN, wherever it arises and on whichever rank, leaves no trace: no step is applied, on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

ONE: dict[str, Any] = {"num_layers": 2, "moe_layer_freq": "[0,1]", "micro_batch_size": 4}
FOUR = {
    **ONE,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "use_distributed_optimizer": True,
}


def _first_element(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one element replaced, gradient and all."""
    spoiled = torch.zeros_like(tensor)
    spoiled.view(-1)[0] = value
    return tensor + spoiled


def _module(model: torch.nn.Module, end: str) -> torch.nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith(end))


@contextmanager
def embedding_output(trainer: Any, value: float) -> Iterator[None]:
    embedding = _module(trainer.model[0], "word_embeddings")
    hook = embedding.register_forward_hook(lambda _m, _i, output: _first_element(output, value))
    yield
    hook.remove()


@contextmanager
def router_logits(trainer: Any, value: float) -> Iterator[None]:
    from megatron_moe.moe.router import TopKRouter

    gate = TopKRouter.gate
    TopKRouter.gate = lambda self, hidden: _first_element(gate(self, hidden), value)  # type: ignore[method-assign]
    yield
    TopKRouter.gate = gate  # type: ignore[method-assign]


@contextmanager
def expert_weight(trainer: Any, value: float) -> Iterator[None]:
    weight = _module(trainer.model[0], "mlp.experts").weight2
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, 0, 0] = value  # of every expert: one without a token would not matter
    yield
    with torch.no_grad():
        weight.copy_(kept)


@contextmanager
def expert_gradient(trainer: Any, value: float) -> Iterator[None]:
    weight = _module(trainer.model[0], "mlp.experts").weight1
    hook = weight.register_hook(lambda gradient: _first_element(gradient, value))
    yield
    hook.remove()


@contextmanager
def loss(trainer: Any, value: float) -> Iterator[None]:
    hook = trainer.model[0].register_forward_hook(lambda _m, _i, losses: _first_element(losses, value))
    yield
    hook.remove()


@contextmanager
def reduced_gradient(trainer: Any, value: float) -> Iterator[None]:
    from megatron_moe.training import step as step_file

    finalize = step_file.finalize_model_grads

    def spoiling(*args: Any, **kwargs: Any) -> Any:
        update = finalize(*args, **kwargs)
        for parameter in trainer.model[0].parameters():
            parameter.main_grad.fill_(value)
        return update

    step_file.finalize_model_grads = spoiling
    yield
    step_file.finalize_model_grads = finalize


SITES: dict[str, Callable[[Any, float], Any]] = {
    site.__name__: site
    for site in (embedding_output, router_logits, expert_weight, expert_gradient, loss, reduced_gradient)
}


VALUES = (float("inf"), float("nan"))


def injected(flags: dict[str, Any]) -> dict[str, Any]:
    """At each site: was the step applied, and what has changed; one rank spoils.

    A single rank does with both values, several with one of them.
    """
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer(flags)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    good = [trainer.step().committed]
    seen: dict[str, Any] = {}
    for number, (name, site) in enumerate(SITES.items()):
        for value in VALUES if world == 1 else VALUES[number % 2 :][:1]:
            before = trainer.state()
            if rank == number % world:
                with site(trainer, value):
                    applied = trainer.step().committed
            else:
                applied = trainer.step().committed
            after = trainer.state()
            seen[f"{name} {value}"] = [applied, [part for part in before if before[part] != after[part]]]
        good.append(trainer.step().committed)
    return {"good": good, "seen": seen}


@pytest.mark.parametrize("precision", rows(["fp32", "bf16", "fp16"], test=["fp16"]))
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_overflow_or_nan_on_one_rank_leaves_every_bit_of_every_rank(gloo, ranks, precision):
    flags = dict(ONE if ranks == 1 else FOUR)
    flags |= {} if precision == "fp32" else {precision: True}
    flags |= {"initial_loss_scale": 1024.0, "min_loss_scale": 1024.0} if precision == "fp16" else {}
    for result in gloo.run(ranks, injected, flags=flags):
        assert result["good"] == [True] * (len(SITES) + 1)
        assert {site: seen for site, seen in result["seen"].items() if seen != [False, []]} == {}
        assert len(result["seen"]) == (2 * len(SITES) if ranks == 1 else len(SITES))
