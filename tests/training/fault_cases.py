"""Numbers that are not finite, put into a real run at one place, on one rank or all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run, build
from tests.helpers.stepped_trainer import digests
from tests.helpers.trained_steps import SMALL, TINY

FLAGS: dict[str, Any] = {**TINY, **SMALL, "moe_layer_freq": 1, "micro_batch_size": 2, "global_batch_size": 4}
FLAGS |= {"hidden_dropout": 0.1, "watchdog": False}


def small(**flags: Any) -> Run:
    return build({**FLAGS, **flags})


def spoiled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one element replaced, gradient and all."""
    other = torch.zeros_like(tensor)
    other.view(-1)[0] = value
    return tensor + other


def _module(model: Any, end: str) -> torch.nn.Module:
    """The module whose name in the whole model ends so; under pipeline parallelism only one rank has it."""
    from megatron_moe.training.state_checks import global_names

    names = global_names(model[0])
    return next(module for name, module in model[0].named_modules() if names[name].endswith(end))


@contextmanager
def spoiled_output(module: torch.nn.Module, value: float) -> Iterator[None]:
    hook = module.register_forward_hook(lambda _m, _i, output: spoiled(output, value))
    yield
    hook.remove()


@contextmanager
def damaged(elements: torch.Tensor, value: float) -> Iterator[None]:
    """Some elements of the run's state have another value within the block."""
    elements = elements.detach()
    kept = elements.clone()
    elements.fill_(value)
    yield
    elements.copy_(kept)


def embedding_output(trainer: Any, value: float) -> Any:
    return spoiled_output(_module(trainer.trained.model, "word_embeddings"), value)


def loss(trainer: Any, value: float) -> Any:
    return spoiled_output(trainer.trained.model[0], value)


def router_logits(trainer: Any, value: float) -> Any:
    router: Any = _module(trainer.trained.model, "layers.1.mlp.router")
    gate = router.gate
    return mock.patch.object(router, "gate", lambda hidden: spoiled(gate(hidden), value))


def expert_bias(trainer: Any, value: float) -> Any:
    router: Any = _module(trainer.trained.model, "layers.1.mlp.router")
    return damaged(router.expert_bias[:1], value)


def expert_weight(trainer: Any, value: float) -> Any:
    from megatron_moe.model.fully_sharded import local

    weight: Any = local(_module(trainer.trained.model, "layers.1.mlp.experts").weight2)
    return damaged(weight[:, 0, 0], value)  # of every expert: one without a token would not matter


@contextmanager
def expert_gradient(trainer: Any, value: float) -> Iterator[None]:
    experts: Any = _module(trainer.trained.model, "layers.1.mlp.experts")
    hooks: list[Any] = []

    def hook_once(*_: Any) -> None:
        # In the forward pass: a fully sharded model computes with a gathered weight, which stays the same object.
        if not hooks:
            hooks.append(experts.weight1.register_hook(lambda gradient: spoiled(gradient, value)))

    hook = experts.register_forward_pre_hook(hook_once)
    yield
    for one in (hook, *hooks):
        one.remove()


def reduced_gradient(trainer: Any, value: float) -> Any:
    from megatron_moe.training import step as step_file

    finalize = step_file.finalize_model_grads

    def spoiling(*args: Any, **kwargs: Any) -> Any:
        update = finalize(*args, **kwargs)
        _module(trainer.trained.model, "layers.1.mlp.router").weight.main_grad[0, 0] = value
        return update

    return mock.patch.object(step_file, "finalize_model_grads", spoiling)


def adam_moment(trainer: Any, value: float) -> Any:
    from megatron_moe.optim.optimizer import named_optimizer_state

    wanted: Any = _module(trainer.trained.model, "layers.1.mlp.experts").weight1
    stored = named_optimizer_state(trainer.trained.model, trainer.trained.optimizer)
    (moment,) = (tensor for parameter, kind, tensor in stored if parameter is wanted and kind == "exp_avg")
    return damaged(moment.view(-1)[:1], value)


