"""Jobs with local steps, whose ranks are spread over made-up nodes: each node has its own working folder."""

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent

PER_NODE, PAUSE = "RANKS_PER_NODE", "PAUSE_AFTER"
SHARED = ("checkpoints", "metrics.jsonl")


class NodesThatFail(Forked):
    """Ranks on nodes of `per_node` ranks. A kill ends all of them and takes what 0 to 2 nodes had, or one and the next.

    lost: for each kill, the nodes whose folders are gone since the last start that made a step.
    """

    def __init__(self, parent: RankParent, per_node: int, draw: random.Random) -> None:
        super().__init__(parent, "tests.checkpoint.local_jobs:main")
        self._per_node, self._draw, self._folder, self._nodes = per_node, draw, Path(), 0
        self.lost: list[set[int]] = []

    def start(self, argv: list[str], world_size: int, folder: Path, log: Path) -> None:
        if folder != self._folder:
            self.lost = []
        self._folder, self._nodes = folder, world_size // self._per_node
        (folder / PER_NODE).write_text(str(self._per_node))
        super().start(argv, world_size, folder, log)

    def kill(self, rank: int | None) -> None:
        super().kill(None)
        first, count = self._draw.randrange(self._nodes), self._draw.choice([0, 1, 1, 2])
        nodes = {first, (first + 1) % self._nodes} if count == 2 else set(range(first, first + count))
        for node in nodes:
            shutil.rmtree(self._folder / f"node{node}", ignore_errors=True)
        self.lost.append(nodes)

    def keeps_all(self, lost: set[int]) -> bool:
        """Whether each rank's state is still somewhere: on its node, or on the next."""
        return not any({node, (node + 1) % self._nodes} <= lost for node in range(self._nodes))


def enter(rank: int) -> Path:
    """Go to the folder of a rank's node; return the one above, which all nodes share."""
    shared = Path.cwd()
    node = shared / f"node{rank // int((shared / PER_NODE).read_text())}"
    node.mkdir(exist_ok=True)
    os.chdir(node)
    return shared


def main(argv: list[str]) -> int:
    """Run `pretrain_moe.main` in this rank's node; PAUSE_AFTER has the step after which it waits to be killed."""
    import pretrain_moe
    from megatron_moe.training.trainer import Trainer

    shared, tell = enter(int(os.environ["RANK"])), Trainer.at_step
    pause = int((shared / PAUSE).read_text()) if (shared / PAUSE).exists() else None

    def paused(self: Trainer, mark: str) -> None:
        if self.progress.iteration == pause:
            time.sleep(1000)
        tell(self, mark)

    Trainer.at_step = paused  # type: ignore[method-assign]
    return pretrain_moe.main([str(shared / word) if word in SHARED else word for word in argv])


def damaged(folder: str, step: int, before: int, trials: int) -> dict[str, int]:
    """Flip bits of a job's local step, on one node or on both, and let the ranks take a step; runs on every rank.

    Returns:
        How often each step was taken, and how often one was whose files are not what was saved.
    """
    import torch.distributed as dist

    from megatron_moe.checkpoint import local
    from megatron_moe.checkpoint.folder import CONFIG, step_folder
    from megatron_moe.checkpoint.plan import CheckpointPlan
    from megatron_moe.config.schema import build
    from megatron_moe.parallel import groups
    from tests.checkpoint import damage

    os.chdir(folder)
    rank = dist.get_rank()
    shared = enter(rank)
    parts = sorted(shared.glob("node*/local/*/rank_*/iter_*"))
    sound = {part: damage.content(part) for part in parts}
    run = build(local.folder.read_json(parts[0] / CONFIG))
    groups.initialize(run)
    nodes, _ = local.meet(run)
    draw, found = random.Random(5), Counter[str]()
    for _ in range(trials):
        # Of one rank's parts of a step one is damaged, or both.
        of_rank = [part for part in parts if part.name == f"iter_{step:07d}" and part.parent.name == "rank_00001"]
        chosen = draw.sample(of_rank, draw.choice([1, 1, 2]))
        for part in chosen:
            (one,) = damage.flips(sound[part], 1, draw)
            if rank == 0:
                damage.write(part, one.files)
        dist.barrier()
        source = local.newest(run, CheckpointPlan(None, 0, ()), nodes, lambda _: None).source
        assert source is not None
        found[f"step {source.iteration} taken"] += 1
        if source.iteration != (before if len(chosen) == 2 else step):
            found["another step than the newest sound one"] += 1
        own = step_folder(nodes.root(rank), source.iteration).resolve()
        if damage.content(own) != sound[own]:
            found["damage accepted"] += 1
        dist.barrier()
        for part in of_rank if rank == 0 else ():
            damage.write(part, dict[str, Any](sound[part]))
        dist.barrier()
    return dict(found)
