#!/usr/bin/env python3
"""Report every cast, promotion and mixed matrix product of one step. See `megatron_moe_tools/audit/tracer.py`.

python tools/audit_precision.py --preset tiny --bf16 --json audit.json --html audit.html
python tools/audit_precision.py --module my_model.py:build --json audit.json
python tools/audit_precision.py --hf path/to/folder --bf16 --json audit.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.audit.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
