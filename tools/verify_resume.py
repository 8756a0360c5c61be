#!/usr/bin/env python3
"""Check that a run resumes from a checkpoint as it went on before. See `megatron_moe_tools/verify_resume/cli.py`.

python tools/verify_resume.py runs/demo/checkpoints
python tools/verify_resume.py runs/demo/checkpoints --ckpt-step 100 --steps 20 --json verified.json
python tools/verify_resume.py runs/demo/checkpoints --tensor-model-parallel-size 2 --sequence-parallel
torchrun --nproc-per-node 8 tools/verify_resume.py /checkpoints/run7
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.verify_resume.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
