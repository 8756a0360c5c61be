"""megatron-moe verify-resume: replay recorded steps from a checkpoint, compare them, report.

A step's `state.json` keeps exact records of the steps before it (`report.records.exact`). From an earlier step of the
same folder the same steps are trained once more, as a run trains them, and every value is compared with its record.
torch is loaded only in the ranks that train.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, rank_that_prints
from megatron_moe.config.schema import Run, build, fields_by_name, flatten, replace
from megatron_moe.data.checks import check_data
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.object_storage import location
from megatron_moe.io.program import run_program, say
from megatron_moe.io.source_version import other_source, source_version
from megatron_moe.report.jsonl import read_steps
from megatron_moe.report.records import exact
from megatron_moe.report.run_info import versions
from megatron_moe_tools import compat
from megatron_moe_tools.launch.local_ranks import LocalRanks, RankFailure

NAME = "megatron-moe verify-resume"

EQUAL, DIFFERENT = 0, 1

MOST_STEPS = 10
"""Largest number of steps that are replayed without --steps."""

EXACT = ("consumed_samples", "global_batch_size", "skipped", "learning_rate_hex", "loss_scale_hex", "data_hash")
"""Values that are equal on every layout."""
TOLERANCES = {"fp32": {"loss_hex": 1e-5, "grad_norm_hex": 1e-4}, "half": {"loss_hex": 1e-3, "grad_norm_hex": 5e-2}}
"""Relative tolerances where sums are added in another order: another layout, device or version, or CUDA without
`--deterministic-mode`."""
_NO_CHANGE = {"train_iters", "eval_iters", "eval_interval", "exit_interval", "num_workers", "data_verify_gb"}
_DRAWING = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s CKPT [--ckpt-step N] [--steps N] [--json FILE] [the run's flags]",
        description="Does a run that resumes from a checkpoint continue like the run that wrote it? Loads an earlier "
        "step, trains the recorded steps after it once more, and compares loss, gradient norm, expert_bias, learning "
        "rate, loss scale and data: to the bit on the layout of the record (of CUDA: with --deterministic-mode), else "
        "within tolerances. Nothing is written to CKPT.",
        epilog="Exit status: 0 all steps agree; 1 one differs, or the replay failed; 2 a mistake in flags or files "
        "(torchrun makes 1 of it). Flags of megatron-moe train, such as --tensor-model-parallel-size 2, change the "
        "recorded run. Without torchrun (torchrun ... -m megatron_moe "
        "verify-resume) the ranks are started here, on the CPU.",
        allow_abbrev=False,
    )
    p.add_argument("checkpoint", metavar="CKPT", help="the folder of --save, or one step in it to begin with")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="begin with this step (default: the newest that can)")
    p.add_argument("--steps", type=int, metavar="N", help="steps to replay (default: all recorded, ten at most)")
    p.add_argument("--ranks", type=int, metavar="N", help="ranks to start (default: as many as made the record)")
    p.add_argument("--metrics-file", metavar="FILE", help="more records: those after the last step, for example")
    p.add_argument("--json", metavar="FILE", help="write the comparison as JSON")
    p.add_argument("--cpu", action="store_true", help="replay a record of a GPU on the CPU, within tolerances")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="a replay that takes longer has hung [s]")
    return p


def main(argv: list[str]) -> int:
    """Replay, compare and report; return the exit status. Under torchrun every rank calls this."""
    return run_program(NAME, _main, argv)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    speaks = rank_that_prints() == 0
    replay = _planned(flags, rest)
    rules.check(replay.run, replay.ranks)
    # Found here, and not by ranks that have loaded torch.
    check_data(replay.run, build_tokenizer(replay.run.data, replay.run.model.vocab_size), deep=False)
    if speaks:
        what = f"step {replay.begin}, {replay.steps} steps after it on {replay.ranks} ranks"
        say(f"{replay.root}: {what}, compared with their records")
    if "WORLD_SIZE" in os.environ:
        records = recorded_here(flatten(replay.run))
    else:
        try:
            records = records_of(replay.run, replay.ranks, flags.timeout)
        except RankFailure as error:
            say(f"the replay failed: {error}")
            return DIFFERENT
    if not speaks:
        return EQUAL
    from megatron_moe import platform
    from megatron_moe.platform import numerics

    # Why bits may differ: layout, device, versions, an order of additions that is not fixed.
    launched, differences = "WORLD_SIZE" in os.environ, [*replay.differences]
    device = "cpu"  # of ranks that were started here
    if launched:
        device = platform.device().type
    if device != replay.device:
        differences.append(f"device: {replay.device} -> {device}")
    deterministic = replay.run.training.deterministic_mode
    if launched and (now := numerics.facts(deterministic)):
        differences += arithmetic_differences(replay.state, now, deterministic)
    differences += version_differences(replay.state, versions())
    findings = compare(replay, records, differences)
    for text in report_lines(replay, findings, differences):
        say(text)
    wrong = any(map(operator.attrgetter("wrong"), findings))
    if flags.json is not None:
        report = {
            "checkpoint": str(replay.root),
            "step": replay.begin,
            "ranks": replay.ranks,
            "to_the_bit": not differences,
            "differences": differences,
            "agrees": not wrong,
            "steps": list(map(dataclasses.asdict, findings)),
        }
        replace_json(Path(flags.json), report)
        say(f"wrote {flags.json}")
    return DIFFERENT if wrong else EQUAL


def _planned(flags: argparse.Namespace, rest: list[str]) -> ResumeReplay:
    for name in ("steps", "ranks"):
        if (number := getattr(flags, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: has to be above 0")
    if not 0 < flags.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"--timeout {flags.timeout:g}: has to be above 0, and finite; the default is 600")
    require_writable("--json", flags.json)
    metrics = None
    if flags.metrics_file is not None:
        metrics = Path(flags.metrics_file)
        if not metrics.is_file():
            raise ConfigError(f"--metrics-file {metrics}: is no file")
    launched, ranks = "WORLD_SIZE" in os.environ, flags.ranks
    if launched:
        if ranks is not None:
            raise ConfigError("--ranks: torchrun has started the ranks already; drop it")
        ranks = launched_world()[1]
    # the run's flags that were typed
    changes, plain, typed = {}, flatten(Run()), set()
    for word in rest:
        name = word.split("=")[0].removeprefix("--").replace("-", "_")
        typed |= {name, name.removeprefix("no_")}
    for name, value in flatten(compat.parse(rest)).items():
        if name in typed or value != plain[name]:
            changes[name] = value
    asked = {"begin": flags.ckpt_step, "steps": flags.steps, "ranks": ranks}
    replay = plan_replay(location(flags.checkpoint), **asked, metrics_file=metrics, changes=changes)
    if replay.device != "cpu" and not launched and not flags.cpu:
        raise ConfigError(
            f"{replay.root}: was trained on {replay.device}; start this under torchrun --nproc-per-node "
            f"{replay.ranks}, or replay it on the CPU, within tolerances, by --cpu"
        )
    return replay


def records_of(run: Run, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Train `run` on `ranks` processes of this machine, on the CPU; return the exact record of every step.

    Raises ConfigError: the run was refused, as pretrain_moe.py would have refused it. RankFailure: a rank failed
    otherwise, or the run took longer than `seconds`; all ranks are ended.
    """
    with LocalRanks(recorded_here, ranks, seconds=seconds) as processes:
        try:
            return processes.call(flatten(run))[0]
        except RankFailure as failure:
            if failure.refusal is not None:
                raise ConfigError(failure.refusal) from failure
            raise


