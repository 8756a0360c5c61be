"""Run many wrong commands cheaply: one process imports the programs, and each command is a child forked from it.

    python -m tests.config.mistakes FILE

FILE is JSON: {"folder": ..., "watched": [...], "rows": [{"main": "module:function", "words": [...], "env": {...}}]}.
For each row a line of JSON is printed: status, out, err, whether torch was loaded, and what was changed on the disk.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from megatron_moe_tools import compat

HEAVY = ("torch", "megatron.core", "transformers", "transformer_engine")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def snapshot(folders: list[str]) -> dict[str, int]:
    """Return every path below the folders with the time of its last change."""
    return {str(path): path.lstat().st_mtime_ns for folder in folders for path in Path(folder).rglob("*")}


def _child(row: dict[str, Any], files: dict[str, Path]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(row["env"])
    status: Any = -1
    try:
        module, _, function = row["main"].partition(":")
        status = getattr(importlib.import_module(module), function)(row["words"])
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    files["heavy"].write_text(json.dumps([name for name in HEAVY if name in sys.modules]))
    os._exit(status if isinstance(status, int) and 0 <= status < 256 else 1)


def outcome(row: dict[str, Any], files: dict[str, Path], watched: list[str]) -> dict[str, Any]:
    """Run one row and return what came of it."""
    before = snapshot(watched)
    child = os.fork()
    if child == 0:
        _child(row, files)
    _, status = os.waitpid(child, 0)
    after = snapshot(watched)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "out": files["out"].read_text(),
        "err": files["err"].read_text(),
        "heavy": json.loads(files["heavy"].read_text()),
        "changed": sorted(set(before.items()) ^ set(after.items())),
    }


def main(path: str) -> None:
    """Run the rows of a file and print a line for each."""
    asked = json.loads(Path(path).read_text())
    for module in {row["main"].partition(":")[0] for row in asked["rows"]}:
        importlib.import_module(module)
    assert not [name for name in HEAVY if name in sys.modules], "the programs import torch"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(asked["folder"])
    files = {name: Path(f"{path}.{name}") for name in ("out", "err", "heavy")}
    compat.parser()  # which takes longer to build than most mistakes to find
    gc.collect()
    gc.freeze()  # the children share these pages
    for row in asked["rows"]:
        print(json.dumps(outcome(row, files, [asked["folder"], *asked["watched"]])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
