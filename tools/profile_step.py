#!/usr/bin/env python3
"""Print where the time of a training step goes, and write a Chrome trace. See `megatron_moe_tools/profile_step.py`.

python tools/profile_step.py --preset tiny --bf16 --trace step.json
torchrun --nproc-per-node 2 tools/profile_step.py --preset tiny --expert-model-parallel-size 2
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.profile_step import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
