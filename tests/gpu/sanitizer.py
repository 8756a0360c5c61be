"""Stage 10: compute-sanitizer's memcheck over the operators of stage 3, at small sizes.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer FOLDER

is what it runs: the layer's kernels in Triton, and torch's grouped products, called as the package calls them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu import kernels, operators
from tests.gpu.processes import ROOT
from tests.gpu.stage import Stage

FOUND = 66
"""Exit status that tells compute-sanitizer's findings from the program's own."""


def memcheck(stage: Stage) -> None:
    tool = shutil.which("compute-sanitizer")
    if stage.dry:
        with stage.attempt("the program that is sanitized"):
            run_operators(stage)
            stage.holds("the program that is sanitized runs", True)
    if stage.dry or tool is None:
        stage.impossible("memcheck", "no device" if stage.dry else "compute-sanitizer is not on PATH")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.gpu.sanitizer", str(stage.folder)]
    stage.doing("compute-sanitizer --tool memcheck")
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(5.0, stage.left - 3))
    except subprocess.TimeoutExpired:
        stage.impossible("memcheck", "did not end in this stage's time")
        return
    errors = "\n".join(line for line in ran.stdout.splitlines() if line.startswith("========="))[:3000]
    stage.holds("memcheck", ran.returncode == 0, f"status {ran.returncode}: {errors} {ran.stderr[-800:]}")


def run_operators(stage: Stage) -> None:
    """Call the operators of the MoE layer once, in bf16 and without comparing."""
    for check in (operators.activation, operators.permutation, operators.grouped_products, kernels.positions):
        check(stage, torch.bfloat16, 1)
    kernels.routing(stage, 1)
    kernels.sorting(stage, 1)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    run_operators(Stage(place / "notes.jsonl", place, False, 600))
