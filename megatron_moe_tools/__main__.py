"""`python -m megatron_moe_tools COMMAND ...`. See `console.py`."""

from __future__ import annotations

import sys

from megatron_moe_tools.console import main

if __name__ == "__main__":
    sys.exit(main())
