"""`python -m megatron_moe COMMAND ...`: the programs of `megatron_moe_tools/console.py`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    # By name: no module of this package imports the tools, which stand on it.
    runpy.run_module("megatron_moe_tools.console", run_name="__main__", alter_sys=True)
