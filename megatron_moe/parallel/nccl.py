"""NCCL's settings by environment variables, and its flight recorder: a record of the collectives of this process."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

BEHIND_WATCHDOG = timedelta(minutes=2)
"""How much longer than our watchdog NCCL waits, so that our report comes first: NCCL aborts the process."""
_HEARTBEAT = timedelta(minutes=8)  # torch's own patience with a thread of NCCL's that does not answer
_ENTRIES = 2000
# What is set, and the names that a user may have set it by.
_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def prepare(timeout: timedelta, folder: Path | None) -> None:
    """Set what NCCL reads when its first group is made, but nothing that the user has set.

    TORCH_NCCL_ASYNC_ERROR_HANDLING stays torch's: an error that NCCL finds ends the process at once, where the run
    would otherwise stand still until its timeout.

    Args:
        timeout: of the groups.
        folder: where torch writes the recorder of each rank when its own timeout has passed; None: its own choice.
    """
    values = {
        _RECORDER_SIZE: str(_ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        # The thread that is watched may be stuck in the same call of CUDA as the run, and is ended behind the timeout.
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",): str(int(max(_HEARTBEAT, timeout + BEHIND_WATCHDOG).total_seconds())),
    }
    if folder is not None:
        values[_RECORDER_FILE] = str(folder.resolve() / "nccl_trace_rank_")
    for names, value in values.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def recorded() -> dict[str, Any]:
    """Return the dump of the flight recorder with the members of all groups; see `training/hang_report.py`.

    Where the recorder is off, it holds how many collectives each group has begun.
    """
    dump: dict[str, Any] = json.loads(_dump())
    world = c10d._world
    for group, name in world.pg_names.items():
        config = dump["pg_config"].setdefault(name, {"name": name, "desc": group.group_desc, "ranks": "[]"})
        config["ranks"] = sorted(world.pg_group_ranks[group])
        if not dump.get("entries"):
            dump["pg_status"][name] = {"last_enqueued_collective": _number(group)}
    dump["pg_config"] = {name: config for name, config in dump["pg_config"].items() if config["name"]}
    return dump


def _number(group: Any) -> int:
    return group._get_sequence_number_for_group()


def _dump() -> bytes:
    """Return NCCL's dump as JSON, without frames, which would have to be read from the hanging interpreter."""
    bindings: Any = torch._C._distributed_c10d
    return bindings._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
