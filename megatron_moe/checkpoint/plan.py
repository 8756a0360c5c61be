"""The plan of `--load` and `--save`, made before anything is allocated, and whether the step fits the run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder, origin
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.module_names import frozen, kept_in_fp32
from megatron_moe.config.rotary import ROTARY_FIELDS, change
from megatron_moe.config.schema import Run, fields_by_name, flatten, replace
from megatron_moe.io.object_storage import location
from megatron_moe.io.texts import how_to_download, is_hub_name

_DTYPES = ("bf16", "fp16")
"""Settings that decide the dtypes of weights, as `keep_fp32` does."""
_FIXED = ("model", "moe", "parallel", "precision", "optimizer", "training")
"""Sections whose settings a local step has to share, and of `training` those that end the run, which may change."""
_LENGTHS = ("train_iters", "train_samples", "exit_interval", "exit_duration_in_mins", "exit_signal_handler")
_DEFAULTS = flatten(Run())
_COUNTS = ("iteration", "consumed_samples", "skipped_iterations", "skipped_samples")


@dataclass(frozen=True)
class CheckpointSource:
    """The step a run will start from, checked as far as its small files allow."""

    step: Path
    config: dict[str, Any]
    state: dict[str, Any]
    is_local: bool = False
    """Whether it is this rank's part of a local step (`local.py`)."""

    @property
    def iteration(self) -> int:
        """The step's number."""
        return int(self.state["iteration"])

    @property
    def weights_only(self) -> bool:
        """Whether the step was converted, not trained: it has no optimizer, schedule or data to go on with."""
        imported = self.state.get(origin.FOLDER) is not None or origin.is_of_megatron(self.state)
        imported = imported or folder.MADE in self.state
        return imported and not self.state.get("has_optimizer") and "scheduler" not in self.state


@dataclass(frozen=True)
class CheckpointPlan:
    """The plan of `--load` and `--save`: the step to read, where the run starts, and notes to report."""

    source: CheckpointSource | None
    start_iteration: int
    notes: tuple[str, ...]
    continues: bool = False
    """Whether the run loads from the folder that it saves to."""
    known_bad: Mapping[int, str] = field(default_factory=dict)
    """Steps passed over because their content is damaged, with the reason."""

    @property
    def warnings(self) -> list[str]:
        """The notes for the run's summary: damaged steps, a check left out."""
        return [note for note in self.notes if note.startswith(folder.WARNING)]


def plan(run: Run, known_bad: Mapping[int, str] | None = None) -> CheckpointPlan:
    """Read the folders of `--load` and `--save` and plan the start; allocate nothing and change nothing.

    Names, sizes and the small files are checked here; `load.verified` checks the rest, shared among the ranks.

    Args:
        known_bad: steps whose content was found damaged, with the reason.

    Raises:
        ConfigError: a folder is not what its flag needs, or the checkpoint does not fit the run.
    """
    options = run.checkpoint
    known = dict(known_bad or {})
    source, notes = (None, []) if options.load is None else _find(run, location(options.load), known)
    start = source.state["iteration"] if source is not None and not options.finetune else 0
    if run.optimizer.lr_restart_at and source is None:
        raise ConfigError(
            f"--lr-restart-at {run.optimizer.lr_restart_at}: --load {options.load} holds no checkpoint yet, whose "
            "schedule could end there; leave the flag out for the first start"
        )
    if options.save is None:
        return CheckpointPlan(source, start, tuple(notes), known_bad=known)
    save, continued = location(options.save), None
    if options.load is not None and not options.finetune:
        continued = location(options.load)
    folder.check_save_root(save, loaded_from=continued, start_iteration=start, known_bad=known)
    continues = source is not None and continued is not None and continued.resolve() == save.resolve()
    return CheckpointPlan(source, start, tuple(notes), continues, known)


