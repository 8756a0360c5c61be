"""How often the host waits for the device, on the pretended CUDA machine: docs/internals/gpu_paths.md has the table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent
from tests.helpers.rows import rows

PAGE_ROWS = (ROOT / "docs" / "internals" / "gpu_paths.md").read_text(encoding="utf-8").splitlines()


class Case(NamedTuple):
    """A row of the page's table: its flags, micro-batches on a rank, and its layers, of which the first is dense."""

    flags: str
    micro_batches: int = 4
    layers: int = 2


BF16 = "--bf16 --use-distributed-optimizer"
RECOMPUTE = "--recompute-granularity selective --recompute-modules moe"
BALANCING = (
    "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 0.01 0.01 --moe-z-loss-coeff 0.01"
)
EP2 = f"{BF16} --expert-model-parallel-size 2"
ONE_RANK = {
    "EP 1, bf16, distributed optimizer": Case(BF16),
    "EP 1, bf16, `moe` recomputed, auxiliary losses": Case(f"--bf16 {RECOMPUTE} {BALANCING}"),
    "EP 1, fp16": Case("--fp16 --initial-loss-scale 4096"),
    "EP 1, fp32": Case(""),
    "EP 1, documents apart": Case(f"--bf16 {RECOMPUTE} --reset-attention-mask --reset-position-ids {BALANCING}"),
    "EP 1, capacity": Case("--bf16 --moe-expert-capacity-factor 1.0"),
    "EP 1, `loop` backend": Case("--bf16 --moe-expert-backend loop"),
}
TWO_RANKS = {
    "EP 2": Case(EP2, 2),
    "EP 2, `moe` recomputed": Case(f"{EP2} {RECOMPUTE}", 2),
    "EP 2, `loop` backend": Case(f"{EP2} --moe-expert-backend loop", 2),
    "EP 2, capacity": Case(f"{EP2} --moe-expert-capacity-factor 1.0", 2),
    "EP 2, all-gather": Case(f"{EP2} --moe-token-dispatcher-type allgather", 2),
    "PP 2, first stage": Case(f"{BF16} --pipeline-model-parallel-size 2", layers=4),
    "TP 2, ETP 2": Case(f"{BF16} --tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.fixture(scope="module")
def counting() -> Iterator[Forked]:
    """A process with the pretended CUDA whose waits are counted, which forks ranks."""
    parent = RankParent(("-W", "ignore", "-c", "from tests.platform import host_syncs; host_syncs.serve_ranks()"))
    yield Forked(parent, "tests.platform.host_syncs:write_counts")
    parent.close()


def counted(launcher: Forked, case: Case, world_size: int, folder: Path, iterations: int = 2) -> dict[str, list[int]]:
    """Return the waits of the second step on rank 0, of a run of so many."""
    layers = ["--num-layers", str(case.layers), "--moe-layer-freq", f"[0]+[1]*{case.layers - 1}"]
    length = ["--train-iters", str(iterations)]
    launcher.start([*case.flags.split(), *layers, *length], world_size, folder, folder / "log")
    assert launcher.wait(300) == 0, (folder / "log").read_text()
    return json.loads((folder / "counts.json").read_text())


def require_row(launcher: Forked, what: str, case: Case, world_size: int, folder: Path) -> None:
    """The page has to have the row of these waits."""
    counts = counted(launcher, case, world_size, folder)
    step = [sum(counts[phase][hidden] for phase in ("finalize", "step", "loop")) for hidden in (0, 1)]
    cells = [
        cell(counts["layer"], case.micro_batches),
        cell(counts["micro-batches"], case.micro_batches),
        cell(step),
        cell(counts["logging"]),
    ]
    assert f"| {what} | {' | '.join(cells)} |" in PAGE_ROWS, (folder / "log").read_text()


def cell(counts: list[int], times: int = 1) -> str:
    seen, hidden = (f"{count / times:g}" for count in counts)
    return f"{seen} + {hidden} hidden" if hidden != "0" else seen


@pytest.mark.parametrize(
    "what",
    rows(ONE_RANK, test=["EP 1, bf16, distributed optimizer", "EP 1, documents apart", "EP 1, capacity"]),
)
def test_the_host_waits_as_often_on_one_rank_as_the_page_says(counting, what, tmp_path):
    require_row(counting, what, ONE_RANK[what], 1, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize("what", rows(TWO_RANKS, test=["EP 2", "EP 2, `moe` recomputed"]))
def test_the_host_waits_as_often_with_expert_parallelism_as_the_page_says(counting, what, tmp_path):
    require_row(counting, what, TWO_RANKS[what], 2, tmp_path)


def test_what_watches_the_first_steps_of_a_longer_run_waits_for_nothing_that_is_not_there(counting, tmp_path):
    found = counted(counting, Case(BF16), 1, tmp_path, iterations=10)
    # The copy was queued before what the step reads.
    assert (found["step"], found["loop"]) == ([1, 1], [0, 1])
