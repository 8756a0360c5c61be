#!/usr/bin/env python3
r"""Tokenize text into Megatron's indexed datasets. See `megatron_moe_tools/prepare/preprocess.py`.

python tools/preprocess_data.py --input train.jsonl --output-prefix data/train --append-eod \
    --train-tokenizer --tokenizer-vocab-size 4096 --tokenizer-model data/tokenizer.model
python tools/preprocess_data.py --input valid.jsonl --output-prefix data/valid --append-eod \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model
"""

from __future__ import annotations

import sys
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe_tools.prepare.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
