#!/usr/bin/env python3
"""Does a checkpoint go on as the run that wrote it went on? See `megatron_moe/apps/verify_resume/cli.py`.

python tools/verify_resume.py runs/demo/checkpoints
python tools/verify_resume.py runs/demo/checkpoints --ckpt-step 100 --steps 20 --json verified.json
python tools/verify_resume.py runs/demo/checkpoints --tensor-model-parallel-size 2 --sequence-parallel
torchrun --nproc-per-node 8 tools/verify_resume.py /checkpoints/run7
"""

from __future__ import annotations

import sys
from pathlib import Path

# The package beside this file, also where another checkout is the installed one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe.apps.verify_resume.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