def _find(run: Run, root: Path, known_bad: Mapping[int, str]) -> tuple[CheckpointSource | None, list[str]]:
    options, verify = run.checkpoint, run.checkpoint.verify_checkpoint
    step, notes = folder.find_step(root, options.ckpt_step, known_bad=known_bad, verify=verify)
    if step is None:
        # A run that goes on after each restart names the folder of its own steps, which is empty at first.
        demands = ["--exit-on-missing-checkpoint"] if options.exit_on_missing_checkpoint else []
        demands += ["--finetune"] if options.finetune else []
        own = options.save is not None and location(options.save).resolve() == root.resolve()
        if demands or not (own or options.load_hf is not None):
            there = "holds no checkpoint" if root.exists() else "does not exist"
            works = "to start afresh, leave out --load, or name this folder in --save, too"
            if is_hub_name(str(root)):
                works = f"a model of the hub is where a run begins, by --load-hf; {how_to_download(str(root))}"
            if run.training.skip_train:
                works = "--skip-train evaluates one that was saved; name its folder"
            elif own:
                works = f"leave out {' and '.join(demands)} to start afresh"
            raise ConfigError(f"--load {root}: {there} ({folder.LATEST} and iter_* folders are expected); {works}")
        start = "starting afresh" if options.load_hf is None else f"starting from {options.load_hf}"
        return None, [*notes, f"{root} holds no checkpoint yet: {start}"]
    if options.load_hf is not None:
        notes.append(f"weights come from {step}, which goes before --load-hf {options.load_hf}")
    config, state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
    iteration, has_optimizer = state.get("iteration"), state.get("has_optimizer")
    counts = {name: state.get(name, 0) for name in _COUNTS}
    wrong = [f"{name} {count!r}" for name, count in counts.items() if type(count) is not int or count < 0]
    if iteration is None or wrong or folder.step_folder(root, iteration) != step or has_optimizer is None:
        said = ", ".join(wrong) or f"iteration {iteration!r} and has_optimizer {has_optimizer!r}"
        raise ConfigError(f"--load {step}: {folder.STATE} says {said}: it is not the state of this step")
    source = CheckpointSource(step, config, state)
    # Keys that the checkpoint does not have, because it is older than they are, are not compared. Without the optimizer
    # (converted, or saved so) it has no fp32 main weights to make weights of other dtypes from.
    current = flatten(run) | schedule_settings(run, source)
    differing = [name for name in architecture_keys() if name in config and config[name] != current[name]]
    if "rope_type" in run.explicit and (options.finetune or source.weights_only):
        positions = config.get("max_position_embeddings") or config.get("seq_length")
        before = replace(run, **{name: config[name] for name in ROTARY_FIELDS if name in config})
        stretched = change(replace(before, max_position_embeddings=positions).model, run.model)
        notes += [] if stretched is None else [stretched]
        differing = [name for name in differing if name not in ROTARY_FIELDS]
    if not has_optimizer:
        differing += other_dtypes(run, config)
    if differing:
        hint = "use the checkpoint's values, which --use-checkpoint-args takes, or another folder"
        if set(differing) <= set(ROTARY_FIELDS):
            hint = "other rotary settings train on from it with --finetune and --rope-type on the command line"
        if origin.is_of_megatron(state) and any(current[name] == _DEFAULTS[name] for name in differing):
            hint = (
                "it is Megatron-LM's; what the command leaves open has the defaults there with --defaults megatron, "
                "and the checkpoint's values with --use-checkpoint-args"
            )
        if all(name in (*_DTYPES, "keep_fp32") for name in differing):
            hint = (
                "weights are never cast silently, and it has no fp32 main weights to make others of: use its dtypes, "
                "or convert them to another with --dtype of megatron-moe convert"
            )
        text = f"--load {step}: the checkpoint does not fit this run; {hint}:"
        for name in differing:
            text += f"\n  --{name.replace('_', '-')}: checkpoint {config[name]}, this run {current[name]}"
        raise ConfigError(text)
    if source.weights_only:
        notes.append(f"{step} was converted: weights alone; optimizer, schedule and random states start fresh")
    elif not (state["has_optimizer"] or options.finetune or options.no_load_optim):
        raise ConfigError(f"--load {step}: was saved without the optimizer; add --no-load-optim or --finetune")
    elif state["has_optimizer"] and not (options.finetune or options.no_load_optim):
        before = config.get("optimizer", "adam")
        if before != run.optimizer.optimizer:
            raise ConfigError(
                f"--load {step}, --optimizer {run.optimizer.optimizer}: the checkpoint has the state of --optimizer "
                f"{before}, which is no state of this one's; use that, or add --no-load-optim, which starts the "
                "optimizer anew, or --finetune"
            )
        check_frozen(run, config, str(step))
    _check_restart(run.optimizer.lr_restart_at, source)
    if not verify:
        notes.append(
            f"{folder.WARNING}{step} is NOT VERIFIED (--no-verify-checkpoint): damage in its files goes unseen"
        )
    changed = []
    for name, (_, setting) in sorted(fields_by_name().items()):
        # Of --train-samples, train_iters follow, and the batches so far.
        follows = name == "train_iters" and run.training.train_samples is not None
        if setting.metadata["report"] and not follows and name in config and config[name] != current[name]:
            changed.append(f"{name}: {config[name]} -> {current[name]}")
    if changed and not (source.weights_only or run.training.skip_train):
        notes.append("settings changed since the checkpoint: " + "; ".join(changed))
    return source, notes


