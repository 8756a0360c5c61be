#!/usr/bin/env python3
"""Convert between a Hugging Face folder and a native checkpoint. See `megatron_moe_tools/convert/cli.py`.

python tools/convert_checkpoint.py --from hf --to native --load models/deepseek-v2-lite --save checkpoints/lite
python tools/convert_checkpoint.py --from native --to hf --load runs/lite/checkpoints --save models/mine
python tools/convert_checkpoint.py --from native --to native --load runs/lite/checkpoints --save one-file-per-layer
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.convert.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
