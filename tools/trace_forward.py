#!/usr/bin/env python3
"""Write what a checkpoint computes on given tokens, in fp32. See `megatron_moe_tools/models/trace.py`.

python tools/trace_forward.py --load checkpoints --tokens tokens.safetensors --output trace.safetensors --routing
python tools/trace_forward.py --load hf_folder --tokens tokens.safetensors --output t.safetensors --grad-norms g.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.trace import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
