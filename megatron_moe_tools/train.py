"""`megatron-moe train`: check the flags once, start the ranks of this node, and say how they ended.

    megatron-moe train --nproc-per-node 2 --preset tiny --mock-data --vocab-size 1000 --train-iters 20

Without launch options the run is one rank in this process. Exit status: that of the ranks (`megatron_moe/pretrain.py`);
128 and the number of a signal that killed one.
"""

from __future__ import annotations

import os

from megatron_moe import pretrain
from megatron_moe.config.command_line import started_as
from megatron_moe.io import launched
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe.platform import host
from megatron_moe_tools.launch.node_ranks import split, start
from megatron_moe_tools.pretrain import main as run_rank
from megatron_moe_tools.pretrain import parse


def main(argv: list[str]) -> int:
    """Launch, or run one rank, and return the exit status."""
    with started_as(launched.LAUNCHER):
        return run_program(launched.LAUNCHER, _main, argv)


def _main(argv: list[str]) -> int:
    launch, flags = split(argv)
    if launch is None:
        return run_rank(flags)
    run = pretrain.checked(flags, launch.world_size, launch.nproc_per_node, parse)
    if run is None:
        return DONE
    if run.logging.dry_run:  # one rank of the job checks for all; other nodes need not be there
        number, here = str(launch.world_size), str(launch.nproc_per_node)
        os.environ.update(RANK="0", WORLD_SIZE=number, LOCAL_RANK="0", LOCAL_WORLD_SIZE=here)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # where no rank will listen
        return run_rank(flags)
    backend = run.parallel.distributed_backend or ("nccl" if host.visible_devices() else "gloo")
    nodes = f" on {launch.nnodes} nodes" if launch.nnodes > 1 else ""
    note(f"{launched.LAUNCHER}: starting {launch.world_size} ranks{nodes}, {backend} ...")
    return start(launch, flags)
