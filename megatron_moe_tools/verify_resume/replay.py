"""Plan the replay of recorded steps from a checkpoint, and compare it with the record. This module does without torch.

A step's `state.json` keeps exact records of the steps before it (`report.records.exact`). From an earlier step of the
same folder the same steps are trained once more, as a run trains them, and every value is compared with its record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, fields_by_name, flatten, replace
from megatron_moe.io.source_version import other_source, source_version
from megatron_moe.report.jsonl import read_steps
from megatron_moe.report.records import exact

MOST_STEPS = 10
"""Largest number of steps that are replayed without --steps."""

EXACT = ("consumed_samples", "global_batch_size", "skipped", "learning_rate_hex", "loss_scale_hex", "data_hash")
"""Values that are equal on every layout."""
TOLERANCES = {"fp32": {"loss_hex": 1e-5, "grad_norm_hex": 1e-4}, "half": {"loss_hex": 1e-3, "grad_norm_hex": 5e-2}}
"""Relative tolerances where sums are added in another order: another layout, device or version, or CUDA without
`--deterministic-mode`."""
_KEEP = ("load", "ckpt_step", "verify_checkpoint")
_NO_CHANGE = {"train_iters", "eval_iters", "eval_interval", "exit_interval", "num_workers", "data_verify_gb"}


@dataclass(frozen=True)
class ResumeReplay:
    """A planned replay: train `run`, which begins after step `begin`, for `steps` steps on `ranks` ranks.

    Attributes:
        run: the run to train.
        root: the folder of checkpoints.
        begin: the step that is loaded.
        steps: number of steps.
        ranks: number of ranks.
        recorded: iteration -> its exact record, of the steps to replay.
        device: what the record was made on, cpu or cuda.
        differences: why bits need not be equal; empty where they must be.
        half: whether the run is in half precision.
    """

    run: Run
    root: Path
    begin: int
    steps: int
    ranks: int
    recorded: dict[int, dict[str, Any]]
    device: str
    differences: tuple[str, ...]
    half: bool


@dataclass
class ReplayedStep:
    """A replayed step and its record; `wrong` says in words what differs, and is empty where they agree."""

    iteration: int
    recorded: dict[str, Any]
    replayed: dict[str, Any]
    wrong: list[str] = field(default_factory=list)


def plan_replay(
    path: Path,
    *,
    begin: int | None = None,
    steps: int | None = None,
    ranks: int | None = None,
    metrics_file: Path | None = None,
    changes: dict[str, Any] | None = None,
) -> ResumeReplay:
    """Choose the step to begin with and the records to compare with.

    Args:
        path: a folder of checkpoints, or one step in it, which is then the one to begin with.
        begin: the step to begin with; None: the newest that has recorded steps after it.
        steps: number of steps; None: all that are recorded, at most `MOST_STEPS`.
        ranks: number of ranks; None: as many as made the record.
        metrics_file: a file with more records than those in the folder's steps.
        changes: flags that differ from the record's run, such as another layout.

    Raises:
        ConfigError: there is no checkpoint, nothing is recorded after the step, or records contradict one another.
    """
    root, begin = _root_and_step(path, begin)
    sound = []
    for number in folder.steps(root):  # by names, sizes and small files; the replay hashes all of it
        step = folder.step_folder(root, number)
        if folder.defect(step) is None and folder.small_files_defect(step) is None:
            sound.append(number)
    if not sound:
        raise ConfigError(f"{root}: holds no complete checkpoint{folder.steps_below(root)}")
    if begin is not None and begin not in sound:
        raise ConfigError(f"--ckpt-step {begin}: is no complete step of {root}; complete: {', '.join(map(str, sound))}")
    states = {number: folder.read_json(folder.step_folder(root, number) / folder.STATE) for number in sound}
    known = _merged(root, states, metrics_file)
    if begin is None:
        candidates = [number for number in sound if number + 1 in known]
        if not candidates:
            raise ConfigError(
                f"{root}: no step has recorded steps after it (steps {', '.join(map(str, sound))}); save once more "
                "after some steps, or give the metrics of the steps after the last one with --metrics-file"
            )
        begin = candidates[-1]
    if begin + 1 not in known:
        raise ConfigError(f"{root}: no step after {begin} is recorded; choose an earlier one with --ckpt-step")
    # The next step was written by the run that made the records, which may have had other flags than the one before.
    writer = next((number for number in sound if number > begin), begin)
    config, state = folder.read_json(folder.step_folder(root, writer) / folder.CONFIG), states[writer]
    last = begin
    while last + 1 in known and (writer == begin or last < writer or _same_run(root, writer, last + 1, sound)):
        last += 1
    wanted = min(last - begin, steps if steps is not None else MOST_STEPS)
    if steps is not None and steps > last - begin:
        raise ConfigError(f"--steps {steps}: only {last - begin} steps after step {begin} are recorded under one run")
    recorded = {iteration: known[iteration] for iteration in range(begin + 1, begin + wanted + 1)}
    return _replay(root, begin, recorded, config, state, ranks, changes or {})


def _root_and_step(path: Path, begin: int | None) -> tuple[Path, int | None]:
    if not path.is_dir():
        raise ConfigError(f"{path}: is no folder; give the one that a run named with --save")
    if (path / folder.STATE).is_file():
        number = int(path.resolve().name.removeprefix("iter_"))
        if begin not in (None, number):
            raise ConfigError(f"{path} and --ckpt-step {begin} name two steps; give one")
        return path.resolve().parent, number
    return path, begin


def _merged(root: Path, states: dict[int, dict[str, Any]], metrics_file: Path | None) -> dict[int, dict[str, Any]]:
    """Return every recorded step, by iteration.

    Raises:
        ConfigError: two records of one step differ.
    """
    known: dict[int, tuple[str, dict[str, Any]]] = {}
    sources = [(f"step {number}", state.get("records", [])) for number, state in states.items()]
    if metrics_file is not None:
        sources.append((str(metrics_file), [exact(record) for record in read_steps(metrics_file)]))
    for source, records in sources:
        for record in records:
            first, earlier = known.setdefault(record["iteration"], (source, record))
            if earlier != record:
                names = ", ".join(name for name in earlier if earlier[name] != record.get(name))
                raise ConfigError(
                    f"{root}: {first} and {source} record iteration {record['iteration']} otherwise: {names}"
                )
    return {iteration: record for iteration, (_, record) in known.items()}


def _same_run(root: Path, writer: int, iteration: int, sound: list[int]) -> bool:
    """Return whether the step that recorded `iteration` was written with the flags and on the ranks of `writer`."""
    recorder = next((number for number in sound if number >= iteration), None)
    if recorder is None:
        return True
    one, other = folder.step_folder(root, writer), folder.step_folder(root, recorder)
    if folder.read_json(one / folder.STATE)["layout"] != folder.read_json(other / folder.STATE)["layout"]:
        return False
    first, second = _of_training(folder.read_json(one / folder.CONFIG)), folder.read_json(other / folder.CONFIG)
    return all(first[name] == second[name] for name in first.keys() & second.keys() - _NO_CHANGE)


def _of_training(config: dict[str, Any]) -> dict[str, Any]:
    """Return the known flags that a step may depend on."""
    table = fields_by_name()
    return {
        name: value
        for name, value in config.items()
        if name in table and table[name][0] not in ("checkpoint", "logging")
    }


def _replay(
    root: Path,
    begin: int,
    recorded: dict[int, dict[str, Any]],
    config: dict[str, Any],
    state: dict[str, Any],
    ranks: int | None,
    changes: dict[str, Any],
) -> ResumeReplay:
    plain = _of_training(config)
    recorded_on = state["layout"]["world_size"]
    # A batch size that follows from the number of ranks is that of the ranks that made the record.
    plain["global_batch_size"] = build(plain).derived.global_batch_size(recorded_on)
    run = replace(
        build({**plain, **changes}),
        load=str(root),
        ckpt_step=begin,
        eval_iters=0,
        eval_interval=0,
        exit_interval=begin + len(recorded),
        exit_duration_in_mins=None,
        exit_signal_handler=False,
    )
    world = recorded_on if ranks is None else ranks
    changed = [name for name in sorted(changes) if flatten(run)[name] != plain.get(name)]
    differences = [f"--{name.replace('_', '-')}: {plain.get(name)} -> {flatten(run)[name]}" for name in changed]
    if world != recorded_on:
        differences.append(f"ranks: {recorded_on} -> {world}")
    drawing = [
        f"--{name.replace('_', '-')} {plain[name]}"
        for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
        if plain.get(name)
    ]
    if drawing and (changed not in ([], ["deterministic_mode"]) or world != recorded_on):
        raise ConfigError(
            f"{root}: was trained with {', '.join(drawing)}, which draws other numbers with {'; '.join(differences)}: "
            "no tolerance covers that; replay it as it was recorded"
        )
    half = run.precision.bf16 or run.precision.fp16
    return ResumeReplay(
        run, root, begin, len(recorded), world, recorded, state.get("device", "cpu"), tuple(differences), half
    )


def version_differences(state: dict[str, Any], now: dict[str, str]) -> list[str]:
    """Return the packages that the records were made with in another version than the installed one, ours first."""
    then, own = state.get("versions", {}), source_version()
    others = sorted(then.keys() & now.keys() - own.keys())
    found = [f"{name} {then[name]} -> {now[name]}" for name in others if then[name] != now[name]]
    return [f"another version: {words}", *found] if (words := other_source(then)) else found


def arithmetic_differences(state: dict[str, Any], now: dict[str, str], deterministic: bool) -> list[str]:
    """Return why the sums of two runs on CUDA may differ: their order is not fixed, or the card is another one.

    Args:
        state: a step's, with what `platform.numerics.facts` returned when it was written.
        now: what it returns here.
        deterministic: whether the replay has `--deterministic-mode`.
    """
    if not deterministic:
        return ["CUDA without --deterministic-mode"]
    then = state.get("arithmetic", {})
    return [f"{name}: {then.get(name, 'unknown')} -> {now[name]}" for name in now if then.get(name) != now[name]]


def compare(replay: ResumeReplay, replayed: Iterable[dict[str, Any]], differences: Iterable[str]) -> list[ReplayedStep]:
    """Compare every recorded step with its replay, to the bit where there is no difference that excuses another."""
    by_iteration = {record["iteration"]: record for record in replayed}
    excused = list(differences)
    tolerances = TOLERANCES["half" if replay.half else "fp32"]
    findings = []
    for iteration, recorded in replay.recorded.items():
        record = by_iteration.get(iteration)
        if record is None:
            findings.append(ReplayedStep(iteration, recorded, {}, ["was not replayed"]))
            continue
        wrong = []
        for name in recorded:
            if name == "iteration" or recorded[name] == record.get(name):
                continue
            if not excused or name in EXACT:
                wrong.append(f"{_word(name)} {_shown(name, record.get(name))}, recorded {_shown(name, recorded[name])}")
            elif name in tolerances:
                difference = relative_difference(recorded[name], record[name])
                if not difference <= tolerances[name]:
                    wrong.append(
                        f"{_word(name)} {_shown(name, record[name])}, recorded {_shown(name, recorded[name])}: "
                        f"{difference:.1e} apart, {tolerances[name]:.0e} allowed"
                    )
        findings.append(ReplayedStep(iteration, recorded, record, wrong))
    return findings


def relative_difference(recorded: str | None, replayed: str | None) -> float:
    """Return |a - b| / |a| of two float.hex; 0 where both are the same, also if both are NaN or None."""
    if recorded == replayed:
        return 0.0
    if recorded is None or replayed is None:
        return math.inf
    one, other = float.fromhex(recorded), float.fromhex(replayed)
    difference = abs(one - other) / abs(one) if one else math.inf
    return difference if math.isfinite(difference) else math.inf


def _word(name: str) -> str:
    return name.removesuffix("_hex").replace("_", " ")


def _shown(name: str, value: Any) -> str:
    if name.endswith("_hex") and isinstance(value, str):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)
