"""`megatron-moe train`: check the flags once, then start the ranks that torchrun's options ask for.

    megatron-moe train --nproc-per-node 2 --preset tiny --mock-data --vocab-size 1000 --train-iters 20

Without launch options the run is one rank in this process. Exit status: that of the ranks (`megatron_moe/pretrain.py`);
128 and the number of a signal that killed one.
"""

from __future__ import annotations

from megatron_moe import pretrain
from megatron_moe.config.command_line import started_as
from megatron_moe.config.schema import Run
from megatron_moe.io import launched
from megatron_moe.io.program import note, run_program
from megatron_moe.platform import host
from megatron_moe_tools.launch import options
from megatron_moe_tools.launch.start import start
from megatron_moe_tools.pretrain import main as run_rank
from megatron_moe_tools.pretrain import parse


def main(argv: list[str]) -> int:
    """Launch, or run one rank, and return the exit status."""
    with started_as(launched.LAUNCHER):
        return run_program(launched.LAUNCHER, _main, argv)


def _main(argv: list[str]) -> int:
    launch, flags = options.split(argv)
    if launch is None:
        return run_rank(flags)
    run = pretrain.checked(flags, launch.world_size, launch.nproc_per_node, parse)
    if run is None:
        return 0
    note(f"{launched.LAUNCHER}: starting {launch.world_size} ranks{_of_nodes(launch)}, {_backend(run)} ...")
    return start(launch, flags)


def _of_nodes(launch: options.LaunchOptions) -> str:
    return f" on {launch.nnodes} nodes" if launch.nnodes > 1 else ""


def _backend(run: Run) -> str:
    return run.parallel.distributed_backend or ("nccl" if host.visible_devices() else "gloo")
