#!/usr/bin/env python3
"""Join indexed datasets into one. See `megatron_moe_tools/prepare/merge.py`.

python tools/merge_datasets.py --input data/parts --output-prefix data/all_text_document
python tools/merge_datasets.py --input data/a_text_document data/b_text_document --output-prefix data/ab_text_document
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.prepare.merge_cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
