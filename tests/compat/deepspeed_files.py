"""DeepSpeed configuration files for tests: what they hold, and what they change."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from megatron_moe.config import schema
from megatron_moe_tools import compat

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}


def parsed(path: Path, content: dict[str, Any] | str, *flags: str, world: int | None = 4) -> schema.Run:
    """Parse flags with a DeepSpeed file of this content, on so many ranks."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return compat.parse(["--deepspeed-config", str(path), *flags], world_size=world)


def changed(run: schema.Run, *flags: str) -> dict[str, Any]:
    """The settings in which a run differs from one with these flags alone."""
    plain = _plain(flags)
    return {name: value for name, value in schema.flatten(run).items() if value != plain[name]}


@cache
def _plain(flags: tuple[str, ...]) -> dict[str, Any]:
    return schema.flatten(compat.parse(flags))


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}
