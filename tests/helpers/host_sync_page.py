"""Write the section "Host synchronisation" of docs/gpu.md: how often the host waits for the device, measured.

    python -m tests.helpers.host_sync_page            measure and write
    python -m tests.helpers.host_sync_page --check    exit 1, with the difference, where the section is not up to date

Each of `CASES` is trained for two steps on the pretended machine of `tests/helpers/host_syncs.py`, and the waits of the
second one are counted on rank 0.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- host synchronisation: written by tests/helpers/host_sync_page.py -->", "<!-- end -->"
MOE_LAYERS = 3
"""MoE layers of the preset `tiny`."""


@dataclass(frozen=True)
class Case:
    """A row of the table: what is trained, on how many ranks, with which flags, in how many micro-batches a rank."""

    what: str
    ranks: int
    flags: str
    micro_batches: int = 4
    layers: int = MOE_LAYERS


Counts = dict[str, list[int]]

BF16 = "--bf16 --use-distributed-optimizer"
RECOMPUTE = "--recompute-granularity selective --recompute-modules moe"
BALANCING = (
    "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 0.01 0.01 --moe-z-loss-coeff 0.01"
)
EP2 = f"{BF16} --expert-model-parallel-size 2"
CASES = (
    Case("EP 1, bf16, distributed optimizer", 1, BF16),
    Case("EP 1, bf16, `moe` recomputed, auxiliary losses", 1, f"--bf16 {RECOMPUTE} {BALANCING}"),
    Case("EP 1, fp16", 1, "--fp16 --initial-loss-scale 4096"),
    Case("EP 1, fp32", 1, ""),
    Case("EP 1, capacity", 1, "--bf16 --moe-expert-capacity-factor 1.0"),
    Case("EP 1, `loop` backend", 1, "--bf16 --moe-expert-backend loop"),
    Case("EP 2", 2, EP2, 2),
    Case("EP 2, `moe` recomputed", 2, f"{EP2} {RECOMPUTE}", 2),
    Case("EP 2, `loop` backend", 2, f"{EP2} --moe-expert-backend loop", 2),
    Case("EP 2, capacity", 2, f"{EP2} --moe-expert-capacity-factor 1.0", 2),
    Case("EP 2, all-gather", 2, f"{EP2} --moe-token-dispatcher-type allgather", 2),
    Case("PP 2, first stage", 2, f"{BF16} --pipeline-model-parallel-size 2", layers=1),
    Case("TP 2, ETP 2", 2, f"{BF16} --tensor-model-parallel-size 2 --sequence-parallel"),
)

TEXT = """## Host synchronisation

How often the host waits for the device, counted where CUDA is pretended (`tests/helpers/host_syncs.py`), in the second
step, on rank 0. "hidden" is an event that is waited for with further work queued on the device. Not verified on a GPU.

| | a MoE layer and micro-batch | rest of a micro-batch | a step | a logged step, further |
|---|---|---|---|---|
{rows}

The waits of a step are: the counts of the routers, before expert_bias moves (finalize_model_grads); the hash of
expert_bias, hidden, on one rank of a stage; the sums that all ranks decide by, before anything changes. fp16 waits once
more where the loss scale changes, and any step where a sum over gradients or state is not finite. Steps that measure
health, compare replicas or save wait for more.

A layer at EP > 1 copies its splits to pinned memory while the rows to send are gathered. With a capacity or ETP these
rows depend on the splits, and a recomputed layer copies them once more. Token counts are on the device, so that a
captured graph of a dropless layer at EP 1 counts at each replay. The limit of 2^24 tokens in one step on one rank is
checked by the host from shapes, and so not at a replay.
"""


def measured(cases: Sequence[Case]) -> dict[str, Counts]:
    """Run the cases, those of one rank in one process; return per case and phase the waits not hidden and hidden."""
    found = _launched([case for case in cases if case.ranks == 1])
    for case in cases:
        if case.ranks > 1:  # ranks meet once
            found |= _launched([case])
    return found


def _launched(cases: Sequence[Case]) -> dict[str, Counts]:
    if not cases:
        return {}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        program = ["-m", "tests.helpers.host_sync_page", "--measure", str(out), str(cases[0].ranks)]
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", *program, *(case.what for case in cases)],
            cwd=folder,
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if not out.exists():
            raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-4000:])
        return json.loads(out.read_text())


def _measure(out: Path, ranks: int, names: Sequence[str]) -> None:
    """Run the cases in this process, which is rank 0; the other ranks are forked from it, with all that is loaded."""
    from tests.helpers.host_syncs import PHASES, counts_of_step, installed

    syncs, found = installed(), {}
    import megatron_moe.training.run  # noqa: F401  the engine with it

    others = _fork_ranks(ranks)
    for case in CASES:
        if case.what not in names:
            continue
        by_phase: Counts = {phase: [0, 0] for phase in PHASES}
        for wait, count in counts_of_step(syncs, case.flags.split()).items():
            by_phase[wait.phase][wait.kind == "hidden"] += count
        found[case.what] = by_phase
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))
    for pid in others:
        os.waitpid(pid, 0)


def _fork_ranks(ranks: int) -> list[int]:
    """Fork all ranks but rank 0, and give each its part of the environment; return those that this process forked."""
    if ranks == 1:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, RANK="0", LOCAL_RANK="0")
    forked = []
    for rank in range(1, ranks):
        if not (pid := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return []
        forked.append(pid)
    return forked


def rows(cases: Sequence[Case] = CASES) -> list[str]:
    """Measure, and return the rows of the table."""
    found = measured(cases)
    return [_row(case, found[case.what]) for case in cases]


def _row(case: Case, counts: Counts) -> str:
    step = [sum(counts[phase][hidden] for phase in ("finalize", "step", "loop")) for hidden in (0, 1)]
    cells = [
        _cell(counts["layer"], case.micro_batches * case.layers),
        _cell(counts["micro-batches"], case.micro_batches),
        _cell(step),
        _cell(counts["logging"]),
    ]
    return f"| {case.what} | {' | '.join(cells)} |"


def _cell(counts: list[int], times: int = 1) -> str:
    seen, hidden = (f"{count / times:g}" for count in counts)
    return f"{seen} + {hidden} hidden" if hidden != "0" else seen


def written(page: str) -> str:
    """Return the section as it is in the page."""
    return page.split(BEGIN + "\n", 1)[1].split(END, 1)[0]


def main(argv: list[str]) -> int:
    """Write or check the section."""
    if argv[:1] == ["--measure"]:
        _measure(Path(argv[1]), int(argv[2]), argv[3:])
        return 0
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"# GPUs\n\n{BEGIN}\n{END}\n"
    now, before = TEXT.format(rows="\n".join(rows())), written(page)
    if argv == ["--check"]:
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), now.splitlines(True), "page", "measured"))
        return int(now != before)
    PAGE.write_text(page.replace(BEGIN + "\n" + before, BEGIN + "\n" + now), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
