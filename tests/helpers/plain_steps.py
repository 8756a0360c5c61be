"""Steps of a few small files, published as real ones are. No torch."""

from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder
from megatron_moe.io.files import write_bytes, write_json


def write_step(root: Path, iteration: int, content: str = "weights", **about: Any) -> Path:
    """A step whose tensors are `content`; `about` replaces what its configuration and state say."""
    root.mkdir(parents=True, exist_ok=True)
    hidden = folder.open_hidden(root, iteration)
    files = {
        "__0_0.distcp": write_bytes(hidden / "__0_0.distcp", content.encode()),
        "rng/rank_00000.pt": write_bytes(hidden / "rng" / "rank_00000.pt", b"states"),
        folder.CONFIG: write_json(hidden / folder.CONFIG, about.get("config", {"seed": 1})),
        folder.STATE: write_json(hidden / folder.STATE, about.get("state", {"iteration": iteration})),
    }
    return folder.publish(root, iteration, files)
