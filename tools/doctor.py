#!/usr/bin/env python3
"""Check that a model trains the same under every layout. See `megatron_moe_tools/doctor/cli.py`.

python tools/doctor.py --preset demo --json doctor.json
python tools/doctor.py --config run.yaml --tensor-model-parallel-size 8 --expert-model-parallel-size 16
python tools/doctor.py --preset tiny --layouts 'ep2*' tp2-pp2
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
