#!/usr/bin/env python3
"""What a checkpoint computes on given tokens, in fp32; see `megatron_moe/hf/trace.py`.

python tools/trace_forward.py --load checkpoints --tokens tokens.safetensors --output trace.safetensors --routing
python tools/trace_forward.py --load hf_folder --tokens tokens.safetensors --output t.safetensors --grad-norms g.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# The package beside this file, also where another checkout is the installed one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe.apps.trace import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
