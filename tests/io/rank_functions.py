"""What the ranks of `test_local_ranks.py` do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe.config.errors import ConfigError


def act(request: dict[str, Any]) -> Any:
    """Do what a request names: on all ranks, or where it is a failure, on the last one of two."""
    rank, what = dist.get_rank(), request["act"]
    if what == "sum":
        total = torch.tensor(rank)
        dist.all_reduce(total)
        return [rank, dist.get_world_size(), int(total)]
    if what == "where":
        return os.getcwd()
    if what == "refuse":
        raise ConfigError("--flag 3: too many")
    if what == "hang":
        time.sleep(600)
    if rank == 1:
        if what == "raise":
            raise ValueError("a bug")
        if what == "die beside a child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=_pipes())
        print("last words", flush=True)
        os._exit(3)
    return None


def _pipes() -> list[int]:
    """Every descriptor that is a pipe: a child that was forked would hold the one of the answers open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                found.append(int(name))
        except OSError:
            continue
    return found
