"""What the environment asks of this machine: read without torch, refused where a program starts."""

from __future__ import annotations

import os
import sys

from megatron_moe.config.errors import ConfigError

HALF_PRODUCTS = "MEGATRON_MOE_CPU_HALF_PRODUCTS"
"""The variable that says how a CPU multiplies bf16 and fp16: see `half_products`."""
_WAYS = ("auto", "native", "fp32")


def half_products() -> str:
    """Return how a CPU multiplies in half precision: "native", "fp32", or "auto", which leaves it to the processor.

    Raises:
        ConfigError: the variable has another value.
    """
    value = os.environ.get(HALF_PRODUCTS) or "auto"
    if value not in _WAYS:
        raise ConfigError(f"{HALF_PRODUCTS}={value}: not one of {', '.join(_WAYS)}; leave it unset for auto")
    return value


def check() -> None:
    """End the program with one message and status 2 where the environment asks for what is not known.

    The package calls this as it is imported, before anything else: the environment reaches every process of a program,
    and so the message is the same in all of them and rank 0 alone prints it.
    """
    try:
        half_products()
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron_moe: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
