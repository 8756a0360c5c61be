"""Bits flipped in one replica of a real run: the cases of test_checks_replicas_ranks.py and of the soak."""

import random
from typing import Any
from unittest import mock

import torch

from megatron_moe.config.errors import RunFault
from tests.training.fault_cases import small


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of one element."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.detach().view(-1).view(integers)
    width = 8 * tensor.element_size()
    mask = 1 << bit
    bits[element] ^= mask - (1 << width) if bit == width - 1 else mask


def copies(trainer: Any) -> list[tuple[str, torch.Tensor, Any]]:
    """Every tensor of this rank that has copies elsewhere, with its name and the group that holds them."""
    from megatron_moe.training.callbacks.checks import _by_group

    return [
        (name, tensor, group)
        for group, named in _by_group(trainer.trained)
        if group is not None and group.size() > 1
        for name, tensor in named
    ]


def flipped_bits(flags: dict[str, Any], trials: int, seed: int = 0) -> dict[str, Any]:
    """A run that compares before every update. In every second step a random bit of a random copy on a random rank is
    flipped before the step, of an expert_bias after the backward pass, which moves it; and it is flipped back after it.

    Returns:
        caught: trials whose error named the tensor and, where there is a majority, the rank, on this rank. missed: the
        others. alarms: errors of steps without a flip.
    """
    from megatron_moe.training import run as training_run
    from megatron_moe.training.callbacks.checks import Replicas
    from megatron_moe.training.run import pretrain

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    outcome: dict[str, Any] = {"caught": 0, "missed": [], "alarms": [], "steps": 0}

    class Flipping(Replicas):
        def before_step(self, step: Any) -> None:
            trainer = self.trainer
            draw = random.Random(1000 * seed + trainer.progress.iteration)
            self.undo: Any = None
            self.expected: tuple[str, int] | None = None
            if trainer.progress.iteration % 2 and trainer.progress.iteration < 2 * trials:
                victim, place, bit = draw.randrange(world), draw.random(), draw.random()
                chosen: list[Any] = [None]
                if rank == victim:
                    known = copies(trainer)
                    name, tensor, group = known[int(place * len(known))]
                    element = int(draw.random() * tensor.numel())
                    self.undo = (tensor, element, int(bit * 8 * tensor.element_size()))
                    if not name.endswith("expert_bias"):
                        flip(*self.undo)
                    self.late = name.endswith("expert_bias")
                    chosen = [(name, group.size())]
                torch.distributed.broadcast_object_list(chosen, src=victim)
                self.expected = (chosen[0][0], victim if chosen[0][1] > 2 else -1)

        def before_update(self, step: Any) -> None:
            outcome["steps"] += 1
            if self.undo is not None and self.late:
                flip(*self.undo)
            try:
                super().before_update(step)
                told = None
            except RunFault as fault:
                told = str(fault)
            if self.undo is not None:
                flip(*self.undo)
            if self.expected is None:
                outcome["alarms"] += [] if told is None else [told]
                return
            name, odd = self.expected
            good = told is not None and name in told and (odd < 0 or f"that of rank {odd} differs" in told)
            outcome["caught"] += good
            outcome["missed"] += [] if good else [(self.expected, told)]

    every = {"check_weight_hash_across_dp_replicas_interval": 1}
    with mock.patch.object(training_run, "Replicas", Flipping):
        pretrain(small(train_iters=2 * trials + 1, log_interval=1000, **every, **flags))
    return outcome


def clean_steps(flags: dict[str, Any], steps: int) -> int:
    """A run of so many steps that compares in each of them; steps without an alarm."""
    from megatron_moe.training.run import pretrain

    every = {"check_weight_hash_across_dp_replicas_interval": 1}
    return pretrain(small(train_iters=steps, log_interval=1000, **every, **flags))["iterations"]
