"""What the ranks of `test_local_ranks.py` do."""

import os
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
        if os.fork() == 0:
            time.sleep(600)  # the child holds the pipe of the answers open
            os._exit(0)
        print("last words", flush=True)
        os._exit(3)
    return None
