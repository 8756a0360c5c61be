"""The table of stages. Loads no torch."""

from typing import NamedTuple


class Plan(NamedTuple):
    """A stage: `function` is module:name here, `seconds` its limit, `unseen` what a dry run does not show."""

    number: int
    name: str
    seconds: int
    function: str
    unseen: str


# The limits add up to less than ten minutes, of which starting processes takes a part.
STAGES = (
    Plan(1, "preflight", 25, "machine:preflight", "driver, card, cuDNN, which kernels torch chooses, clocks, memory"),
    Plan(2, "collectives", 25, "machine:collectives", "NCCL: gloo stands for it; streams; what abort does to a kernel"),
    Plan(3, "operators", 80, "operators:operators", "every CUDA kernel: these are the CPU's results"),
    Plan(4, "layer and tiny model", 80, "layouts:on_device", "differences of CUDA's sums and roundings from the CPU's"),
    Plan(5, "training", 130, "training:training", "half precision as a card multiplies, repeatability, saving"),
    Plan(
        6, "several ranks", 80, "layouts:several_ranks", "kernels under each layout, copies to the CPU, NCCL, overlap"
    ),
    Plan(7, "host syncs and graphs", 45, "speed:waits", "torch's own count of syncs, capture and replay of a graph"),
    Plan(8, "benchmark", 50, "speed:benchmark", "any speed, any memory: its times are those of a CPU at toy sizes"),
    Plan(9, "Transformer Engine", 30, "speed:transformer_engine", "Transformer Engine, which no CPU has"),
    Plan(10, "memcheck", 40, "sanitizer:memcheck", "memory errors in kernels"),
)
DRY_SECONDS = 240
"""Limit of a stage in a dry run, where other programs may want the cores too."""
