"""Local steps: what a restart takes of them, on made-up nodes with a folder each, to the bit."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import local_jobs
from tests.checkpoint.checkpoint_steps import flip
from tests.helpers import kills
from tests.helpers.gloo_pool import GlooPool
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


def own_parts(folder: Path, rank: int, step: int) -> list[Path]:
    return sorted(folder.glob(f"node*/local/*/rank_{rank:05d}/iter_{step:07d}/state.bin"))


SPOILT: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "a node": lambda folder: shutil.rmtree(folder / "node1"),
    "both nodes": lambda folder: [shutil.rmtree(folder / node) for node in ("node0", "node1")],
    "a bit": lambda folder: flip(own_parts(folder, 0, 12)[0]),
    "a bit of both copies": lambda folder: [flip(path) for path in own_parts(folder, 1, 12)],
    "another run": lambda folder: shutil.rmtree(folder / "checkpoints"),
}
CASES = [
    ("nothing", 12, "local step 12 of all ranks verified"),
    ("a node", 12, "local step 12 of all ranks verified"),
    ("both nodes", 0, "starting afresh"),
    ("a bit", 12, "rank 0's part on the node of rank 0: state.bin does not hold what was saved"),
    ("a bit of both copies", 9, "local step 12 is passed over: no sound part of rank 1"),
    ("another run", 0, "other runs left local steps"),
]


@pytest.fixture(scope="module")
def killed(rank_parent: RankParent, tmp_path_factory: pytest.TempPathFactory) -> tuple[Nodes, Path, kills.Job]:
    """Two nodes whose ranks were killed after 14 steps, the last local one at 12; and what they should come to."""
    nodes = Nodes(rank_parent, tmp_path_factory.mktemp("local"), "EP2", 1)
    oracle = kills.undisturbed_job(nodes.launcher, nodes.made("whole"), nodes.argv(), 2)
    folder = nodes.made("parts")
    nodes.killed(folder, 14, 12)
    return nodes, folder, oracle


@pytest.mark.parametrize(("spoilt", "resumed", "said"), rows(CASES, test=[CASES[1], CASES[4]]))
def test_a_restart_takes_the_newest_step_that_every_rank_has_somewhere(
    killed: tuple[Nodes, Path, kills.Job], tmp_path: Path, spoilt: str, resumed: int, said: str
) -> None:
    nodes, before, oracle = killed
    folder = Path(shutil.copytree(before, tmp_path / "parts"))
    SPOILT[spoilt](folder)
    (folder / "log.txt").unlink()
    job = kills.undisturbed_job(nodes.launcher, folder, nodes.argv(*SAVING), 2)
    text = (folder / "log.txt").read_text()
    assert said in text
    assert kills.differences(job, oracle, 0) == [] and "CHECKPOINT ERROR" not in text
    assert f"iteration {resumed + 1:2d}/{STEPS}" in text and f"iteration {resumed:2d}/{STEPS}" not in text
    assert not nodes.parts(folder, 15), "a run that has ended needs none"


def test_another_setting_or_layout_takes_the_step_of_load(
    killed: tuple[Nodes, Path, kills.Job], tmp_path: Path
) -> None:
    nodes, before, _ = killed
    folder = Path(shutil.copytree(before, tmp_path / "parts"))
    nodes.launcher.start(nodes.argv(*SAVING, "--lr", "2e-3"), 2, folder, folder / "log.txt")
    assert nodes.launcher.wait(240) == 0, kills.tail(folder)
    text = (folder / "log.txt").read_text()
    assert "it was saved with other settings: lr" in text and "the run goes on from the beginning" in text


@pytest.mark.parametrize("trials", rows([20, 1000], test=[20]))
def test_no_flipped_bit_is_accepted(
    gloo: GlooPool, killed: tuple[Nodes, Path, kills.Job], tmp_path: Path, trials: int
) -> None:
    folder = shutil.copytree(killed[1], tmp_path / "parts")
    found = gloo.run(2, local_jobs.damaged, folder=str(folder), step=12, before=9, trials=trials)
    assert found[0].keys() == {"step 12 taken", "step 9 taken"} == found[1].keys()
    assert sum(found[0].values()) == trials
