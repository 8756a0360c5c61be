#!/usr/bin/env python3
"""Generate text from a checkpoint, for a quick look. See `megatron_moe_tools/generate.py`.

python tools/generate.py --load runs/demo/checkpoints --prompt "Once upon a time"
python tools/generate.py --load converted --dtype bf16 --prompt-file start.py --temperature 0.7 --top-p 0.95
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
