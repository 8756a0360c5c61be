"""Local steps: what a restart takes of them, on made-up nodes with a folder each, to the bit."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import local_jobs
from tests.helpers import kills
from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows

SAVING = ["--save-interval", "20", "--local-save", "local", "--local-save-interval", "3"]
STEPS = 16


class Nodes:
    """A job on nodes of `per_node` ranks."""

    def __init__(self, parent: RankParent, folder: Path, layout: str, per_node: int) -> None:
        self.launcher = Forked(parent, "tests.checkpoint.local_jobs:main")
        self.folder, self.per_node = folder, per_node
        self.world, self.flags = kills.LAYOUTS[layout]

    def argv(self, *more: str) -> list[str]:
        return kills.flags(STEPS, *self.flags, *more, eval_interval=100)

    def made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        (folder / local_jobs.PER_NODE).write_text(str(self.per_node))
        return folder

    def killed(self, folder: Path, after: int, newest: int) -> None:
        """Run until so many steps are done and the newest local step has all its copies; kill all ranks then."""
        (folder / local_jobs.PAUSE).write_text(str(after))
        self.launcher.start(self.argv(*SAVING), self.world, folder, folder / "log.txt")
        deadline = time.monotonic() + 240
        while len(self.parts(folder, newest)) < 2 * self.world and self.launcher.wait(0.05) is None:
            assert time.monotonic() < deadline, kills.tail(folder)
        assert kills.until_lines(self.launcher, folder / "metrics.jsonl", after) is None, kills.tail(folder)
        self.launcher.kill(None)
        (folder / local_jobs.PAUSE).unlink()

    def parts(self, folder: Path, step: int) -> list[Path]:
        return sorted(folder.glob(f"node*/local/*/rank_*/iter_{step:07d}"))


def flip(path: Path, at: int = 100, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def lost_node(folder: Path, step: int) -> None:
    shutil.rmtree(folder / "node1")


def damaged(folder: Path, step: int) -> None:
    flip(folder / "node0" / "local" / token(folder) / "rank_00000" / f"iter_{step:07d}" / "state.bin")


def damaged_twice(folder: Path, step: int) -> None:
    for path in folder.glob(f"node*/local/*/rank_00001/iter_{step:07d}/state.bin"):
        flip(path)


def nothing_left(folder: Path, step: int) -> None:
    shutil.rmtree(folder / "node0")
    shutil.rmtree(folder / "node1")


def token(folder: Path) -> str:
    return (folder / "checkpoints" / ".local_steps").read_text().strip()


@pytest.mark.parametrize(
    ("spoil", "resumed", "said"),
    [
        (lambda folder, step: None, 12, "local step 12 of all ranks verified"),
        (lost_node, 12, "local step 12 of all ranks verified"),
        (damaged, 12, "rank 0's part on the node of rank 0: state.bin does not hold what was saved"),
        (damaged_twice, 9, "local step 12 is passed over: no sound part of rank 1"),
        (nothing_left, 0, "starting afresh"),
    ],
)
def test_a_restart_takes_the_newest_step_that_every_rank_has_somewhere(
    rank_parent: RankParent, tmp_path: Path, spoil: Callable[[Path, int], None], resumed: int, said: str
) -> None:
    nodes = Nodes(rank_parent, tmp_path, "EP2", 1)
    oracle = kills.undisturbed_job(nodes.launcher, nodes.made("whole"), nodes.argv(), 2)
    folder = nodes.made("parts")
    nodes.killed(folder, 14, 12)
    spoil(folder, 12)
    log = folder / "log.txt"
    before = len(log.read_text())
    job = kills.undisturbed_job(nodes.launcher, folder, nodes.argv(*SAVING), 2)
    text = log.read_text()[before:]
    assert said in text
    assert kills.differences(job, oracle, 0) == []
    assert f"iteration {resumed + 1:2d}/{STEPS}" in text and f"iteration {resumed:2d}/{STEPS}" not in text
    assert not nodes.parts(folder, 15), "a run that has ended needs none"


@pytest.mark.parametrize("trials", rows([20, 1000], test=[20]))
def test_no_flipped_bit_is_accepted(gloo, rank_parent: RankParent, tmp_path: Path, trials: int) -> None:
    nodes = Nodes(rank_parent, tmp_path, "EP2", 1)
    folder = nodes.made("parts")
    nodes.killed(folder, 14, 12)
    found = gloo.run(2, local_jobs.damaged, folder=str(folder), step=12, before=9, trials=trials)
    assert found[0].keys() == {"step 12 taken", "step 9 taken"} == found[1].keys()
    assert sum(found[0].values()) == trials
