#!/usr/bin/env python3
"""Check a node, or a whole job, before a long run. See `megatron_moe_tools/preflight/cli.py`.

python tools/preflight.py --preset deepseek-v3 --save /checkpoints/run7
torchrun --nproc-per-node 8 tools/preflight.py --preset qwen3-30b-a3b --json preflight.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.preflight.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
