"""The rules that a run has to meet; `rule.py` says what one is and checks them.

Rules about single values come first, so that later rules may divide by them.
"""

from __future__ import annotations

# In the order in which they are checked.
from megatron_moe.config.rules import attention, model, layout, precision, training, sources  # isort: skip
from megatron_moe.config.rules.rule import RULES, check, check_layout, check_model, missing_packages

__all__ = [
    "RULES",
    "attention",
    "check",
    "check_layout",
    "check_model",
    "layout",
    "missing_packages",
    "model",
    "precision",
    "sources",
    "training",
]
