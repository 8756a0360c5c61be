"""What a trainer gives so that the doctor can check it.

A script is a Python file with the functions of `TestedTrainer`; `build`, `step` and `named_gradients` are
enough. The targets that come with the doctor are objects with the same methods.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.doctor.trainers.samples import MicroBatch

NEEDED = ("build", "step", "named_gradients")
AXES = ("tp", "pp", "cp", "dp", "ep", "etp")


Held = tuple[tuple[tuple[int, int, int, int], ...], Tensor, tuple[int | None, int, int]]
"""A rank's share of a tensor, in the terms of `measure`: its cuts, its shard, and which part of the shard is known."""


class TestedTrainer(Protocol):
    """The functions of a script. The first three have to be there.

    Attributes:
        loss: what a trained token weighs: "tokens", all of a batch the same (the default), or "micro-batches", what its
            micro-batch's mean gives it.
        packed: whether documents of a sequence, told by position_ids that start again, must not see each other.
        vocabulary: tokens that the model knows, 64 by default.
        ranks: the layout's ranks; --ranks has to be a multiple. 1 by default.
        leaves_out: checks, and what else is not checked of what the user gave, with the reason.
    """

    loss: str
    packed: bool
    vocabulary: int
    ranks: int
    leaves_out: Mapping[str, str]

    def build(self, rank: int, world: int) -> None:
        """Build model and optimizer on this rank, in fp32 on the CPU; the default gloo group is there.

        With world 1 there must be no parallelism: this process is what the others are compared with. The weights must
        not depend on the world.
        """

    def prepare(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Take this rank's batches of all steps, after `build`, for a trainer that owns its loop.

        It may train on them now, and answer `step` and the others from what it has kept.
        """

    def step(self, batch: Sequence[MicroBatch]) -> float | Mapping[str, Any]:
        """Make the forward and backward passes of this rank's micro-batches, and reduce the gradients.

        Returns:
            The loss of the whole batch as the trainer logs it, the same on every rank. Or a mapping: `loss`;
            `token_loss`, without auxiliary losses, if that differs; `aux_losses`, name -> value.
        """

    def named_gradients(self) -> Iterable[tuple[str, Tensor | Held | None]]:
        """Yield the gradients that the optimizer uses, by names that no layout changes.

        A gradient is whole, or a DTensor, or what this rank has of it. A rank yields those it has; where several have
        the same elements, the bits must be equal.
        """

    def update(self) -> float | None:
        """Clip, step the optimizer, zero the gradients; return the gradient norm before clipping, if it is known."""

    def named_weights(self) -> Iterable[tuple[str, Tensor | Held]]:
        """Yield the weights as `named_gradients` yields gradients."""

    def routers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return for each router, by a name that no layout changes, what is known of the last step.

        `counts` [E] int64, the whole batch's choices of each expert; `dropped` [E], those dropped by a capacity;
        `expert_bias` [E] after the update, `bias_rate`; `aux_losses`, name -> value.
        """

    def place(self) -> Mapping[str, tuple[int, int]]:
        """Return (rank, size) of tp, pp, cp, dp, ep, etp; left out: (0, 1). Without it dp is the world.

        Micro-batches are shared out over dp.
        """

    def save(self, folder: str) -> None:
        """Save what a restart needs."""

    def load(self, folder: str) -> None:
        """Load it into what `build` has just built."""


def load_script(path: Path) -> ModuleType:
    """Return the module of a script.

    Raises:
        ConfigError: it cannot be imported, or lacks a function.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: is no file; --target script takes a Python file with {', '.join(NEEDED)}")
    spec = importlib.util.spec_from_file_location("trainer_under_test", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: is no Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in NEEDED if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(f"{path}: has no function {', '.join(missing)}; docs/guides/check_a_trainer.md shows one")
    return module
