"""The entry script for torchrun. See `megatron_moe_tools/pretrain.py`.

torchrun --nproc-per-node 2 pretrain_moe.py --preset tiny --mock-data --vocab-size 1000 --train-iters 20
"""

from __future__ import annotations

import sys

from megatron_moe_tools.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
