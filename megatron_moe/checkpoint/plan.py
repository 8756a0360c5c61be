"""Decide what `--load` and `--save` come to before anything is allocated. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import compare, folder
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run


@dataclass(frozen=True)
class Source:
    """The step a run will start from, checked as far as its small files allow."""

    step: Path
    config: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What `--load` and `--save` come to: the step to read, where the run starts, what to tell about it."""

    source: Source | None
    start_iteration: int
    notes: tuple[str, ...]
    continues: bool = False
    """The run goes on in the very folder it saves to."""


def plan(run: Run) -> Plan:
    """Look at the folders of `--load` and `--save`; allocate nothing and change nothing.

    Raises:
        ConfigError: a folder is not what its flag needs, or the checkpoint does not fit the run.
    """
    options = run.checkpoint
    source, notes = (None, []) if options.load is None else _find(run, Path(options.load))
    start = source.state["iteration"] if source is not None and not options.finetune else 0
    if options.save is None:
        return Plan(source, start, tuple(notes))
    save, continued = Path(options.save), None
    if options.load is not None and not options.finetune:
        continued = Path(options.load)
    folder.check_save_root(save, loaded_from=continued, start_iteration=start)
    continues = source is not None and continued is not None and continued.resolve() == save.resolve()
    return Plan(source, start, tuple(notes), continues)


def _find(run: Run, root: Path) -> tuple[Source | None, list[str]]:
    step, notes = folder.find_step(root, run.checkpoint.ckpt_step)
    if step is None:
        if run.checkpoint.exit_on_missing_checkpoint or run.checkpoint.finetune:
            raise ConfigError(
                f"--load {root}: holds no complete checkpoint ({folder.LATEST} and iter_* folders were expected); "
                "leave out --exit-on-missing-checkpoint or --finetune to start afresh"
            )
        return None, [*notes, f"{root} holds no checkpoint yet: starting afresh"]
    config, state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
    compare.check_matches(run, config, str(step))
    if not (state["has_optimizer"] or run.checkpoint.finetune or run.checkpoint.no_load_optim):
        raise ConfigError(f"--load {step}: was saved without the optimizer; add --no-load-optim or --finetune")
    changed = compare.changed_settings(run, config)
    if changed:
        notes.append("settings changed since the checkpoint: " + "; ".join(changed))
    return Source(step, config, state), notes
