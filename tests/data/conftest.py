"""What the data tests share: small indexed datasets, written by the project's own preprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.data.preprocess import PreprocessOptions, preprocess


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """`write_jsonl(texts, name)`: a .jsonl file of {"text": ...}; returns its path."""

    def write(texts: list[str], name: str = "input.jsonl") -> str:
        path = tmp_path / name
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def write_ids(write_jsonl: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """`write_ids(documents, name, vocab_size)`: a dataset of these ids, no end-of-document ids; returns its prefix."""

    def write(documents: list[list[int]], name: str = "data", vocab_size: int = 1000) -> str:
        source = write_jsonl([" ".join(map(str, document)) for document in documents], f"{name}.jsonl")
        options = PreprocessOptions(
            input=(source,),
            output_prefix=str(tmp_path / name),
            tokenizer_type="NullTokenizer",
            vocab_size=vocab_size,
            workers=1,
            overwrite=True,
        )
        return next(iter(preprocess(options, show_progress=False)))

    return write