DAMAGE = ("expert_bias", "expert_weight", "adam_moment")
"""Sites where the fault is in the run's state, which no step that is left out heals."""
_NAMED: dict[Callable[[Any, float], Any], str] = {
    embedding_output: "the output of embedding.word_embeddings",
    router_logits: "the logits of decoder.layers.1.mlp.router",
    expert_bias: "expert_bias of decoder.layers.1.mlp.router",
    expert_weight: "the weight decoder.layers.1.mlp.experts.weight2",
    expert_gradient: "the gradient of decoder.layers.1.mlp.experts.weight1",
    reduced_gradient: "the gradient of decoder.layers.1.mlp.router.weight",
    loss: "the loss per token",
    adam_moment: "the exp_avg of decoder.layers.1.mlp.experts.weight1",
}
SITES = {site.__name__: site for site in _NAMED}
NAMED = {site.__name__: name for site, name in _NAMED.items()}


def faulty_steps(faults: list[tuple[str, str, str]], flags: dict[str, Any]) -> dict[str, Any]:
    """One run with a fault in every second step: (site, value, "one" or "all" ranks).

    Returns:
        Per fault: told, what was said on this rank or raised; raised, whether it was; and changed, what the step
        changed. Beside it the sound steps, all of which must be applied, and what they changed.
    """
    from megatron_moe.training import run as training_run
    from megatron_moe.training.callbacks.faults import NonFinite
    from megatron_moe.training.run import pretrain

    rank, seen, sound, moved = torch.distributed.get_rank(), [], [], set[str]()

    class Spoiling(NonFinite):
        """The fault lasts from the beginning of the step to the end of the second look."""

        def before_step(self, step: Any) -> None:
            number, self.due = divmod(self.trainer.progress.iteration, 2)
            self.fault: Any = nullcontext()
            self.before = digests(self.trainer.trained)
            if self.due:
                site, value, ranks = faults[number]
                if ranks == "all" or rank == 1:
                    self.fault = SITES[site](self.trainer, float(value))
            self.fault.__enter__()

        def after_step(self, step: Any, result: Any) -> None:
            said: list[str] = []
            raised = False
            with mock.patch.object(self.trainer.reporter, "event", lambda _kind, text, **_: said.append(text)):
                try:
                    super().after_step(step, result)
                except RunFault as fault:
                    said, raised = [str(fault)], True
            self.fault.__exit__(None, None, None)
            after = digests(self.trainer.trained)
            changed = [name for name in after if after[name] != self.before[name]]
            if not self.due:
                sound.append(result.committed)
                moved.update(changed)
                return
            seen.append({"told": said, "raised": raised, "changed": changed, "committed": result.committed})

    with mock.patch.object(training_run, "NonFinite", Spoiling):
        pretrain(small(train_iters=2 * len(faults) + 1, **flags))
    return {"seen": seen, "sound": sound, "moved": moved}


def poisoned_saves(root: str) -> dict[str, Any]:
    """A run that saves every step; before the last save a NaN is put into rank 1's state, at each place in turn. Then a
    state with one is saved without a look at it.
    """
    from megatron_moe.training.callbacks import checkpointing
    from megatron_moe.training.run import pretrain

    refusals: list[str] = []
    save = checkpointing.save

    def spoiling(trainer: Any) -> None:
        if trainer.progress.iteration < 2 or trainer.saved is not None:
            return save(trainer)
        for site in DAMAGE:
            with SITES[site](trainer, float("nan")) if torch.distributed.get_rank() == 1 else nullcontext():
                try:
                    save(trainer)
                except RunFault as fault:
                    refusals.append(str(fault))
        with adam_moment(trainer, float("nan")), mock.patch.object(checkpointing, "damage_on_ranks", lambda *_: None):
            save(trainer)

    with mock.patch.object(checkpointing, "save", spoiling):
        pretrain(small(train_iters=2, save=root, save_interval=1))
    return {"refusals": refusals, "steps": sorted(path.name for path in Path(root).glob("iter_*"))}


def stopped_run(site: str, flags: dict[str, Any]) -> str:
    """The error of a run in which `site` holds a NaN on rank 1 from step 2 on."""
    from megatron_moe.training.callback import Callback
    from megatron_moe.training.run import pretrain

    class Spoiling(Callback):
        def before_step(self, step: Any) -> None:
            if step.iteration == 2 and torch.distributed.get_rank() == 1:
                SITES[site](self.trainer, float("nan")).__enter__()

    with pytest.raises(RunFault) as fault:
        pretrain(small(**flags), callbacks=[Spoiling()])
    return str(fault.value)
