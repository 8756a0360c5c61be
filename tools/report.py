#!/usr/bin/env python3
"""Write one HTML page with the charts and facts of runs. See `megatron_moe_tools/report`.

python tools/report.py runs/a
python tools/report.py runs/a runs/b --output both.html
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.report.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
