"""The engine's parameter groups with the settings of `config/module_names.py`, and the schedule that follows them.

The engine sorts parameters into groups by overrides: a key that matches a parameter, and the group's entries that are
then not the default ones. Ours are made from names in the whole model, so that a copy of a table on another stage of
the pipeline is in the same group as the table (the engine marks the copies of multi-token prediction otherwise), and a
shard of a weight in that of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_moe.checkpoint.state import unwrapped
from megatron_moe.config import module_names
from megatron_moe.config.module_names import GroupSettings
from megatron_moe.config.schema import Run
from megatron_moe.engine.optimizer import (
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamKey,
    ParamWithNamePredicate,
    get_standard_config_overrides,
)
from megatron_moe.model.fully_sharded import shard_of
from megatron_moe.model.initialize import global_name


def overrides(run: Run, model: Sequence[torch.nn.Module]) -> dict[ParamKey, Any] | None:
    """Return the engine's overrides for the wrapped chunks; None, its own, where no flag sets parameters apart.

    Its rule leaves biases and vectors undecayed. It would take the stacked biases of experts for matrices.

    `lr_mult`, `wd_mult` and `is_decoupled_lr` are also among the entries that identify a group to the engine.
    """
    settings = module_names.group_settings(run)
    biased_experts = run.model.add_bias_linear and run.moe.num_experts is not None
    if not settings and not biased_experts:
        return None
    standard = get_standard_config_overrides(OptimizerConfig())
    not_decayed = [key for key, values in standard.items() if values.get("wd_mult") == 0.0]
    members: dict[tuple[tuple[str, Any], ...], set[int]] = {}
    for chunk in model:
        inner = unwrapped(chunk)
        for name, parameter in inner.named_parameters():
            own = settings.get(global_name(inner, name), GroupSettings())
            decay = own.weight_decay_mult
            if decay is None:
                is_bias = name.endswith((".experts.bias1", ".experts.bias2"))
                decay = 0.0 if is_bias or any(key.matches(parameter, name) for key in not_decayed) else 1.0
            changed: dict[str, Any] = {}
            if own.lr_mult != 1.0:
                changed["lr_mult"] = own.lr_mult
            if decay != 1.0:
                changed["wd_mult"] = decay
            if own.is_decoupled:
                peak, least = module_names.decoupled_range(run)
                changed |= {"max_lr": peak, "min_lr": least, "is_decoupled_lr": True}
            entries = tuple(sorted(changed.items()))
            optimized = shard_of(parameter) if run.derived.zero_stage >= 2 else parameter
            members.setdefault(entries, set()).add(id(optimized))
    found: dict[ParamKey, Any] = {}
    for entries, ids in members.items():
        if entries:
            is_member = ParamWithNamePredicate(repr(entries), lambda parameter, _, ids=ids: id(parameter) in ids)
            found[ParamKey(with_name_predicate=is_member)] = dict(entries)
    return found


class Schedule(OptimizerParamScheduler):
    """The engine's schedule, times the multiple of each parameter group, at every step: its ends are multiplied too.

    Args:
        in_samples: whether its lengths are sequences, and not iterations.
        restart_at: the iteration after which it began; 0: the run's first.

    Attributes:
        num_steps: how far it has come, in its unit, since it began.
    """

    def __init__(self, *args: Any, in_samples: bool = False, restart_at: int = 0, **settings: Any) -> None:
        self.in_samples, self.begun = in_samples, {"iteration": restart_at, "steps": 0, "samples": 0}
        super().__init__(*args, **settings)

    def advance(self, num_samples: int) -> None:
        """Count a committed step of so many sequences."""
        self.step(increment=num_samples if self.in_samples else 1)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and position, with its unit, and what the run had committed when the schedule began."""
        return {**super().state_dict(), "in_samples": self.in_samples, "begun": self.begun}

    def load(self, state: dict[str, Any], committed_steps: int, committed_samples: int) -> None:
        """Take the position of a state; begin anew if the state's schedule began after another iteration.

        A position that was counted in the other unit, or before ours had one, follows from what the run has committed.
        """
        begun, position = state.get("begun", {"iteration": 0, "steps": 0, "samples": 0}), state["num_steps"]
        goes_on = begun["iteration"] == self.begun["iteration"]
        if goes_on:
            self.begun = begun
        elif self.begun["iteration"] > 0:
            self.begun |= {"steps": committed_steps, "samples": committed_samples}
        if not goes_on or state.get("in_samples", False) != self.in_samples:
            committed = {"steps": committed_steps, "samples": committed_samples}
            unit = "samples" if self.in_samples else "steps"
            position = committed[unit] - self.begun[unit]
        self.load_state_dict({**state, "num_steps": position})

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of a parameter group."""
        return super().get_lr(param_group) * param_group.get("lr_mult", 1.0)
