"""The flags of tools/verify_resume.py, one verification in order, and its exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from megatron_moe.apps.verify_resume.replay import (
    ReplayedStep,
    ResumeReplay,
    compare,
    plan_replay,
    relative_difference,
    version_differences,
)
from megatron_moe.checkpoint import folder
from megatron_moe.config import cli, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.local_ranks import LocalRanks, RankFailure
from megatron_moe.io.program import run_program, say
from megatron_moe.report.summary import versions

EQUAL, DIFFERENT = 0, 1


def parser() -> argparse.ArgumentParser:
    """What is verified; all other flags are those of pretrain_moe.py."""
    p = argparse.ArgumentParser(
        prog="verify_resume.py",
        usage="[torchrun ...] verify_resume.py CKPT [--ckpt-step N] [--steps N] [--json FILE] [the run's flags]",
        description="Does a checkpoint go on as the run went on that wrote it? Loads an earlier step, trains the "
        "recorded steps behind it once more, and compares loss, gradient norm, expert_bias, learning rate, loss scale "
        "and data: to the bit on the layout of the record, else within tolerances. Nothing is written to CKPT.",
        epilog="Exit status: 0 all steps agree; 1 one differs, or the replay failed; 2 a mistake in flags or files "
        "(torchrun makes 1 of it). Flags of pretrain_moe.py, such as --tensor-model-parallel-size 2, change the "
        "recorded run. Without torchrun the ranks are started here, on the CPU.",
        allow_abbrev=False,
    )
    p.add_argument("checkpoint", metavar="CKPT", help="the folder of --save, or one step in it to begin with")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="begin with this step (default: the newest that can)")
    p.add_argument("--steps", type=int, metavar="N", help="steps to replay (default: all recorded, ten at most)")
    p.add_argument("--ranks", type=int, metavar="N", help="ranks to start (default: as many as made the record)")
    p.add_argument("--metrics-file", metavar="FILE", help="more records: those behind the last step, for example")
    p.add_argument("--json", metavar="FILE", help="write the comparison as JSON")
    p.add_argument("--cpu", action="store_true", help="replay a record of a GPU on the CPU, within tolerances")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="a replay that takes longer has hung [s]")
    return p


def main(argv: list[str]) -> int:
    """Replay, compare, tell. Returns the exit code; under torchrun every rank calls this."""
    return run_program("verify_resume.py", _main, argv, rank=_rank())


def _main(argv: list[str]) -> int:
    words, rest = parser().parse_known_args(argv)
    speaks = _rank() == 0
    replay = _planned(words, rest)
    rules.check(replay.run, replay.ranks)
    if speaks:
        say(
            f"{replay.root}: step {replay.begin}, {replay.steps} steps behind it on {replay.ranks} ranks, compared "
            f"with their records"
        )
    try:
        records = _records(replay, words.timeout)
    except RankFailure as error:
        say(f"the replay failed: {error}")
        return DIFFERENT
    if not speaks:
        return EQUAL
    differences = _differences(replay)
    findings = compare(replay, records, differences)
    for text in told(replay, findings, differences):
        say(text)
    if words.json is not None:
        replace_json(Path(words.json), as_dict(replay, findings, differences))
        say(f"wrote {words.json}")
    return DIFFERENT if any(finding.wrong for finding in findings) else EQUAL


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _planned(words: argparse.Namespace, rest: list[str]) -> ResumeReplay:
    for name in ("steps", "ranks"):
        if (number := getattr(words, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: has to be above 0")
    require_writable("--json", words.json)
    metrics = None if words.metrics_file is None else Path(words.metrics_file)
    if metrics is not None and not metrics.is_file():
        raise ConfigError(f"--metrics-file {metrics}: is no file")
    launched = os.environ.get("WORLD_SIZE")
    if launched is not None and words.ranks is not None:
        raise ConfigError("--ranks: torchrun has started the ranks already; drop it")
    replay = plan_replay(
        Path(words.checkpoint),
        begin=words.ckpt_step,
        steps=words.steps,
        ranks=words.ranks if launched is None else int(launched),
        metrics_file=metrics,
        changes=_given(rest),
    )
    if replay.device != "cpu" and launched is None and not words.cpu:
        raise ConfigError(
            f"{replay.root}: was trained on {replay.device}; start this under torchrun --nproc-per-node "
            f"{replay.ranks}, or replay it on the CPU, within tolerances, by --cpu"
        )
    return replay


def _given(rest: list[str]) -> dict[str, Any]:
    """The flags of pretrain_moe.py that were typed: name -> value."""
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
    """All that excuses other bits: the layout, the device, the versions."""
    from megatron_moe import platform

    device = "cpu" if "WORLD_SIZE" not in os.environ else platform.device().type
    found = [*replay.differences]
    if device != replay.device:
        found.append(f"device: {replay.device} -> {device}")
    writer = min((n for n in folder.steps(replay.root) if n > replay.begin), default=replay.begin)
    state = folder.read_json(folder.step_folder(replay.root, writer) / folder.STATE)
    return [*found, *version_differences(state, versions())]


def told(replay: ResumeReplay, findings: list[ReplayedStep], differences: list[str]) -> list[str]:
    """The comparison in lines."""
    lines = []
    for finding in findings:
        if not finding.replayed:
            lines.append(f"iteration {finding.iteration}: was not replayed")
            continue
        loss = float.fromhex(finding.replayed["loss_hex"])
        apart = [relative_difference(finding.recorded[name], finding.replayed[name]) for name in _JUDGED]
        bits = (
            "equal to the bit"
            if not any(apart)
            else "apart: "
            + ", ".join(
                f"{name.removesuffix('_hex').replace('_', ' ')} {value:.1e}" for name, value in zip(_JUDGED, apart)
            )
        )
        bias = _said(finding, "expert_bias_hash", "expert_bias")
        lines.append(
            f"iteration {finding.iteration}: loss {loss:.6f}, {bits}{bias}{_said(finding, 'data_hash', 'data')}"
        )
        lines += [f"  WRONG: {wrong}" for wrong in finding.wrong]
    bad = sum(bool(finding.wrong) for finding in findings)
    how = "to the bit" if not differences else f"within tolerances, because of {'; '.join(differences)}"
    verdict = "all agree" if not bad else f"{bad} DIFFER"
    return [*lines, f"{len(findings)} steps behind step {replay.begin}, compared {how}: {verdict}"]


_JUDGED = ("loss_hex", "grad_norm_hex")


def _said(finding: ReplayedStep, name: str, word: str) -> str:
    if finding.recorded[name] is None:
        return ""
    return f", {word} {'equal' if finding.recorded[name] == finding.replayed[name] else 'OTHER'}"


def as_dict(replay: ResumeReplay, findings: list[ReplayedStep], differences: list[str]) -> dict[str, Any]:
    """The comparison as plain values."""
    return {
        "checkpoint": str(replay.root),
        "step": replay.begin,
        "ranks": replay.ranks,
        "to_the_bit": not differences,
        "differences": differences,
        "agrees": not any(finding.wrong for finding in findings),
        "steps": [dataclasses.asdict(finding) for finding in findings],
    }
