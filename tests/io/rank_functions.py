"""What the ranks of `test_local_ranks.py` do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from megatron_moe.config.errors import ConfigError


def act(request: dict[str, Any]) -> Any:
    """Do what a request names; what kills a rank does so on the last of two."""
    import torch
    import torch.distributed as dist

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
        # The child holds the pipe of the answers open.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=_pipes())
        print("last words", flush=True)
        os._exit(3)
    return None


def _pipes() -> list[int]:
    """Every descriptor that is a pipe, which a child that was forked would hold."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                found.append(int(name))
        except OSError:
            continue
    return found
