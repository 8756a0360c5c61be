"""Small runs by the flags that users type, in processes that are forked from one with a pretended device."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.ranks import Child, RankParent

FLAGS = (
    "--preset tiny --mock-data --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --eval-iters 0 "
    "--micro-batch-size 1 --global-batch-size 2 --lr-decay-iters 6 --num-layers 2 --moe-layer-freq [0]+[1]*1 "
    "--metrics-file metrics.jsonl"
)


def printed(parent: RankParent, target: str, argument: Any, folder: Path, **environment: str) -> str:
    """Run a function in `folder`, which has to succeed; return what it printed."""
    log = folder / f"printed{len(list(folder.glob('printed*')))}"
    pids = parent.fork([Child(target, argument, str(log), str(folder), environment)])
    assert parent.statuses(pids, 300.0) == [0], log.read_text()
    return log.read_text()


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of all steps so far, by iteration."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line for line in lines if "loss" in line}
