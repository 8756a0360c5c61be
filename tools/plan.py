#!/usr/bin/env python3
"""Plan a run: parameters, memory, traffic and speed of every rank. See `megatron_moe_tools/plan/plan.py`.

python tools/plan.py --preset deepseek-v2-lite --world-size 8 --expert-model-parallel-size 8
python tools/plan.py --preset mixtral-8x7b --world-size 64 --expert-model-parallel-size 8 --json plan.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.plan.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
