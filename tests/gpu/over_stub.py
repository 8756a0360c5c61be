"""Stage 9 of a dry run, as a program for `tests/helpers/cuda_on_cpu.py --transformer-engine`: NOTES FOLDER SECONDS."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_moe  # noqa: F401  (before the engine)
from tests.gpu.speed import transformer_engine
from tests.gpu.stage import Stage

transformer_engine(Stage(Path(sys.argv[1]), Path(sys.argv[2]), True, float(sys.argv[3])))