# The learning rate's schedule

_SCHEDULE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "lr_decay_style", "lr_wsd_decay_style"),
    *("lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
)


def schedule_settings(run: Run, source: CheckpointSource) -> dict[str, Any]:
    """Return the settings of the schedule that the checkpoint decides.

    It decides where the schedule began unless `--lr-restart-at` does, and with `--use-checkpoint-opt-param-scheduler`
    all others.

    Raises:
        ConfigError: a flag of the command contradicts them.
    """
    found, saved = dict[str, Any](), source.config
    if source.weights_only or run.checkpoint.finetune or run.training.skip_train:
        return found
    restart = saved.get("lr_restart_at")
    if run.optimizer.lr_restart_at is None and restart:
        found["lr_restart_at"] = restart
    if not run.optimizer.use_checkpoint_opt_param_scheduler:
        return found
    found |= {name: saved[name] for name in _SCHEDULE if name in saved}
    if saved.get("lr_decay_iters") is None and saved.get("lr_decay_samples") is None:  # as long as that run
        found["lr_decay_samples"] = saved.get("train_samples")
        if found["lr_decay_samples"] is None and saved.get("train_iters") is not None:
            found["lr_decay_iters"] = saved["train_iters"] - (restart or 0)
    for name in run.explicit & found.keys():
        if (given := flatten(run)[name]) != found[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} {given}, --use-checkpoint-opt-param-scheduler: {source.step} has "
                f"{found[name]}; leave one of the two out"
            )
    return {**found, "use_checkpoint_opt_param_scheduler": False}  # they are this run's from now on


def _check_restart(restart: int | None, source: CheckpointSource) -> None:
    """Refuse a schedule that is to begin anew at another iteration than the step's.

    Raises:
        ConfigError: naming the iteration that works.
    """
    if source.weights_only and restart:
        raise ConfigError(f"--lr-restart-at {restart}: {source.step} was converted without a schedule; drop the flag")
    begun = source.state.get("scheduler", {}).get("begun", {}).get("iteration", 0)
    if restart and restart not in (begun, source.iteration):
        since = f"after iteration {begun}" if begun else "with the run"
        raise ConfigError(
            f"--lr-restart-at {restart}: {source.step} has a schedule that began {since}, and another begins where a "
            f"step is loaded; use --lr-restart-at {source.iteration}, or leave it out to go on"
        )


# The configuration of the step and that of the run.


def architecture_keys() -> list[str]:
    """Return the configuration keys that a checkpoint and the run that loads it must agree on."""
    return [name for name, field in all_fields().items() if field.is_architecture]


def unlike(run: Run, saved: dict[str, Any]) -> list[str]:
    """Return the settings in which the run of a local step differs from this one, and may not."""
    current = flatten(run)
    names = [name for name, (section, _) in fields_by_name().items() if section in _FIXED]
    return [name for name in names if name not in _LENGTHS and saved.get(name, current[name]) != current[name]]


def other_dtypes(run: Run, saved: dict[str, Any]) -> list[str]:
    """Return the settings by which weights of the run have other dtypes than the checkpoint's.

    Other patterns of `--keep-fp32` for the same modules do not count.
    """
    current = flatten(run)
    differing = [name for name in _DTYPES if name in saved and saved[name] != current[name]]
    if differing or not (run.precision.bf16 or run.precision.fp16) or "keep_fp32" not in saved:
        return differing
    patterns = saved["keep_fp32"]
    before = replace(run, keep_fp32=None if patterns is None else tuple(patterns))
    return [] if kept_in_fp32(run) == kept_in_fp32(before) else ["keep_fp32"]


def check_frozen(run: Run, saved: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose optimizer is one of other parameters, by `--freeze`.

    Raises:
        ConfigError: with the parameters that only one of the two trains.
    """
    patterns = saved.get("freeze", saved.get("freeze_parameters"))  # the flag's name before
    before = frozen(replace(run, freeze=None if patterns is None else tuple(patterns)))
    differing = sorted(before ^ frozen(run))
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        flag = f"--freeze {' '.join(patterns)}" if patterns else "no --freeze"
        raise ConfigError(
            f"--load {where}: the checkpoint has {flag}, and its optimizer is not that of this run, for which "
            f"{', '.join(differing[:3])}{more} differ; use the same patterns, or add --no-load-optim, which starts the "
            "moments anew, or --finetune"
        )
