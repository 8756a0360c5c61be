#!/usr/bin/env python3
"""Say what a Megatron-LM flag or script is here, and rewrite it. See `megatron_moe_tools/compat/flags.py`.

python tools/megatron_flags.py --moe-grouped-gemm --ckpt-format torch_dist
python tools/megatron_flags.py --script train_deepseek_v3.sh
python tools/megatron_flags.py --rewrite --script train_deepseek_v3.sh > train_here.sh
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.compat.flags import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
