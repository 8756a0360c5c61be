"""Read a step into a model, an optimizer and a schedule that are built already."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import torch

from megatron_moe import platform
from megatron_moe.checkpoint import dist, optimizer_state, random_state
from megatron_moe.checkpoint.index import UntrustedError
from megatron_moe.checkpoint.plan import Source
from megatron_moe.checkpoint.state import (
    Progress,
    Trained,
    fp32_state_keys,
    layout,
    metadata,
    model_state,
    put_model_state,
)
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.parallel.groups import rank_facts
from megatron_moe.parallel.seeds import seed_everything

_REFUSED, _ABSENT, _READ = 0, 1, 2


class Loaded(NamedTuple):
    """Where to start, what to tell about it, and what was rounded before it came here: recorded for good."""

    progress: Progress
    notes: list[str]
    precision_warnings: list[str]


def load(run: Run, source: Source, trained: Trained) -> Loaded:
    """Fill model, optimizer, schedule and random states from a step. Collective over all ranks.

    Raises:
        ConfigError: tensors are missing, left over or of another dtype, or the files hold code.
    """
    options = run.checkpoint
    fresh = options.finetune or source.weights_only
    with_optimizer = not (fresh or options.no_load_optim)
    request = model_state(trained)
    chunks = list(request)
    if with_optimizer:
        settings = metadata(trained.pg_collection)
        request["optimizer"] = optimizer_state.sharded_state(trained.optimizer, request, settings, loading=True)
    loaded, rounded = dist.load_tensors(
        request,
        source.step,
        allow_unread=() if with_optimizer else ("optimizer.",),
        fp32_state=fp32_state_keys(trained, {name: request[name] for name in chunks}),
    )
    recorded = [*source.state.get("precision_warnings", []), *_warned_of(rounded, source)]
    put_model_state(trained, {name: loaded[name] for name in chunks})
    if with_optimizer:
        optimizer_state.load(trained.optimizer, loaded["optimizer"], run)
    else:
        # fp32 main weights are copies of the model's; those they were made from are gone.
        trained.optimizer.reload_model_params()
    if fresh:
        note = f"weights from {source.step}; iteration, optimizer and schedule start fresh"
        return Loaded(Progress(), [*recorded, note], recorded)
    trained.scheduler.load_state_dict(source.state["scheduler"])
    progress = Progress(**{field.name: source.state[field.name] for field in fields(Progress)})
    notes = [*recorded, f"continuing from {source.step}", *_load_random_state(run, source)]
    return Loaded(progress, notes, recorded)


def _warned_of(rounded: dict[str, torch.dtype], source: Source) -> list[str]:
    """One loud line per tensor that is fp32 here and was saved as less."""
    return [
        f"PRECISION WARNING: {key} is {dtype} in {source.step}, must be torch.float32: it was rounded before it was "
        "saved; loaded as it is and kept in fp32 from now on"
        for key, dtype in rounded.items()
    ]


def _load_random_state(run: Run, source: Source) -> list[str]:
    """Restore this rank's random states, or make new ones and say so; the same decision on every rank.

    A stream belongs to a rank's place in the layout that drew from it: there is no right way to give it to another.
    """
    if run.checkpoint.no_load_rng:
        return []
    facts = rank_facts()
    same_layout = source.state["layout"] == layout(facts)
    path = random_state.path_of(source.step, facts.rank)
    state, verdict = None, _ABSENT
    if same_layout and path.is_file():
        try:
            state, verdict = random_state.read(path), _READ
        except UntrustedError:
            verdict = _REFUSED
    worst = torch.tensor(verdict, device=platform.device())
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MIN)
    if worst.item() == _REFUSED:
        raise ConfigError(
            f"{path.parent}: refused, random states may be damaged or harmful; --no-load-rng does without them"
        )
    if worst.item() == _READ and state is not None:
        random_state.restore(state)
        return []
    iteration = source.state["iteration"]
    seed_everything(run, iteration)
    why = "was saved without them" if same_layout else f"was saved on another layout {source.state['layout']}"
    drawing = [name for name in ("hidden_dropout", "attention_dropout") if getattr(run.model, name)]
    drawing += ["moe_input_jitter_eps"] if run.moe.moe_input_jitter_eps else []
    effect = (
        f"{' and '.join(drawing)} draw other numbers from here than that run would have drawn"
        if drawing
        else "no dropout and no jitter draws from them, so that nothing changes"
    )
    return [
        f"random states of every rank are made anew from --seed {run.training.seed} and iteration {iteration}, because "
        f"the checkpoint {why}; {effect}"
    ]
