"""The command line of tools/verify_resume.py: replay recorded steps, compare them, report."""

from __future__ import annotations

import argparse
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder
from megatron_moe.config import cli, rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, program_name, rank_that_prints
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.checks import check_data
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import run_program, say
from megatron_moe.report.run_info import versions
from megatron_moe_tools.launch.local_ranks import LocalRanks, RankFailure
from megatron_moe_tools.verify_resume.replay import (
    ReplayedStep,
    ResumeReplay,
    arithmetic_differences,
    compare,
    plan_replay,
    relative_difference,
    version_differences,
)

SCRIPT = "verify_resume.py"

EQUAL, DIFFERENT = 0, 1
_COMPARED = ("loss_hex", "grad_norm_hex")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=program_name(SCRIPT),
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
    return run_program(program_name(SCRIPT), _main, argv)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    speaks = _rank() == 0
    replay = _planned(flags, rest)
    rules.check(replay.run, replay.ranks)
    # Found here, and not by ranks that have loaded torch.
    check_data(replay.run, build_tokenizer(replay.run.data, replay.run.model.vocab_size), deep=False)
    if speaks:
        say(
            f"{replay.root}: step {replay.begin}, {replay.steps} steps after it on {replay.ranks} ranks, compared "
            f"with their records"
        )
    try:
        records = _records(replay, flags.timeout)
    except RankFailure as error:
        say(f"the replay failed: {error}")
        return DIFFERENT
    if not speaks:
        return EQUAL
    differences = _differences(replay)
    findings = compare(replay, records, differences)
    for text in report_lines(replay, findings, differences):
        say(text)
    if flags.json is not None:
        replace_json(Path(flags.json), as_dict(replay, findings, differences))
        say(f"wrote {flags.json}")
    return DIFFERENT if any(finding.wrong for finding in findings) else EQUAL


def _rank() -> int:
    return rank_that_prints()


def _planned(flags: argparse.Namespace, rest: list[str]) -> ResumeReplay:
    for name in ("steps", "ranks"):
        if (number := getattr(flags, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: has to be above 0")
    if not 0 < flags.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"--timeout {flags.timeout:g}: has to be above 0, and finite; the default is 600")
    require_writable("--json", flags.json)
    metrics = None if flags.metrics_file is None else Path(flags.metrics_file)
    if metrics is not None and not metrics.is_file():
        raise ConfigError(f"--metrics-file {metrics}: is no file")
    launched = launched_world()[1] if "WORLD_SIZE" in os.environ else None
    if launched is not None and flags.ranks is not None:
        raise ConfigError("--ranks: torchrun has started the ranks already; drop it")
    replay = plan_replay(
        Path(flags.checkpoint),
        begin=flags.ckpt_step,
        steps=flags.steps,
        ranks=flags.ranks if launched is None else launched,
        metrics_file=metrics,
        changes=_given(rest),
    )
    if replay.device != "cpu" and launched is None and not flags.cpu:
        raise ConfigError(
            f"{replay.root}: was trained on {replay.device}; start this under torchrun --nproc-per-node "
            f"{replay.ranks}, or replay it on the CPU, within tolerances, by --cpu"
        )
    return replay


def _given(rest: list[str]) -> dict[str, Any]:
    """Return the flags of pretrain_moe.py that were typed, name -> value."""
    run, plain = flatten(cli.parse(rest)), flatten(Run())
    typed = {word.split("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_") for word in rest}
    typed |= {word.split("=")[0].removeprefix("--").replace("-", "_") for word in rest}
    return {name: value for name, value in run.items() if name in typed or value != plain[name]}


def _records(replay: ResumeReplay, seconds: float) -> list[dict[str, Any]]:
    if "WORLD_SIZE" not in os.environ:
        return records_of(replay.run, replay.ranks, seconds)
    return recorded_here(flatten(replay.run))


def records_of(run: Run, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Train `run` on `ranks` processes of this machine, without a GPU; return the exact record of every step.

    Raises:
        ConfigError: the run was refused, as pretrain_moe.py would have refused it.
        RankFailure: a rank failed otherwise, or the run took longer than `seconds`; all ranks are ended.
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


def _differences(replay: ResumeReplay) -> list[str]:
    """Return the reasons why bits may differ: layout, device, versions, an order of additions that is not fixed."""
    from megatron_moe import platform
    from megatron_moe.platform import numerics

    launched = "WORLD_SIZE" in os.environ  # otherwise the ranks were started here, on the CPU
    device = platform.device().type if launched else "cpu"
    found = [*replay.differences]
    if device != replay.device:
        found.append(f"device: {replay.device} -> {device}")
    writer = min((n for n in folder.steps(replay.root) if n > replay.begin), default=replay.begin)
    state = folder.read_json(folder.step_folder(replay.root, writer) / folder.STATE)
    deterministic = replay.run.training.deterministic_mode
    if launched and (now := numerics.facts(deterministic)):
        found += arithmetic_differences(state, now, deterministic)
    return [*found, *version_differences(state, versions())]


def report_lines(replay: ResumeReplay, findings: list[ReplayedStep], differences: list[str]) -> list[str]:
    """Return the comparison as lines of text."""
    lines = []
    for finding in findings:
        if not finding.replayed:
            lines.append(f"iteration {finding.iteration}: was not replayed")
            continue
        loss = float.fromhex(finding.replayed["loss_hex"])
        apart = [relative_difference(finding.recorded[name], finding.replayed[name]) for name in _COMPARED]
        if any(apart):
            names = [name.removesuffix("_hex").replace("_", " ") for name in _COMPARED]
            bits = "apart: " + ", ".join(f"{name} {value:.1e}" for name, value in zip(names, apart))
        else:
            bits = "equal to the bit"
        bias = _equality(finding, "expert_bias_hash", "expert_bias")
        lines.append(
            f"iteration {finding.iteration}: loss {loss:.6f}, {bits}{bias}{_equality(finding, 'data_hash', 'data')}"
        )
        lines += [f"  WRONG: {wrong}" for wrong in finding.wrong]
    bad = sum(bool(finding.wrong) for finding in findings)
    how = "to the bit" if not differences else f"within tolerances, because of {'; '.join(differences)}"
    result = "all agree" if not bad else f"{bad} DIFFER"
    return [*lines, f"{len(findings)} steps after step {replay.begin}, compared {how}: {result}"]


def _equality(finding: ReplayedStep, name: str, word: str) -> str:
    if finding.recorded[name] is None:
        return ""
    return f", {word} {'equal' if finding.recorded[name] == finding.replayed[name] else 'OTHER'}"


def as_dict(replay: ResumeReplay, findings: list[ReplayedStep], differences: list[str]) -> dict[str, Any]:
    """Return the comparison as plain values."""
    return {
        "checkpoint": str(replay.root),
        "step": replay.begin,
        "ranks": replay.ranks,
        "to_the_bit": not differences,
        "differences": differences,
        "agrees": not any(finding.wrong for finding in findings),
        "steps": [dataclasses.asdict(finding) for finding in findings],
    }
