#!/usr/bin/env python3
"""Inspect, verify, compare and prune checkpoints. See `megatron_moe_tools/inspect/cli.py`.

python tools/inspect_checkpoint.py list runs/demo/checkpoints
python tools/inspect_checkpoint.py verify runs/demo/checkpoints --json verify.json
python tools/inspect_checkpoint.py diff runs/a/iter_0000050 runs/b/iter_0000050 --match expert_bias
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.inspect.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
