"""Verify on this machine's GPU what no CPU can show: `python -m tests.gpu [--dry] [--only N,N] [--out FOLDER]`.

Ten stages, each in a process of its own with a time limit. `FOLDER`/report.json is written after every stage.
Exit status: 0 if no stage failed, 1 if one did, 2 for a mistake in the flags. With --dry every
stage runs on the CPU with the device imagined (`tests/helpers/cuda_on_cpu.py`), and says what that does not show.
"""

import argparse
import os
import sys
from pathlib import Path

# Before torch: in a dry run all processes share few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(argv: list[str]) -> int:
    from tests.gpu.stages import STAGES

    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="imagine the device, on the CPU")
    parser.add_argument("--only", metavar="N,N", default="", help="only these stages")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="default: runs/gpu")
    flags = parser.parse_args(argv)
    numbers = [int(n) for n in flags.only.split(",") if n] or [one.number for one in STAGES]
    unknown = sorted(set(numbers) - {one.number for one in STAGES})
    if unknown:
        parser.error(f"--only {flags.only}: there are stages 1 to {len(STAGES)}")
    if flags.dry:
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device here; --dry (make gpu DRY=1) imagines one")
    from tests.gpu.runner import run

    chosen = [one for one in STAGES if one.number in numbers]
    return run(chosen, flags.out.resolve(), flags.dry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