def recorded_here(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Train as the flags say, as one rank of a process group; return rank 0's records, nothing on the others."""
    from megatron_moe.training.run import recorded  # loading torch and the engine takes seconds

    return recorded(build(flags))


# ---- Plan: the step to begin with, and the records to compare with.


@dataclass(frozen=True)
class ResumeReplay:
    """A planned replay: train `run`, which begins after step `begin`, for `steps` steps on `ranks` ranks.

    recorded: iteration -> its exact record, of the steps to replay. state: of the step that the record's run wrote.
    differences: why bits need not be equal; empty where they must be.
    """

    run: Run
    root: Path
    begin: int
    steps: int
    ranks: int
    recorded: dict[int, dict[str, Any]]
    state: dict[str, Any]
    differences: tuple[str, ...]

    @property
    def device(self) -> str:
        """What the record was made on, cpu or cuda."""
        return str(self.state.get("device", "cpu"))


def plan_replay(
    path: Path,
    *,
    begin: int | None = None,
    steps: int | None = None,
    ranks: int | None = None,
    metrics_file: Path | None = None,
    changes: dict[str, Any] | None = None,
) -> ResumeReplay:
    """Choose the step to begin with and the records to compare with, and return the replay.

    path: a folder of checkpoints, or one step in it, which is then the one to begin with. begin: the step to begin
    with; None: the newest that has recorded steps after it. steps: how many; None: all that are recorded, at most
    `MOST_STEPS`. ranks: None: as many as made the record. metrics_file: has more records than the folder's steps.
    changes: flags that differ from the record's run, such as another layout. Raises ConfigError: there is no
    checkpoint, nothing is recorded after the step, or records contradict one another.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: is no folder; give the one that a run named with --save")
    root = path
    if (path / folder.STATE).is_file():
        number = int(path.resolve().name.removeprefix("iter_"))
        if begin not in (None, number):
            raise ConfigError(f"{path} and --ckpt-step {begin} name two steps; give one")
        root, begin = path.resolve().parent, number
    states = {}
    for number in folder.steps(root):  # sound by names, sizes and small files; the replay hashes all of it
        step = folder.step_folder(root, number)
        if manifest.structure_defect(step) is None and folder.small_files_defect(step) is None:
            states[number] = folder.read_json(step / folder.STATE)
    sound = ", ".join(map(str, states))
    if not sound:
        raise ConfigError(f"{root}: holds no complete checkpoint{folder.steps_below(root)}")
    if begin is not None and begin not in states:
        raise ConfigError(f"--ckpt-step {begin}: is no complete step of {root}; complete: {sound}")
    known = _merged(root, states, metrics_file)
    if begin is None:
        begin = max((number for number in states if number + 1 in known), default=None)
    if begin is None:
        raise ConfigError(
            f"{root}: no step has recorded steps after it (steps {sound}); save once more "
            "after some steps, or give the metrics of the steps after the last one with --metrics-file"
        )
    if begin + 1 not in known:
        raise ConfigError(f"{root}: no step after {begin} is recorded; choose an earlier one with --ckpt-step")
    # The next step was written by the run that made the records, which may have had other flags than the one before.
    writer = min((number for number in states if number > begin), default=begin)
    config, last = _of_training(root, writer), begin
    while last + 1 in known:
        if last >= writer > begin:
            later = min((number for number in states if number > last), default=writer)
            other, same = _of_training(root, later), states[writer]["layout"] == states[later]["layout"]
            for name in config.keys() & other.keys() - _NO_CHANGE:
                same = same and config[name] == other[name]
            if not same:
                break
        last += 1
    if steps is not None and steps > last - begin:
        raise ConfigError(f"--steps {steps}: only {last - begin} steps after step {begin} are recorded under one run")
    end = begin + min(last - begin, steps or MOST_STEPS)
    recorded = {iteration: known[iteration] for iteration in range(begin + 1, end + 1)}
    return _replay(root, begin, recorded, config, states[writer], ranks, changes or {})


def _merged(root: Path, states: dict[int, dict[str, Any]], metrics_file: Path | None) -> dict[int, dict[str, Any]]:
    """Return every recorded step, by iteration. Raises ConfigError: two records of one step differ."""
    sources = [(f"step {number}", state.get("records", [])) for number, state in states.items()]
    if metrics_file is not None:
        sources.append((str(metrics_file), map(exact, read_steps(metrics_file))))
    known: dict[int, dict[str, Any]] = {}
    first: dict[int, str] = {}
    for source, records in sources:
        for record in records:
            iteration = record["iteration"]
            earlier = known.setdefault(iteration, record)
            first.setdefault(iteration, source)
            if earlier != record:
                names = ", ".join(name for name in earlier if earlier[name] != record.get(name))
                raise ConfigError(f"{root}: {first[iteration]} and {source} record step {iteration} otherwise: {names}")
    return known


def _of_training(root: Path, number: int) -> dict[str, Any]:
    """Return the known flags of a step's run that a step may depend on."""
    table, found = fields_by_name(), {}
    for name, value in folder.read_json(folder.step_folder(root, number) / folder.CONFIG).items():
        if name in table and table[name][0] not in ("checkpoint", "logging"):
            found[name] = value
    return found


def _replay(
    root: Path,
    begin: int,
    recorded: dict[int, dict[str, Any]],
    plain: dict[str, Any],
    state: dict[str, Any],
    ranks: int | None,
    changes: dict[str, Any],
) -> ResumeReplay:
    recorded_on = state["layout"]["world_size"]
    # A batch size that follows from the number of ranks is that of the ranks that made the record.
    plain["global_batch_size"] = build(plain).derived.global_batch_size(recorded_on)
    run = replace(
        build({**plain, **changes}),
        load=str(root),
        ckpt_step=begin,
        skip_train=False,
        eval_iters=0,
        eval_interval=0,
        exit_interval=begin + len(recorded),
        exit_duration_in_mins=None,
        exit_signal_handler=False,
    )
    world = ranks or recorded_on
    differences, settings = [], flatten(run)
    reordered = world != recorded_on
    for name in sorted(changes):
        if settings[name] != plain.get(name):
            differences.append(f"--{name.replace('_', '-')}: {plain.get(name)} -> {settings[name]}")
            reordered = reordered or name != "deterministic_mode"
    if world != recorded_on:
        differences.append(f"ranks: {recorded_on} -> {world}")
    drawing = [f"--{name.replace('_', '-')} {plain[name]}" for name in _DRAWING if plain.get(name)]
    if drawing and reordered:
        raise ConfigError(
            f"{root}: was trained with {', '.join(drawing)}, which draws other numbers with {'; '.join(differences)}: "
            "no tolerance covers that; replay it as it was recorded"
        )
    return ResumeReplay(run, root, begin, len(recorded), world, recorded, state, tuple(differences))


def version_differences(state: dict[str, Any], now: dict[str, str]) -> list[str]:
    """Return the packages that the records were made with in another version than the installed one, ours first."""
    then, found = state.get("versions", {}), []
    if words := other_source(then):
        found.append(f"another version: {words}")
    for name in sorted(then.keys() & now.keys() - source_version().keys()):
        if then[name] != now[name]:
            found.append(f"{name} {then[name]} -> {now[name]}")
    return found


def arithmetic_differences(state: dict[str, Any], now: dict[str, str], deterministic: bool) -> list[str]:
    """Return why the sums of two runs on CUDA may differ: their order is not fixed, or the card is another one.

    state: of a step, with what `platform.numerics.facts` returned when it was written. now: what it returns here.
    """
    if not deterministic:
        return ["CUDA without --deterministic-mode"]
    then = state.get("arithmetic", {})
    return [f"{name}: {then.get(name, 'unknown')} -> {now[name]}" for name in now if then.get(name) != now[name]]


# ---- Compare.


@dataclass
class ReplayedStep:
    """A replayed step and its record; `wrong` says in words what differs, and is empty where they agree."""

    iteration: int
    recorded: dict[str, Any]
    replayed: dict[str, Any]
    wrong: list[str] = field(default_factory=list)


def compare(replay: ResumeReplay, replayed: Iterable[dict[str, Any]], differences: Iterable[str]) -> list[ReplayedStep]:
    """Compare every recorded step with its replay, to the bit where there is no difference that excuses another."""
    by_iteration = {record["iteration"]: record for record in replayed}
    excused = list(differences)
    tolerances = TOLERANCES["half" if replay.run.precision.bf16 or replay.run.precision.fp16 else "fp32"]
    findings = []
    for iteration, recorded in replay.recorded.items():
        record = by_iteration.get(iteration)
        if record is None:
            findings.append(ReplayedStep(iteration, recorded, {}, ["was not replayed"]))
            continue
        finding = ReplayedStep(iteration, recorded, record)
        findings.append(finding)
        for name, wanted in recorded.items():
            got = record.get(name)
            if name == "iteration" or wanted == got:
                continue
            word = name.removesuffix("_hex").replace("_", " ")
            text = f"{word} {_shown(name, got)}, recorded {_shown(name, wanted)}"
            if not excused or name in EXACT:
                finding.wrong.append(text)
            elif name in tolerances:
                difference = relative_difference(wanted, got)
                if not difference <= tolerances[name]:
                    finding.wrong.append(f"{text}: {difference:.1e} apart, {tolerances[name]:.0e} allowed")
    return findings


def relative_difference(recorded: str | None, replayed: str | None) -> float:
    """Return |a - b| / |a| of two float.hex; 0 where both are the same, also if both are NaN or None."""
    if recorded == replayed:
        return 0.0
    if recorded is None or replayed is None:
        return math.inf
    one, other = float.fromhex(recorded), float.fromhex(replayed)
    if not one or not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / abs(one)


def _shown(name: str, value: object) -> str:
    if name.endswith("_hex") and isinstance(value, str):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def report_lines(replay: ResumeReplay, findings: list[ReplayedStep], differences: list[str]) -> list[str]:
    """Return the comparison as lines of text."""
    lines, bad = [], 0
    for finding in findings:
        bad += bool(finding.wrong)
        recorded, replayed = finding.recorded, finding.replayed
        if not replayed:
            lines.append(f"iteration {finding.iteration}: was not replayed")
            continue
        line = f"iteration {finding.iteration}: loss {float.fromhex(replayed['loss_hex']):.6f}, "
        loss, norm = (relative_difference(recorded[name], replayed[name]) for name in ("loss_hex", "grad_norm_hex"))
        if loss or norm:
            line += f"apart: loss {loss:.1e}, grad norm {norm:.1e}"
        else:
            line += "equal to the bit"
        for name, word in (("expert_bias_hash", "expert_bias"), ("data_hash", "data")):
            if recorded[name] is not None:
                line += f", {word} {'equal' if recorded[name] == replayed[name] else 'OTHER'}"
        lines.append(line)
        for wrong in finding.wrong:
            lines.append(f"  WRONG: {wrong}")
    how = "to the bit"
    if differences:
        how = f"within tolerances, because of {'; '.join(differences)}"
    result = f"{bad} DIFFER" if bad else "all agree"
    return [*lines, f"{len(findings)} steps after step {replay.begin}, compared {how}: {result}"]
