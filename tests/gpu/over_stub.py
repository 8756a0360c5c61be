"""Stage 9 in a process that has Transformer Engine's Python over a stub of its extension: NOTES FOLDER SECONDS."""

from pathlib import Path

import megatron_moe  # noqa: F401  (before the engine)
from tests.gpu.speed import transformer_engine
from tests.gpu.stage import Stage


def main(argv: list[str]) -> None:
    notes, folder, seconds = argv
    transformer_engine(Stage(Path(notes), Path(folder), True, float(seconds)))
