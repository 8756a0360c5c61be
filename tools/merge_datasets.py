#!/usr/bin/env python3
"""`megatron-moe merge` in a clone: join indexed datasets into one."""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.console import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
