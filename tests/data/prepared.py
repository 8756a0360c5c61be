"""Datasets that the project's own preprocessing makes of files of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_moe.data.preprocess import PreprocessOptions, preprocess


def run(inputs: Sequence[str | Path] | Path, prefix: str | Path, **changes: object) -> str:
    """Preprocess in this process, with ByteTokenizer and eod unless told otherwise; the first dataset's prefix."""
    names = (inputs,) if isinstance(inputs, Path) else inputs
    settings = {"tokenizer_type": "ByteTokenizer", "append_eod": True, "workers": 1, **changes}
    options = PreprocessOptions(tuple(map(str, names)), str(prefix), **settings)  # type: ignore[arg-type]
    return next(iter(preprocess(options, show_progress=False)))


def ids(folder: Path, name: str, documents: list[list[int]], vocab_size: int) -> str:
    """A dataset of these ids without end-of-document ids; its prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join('{"text": "' + " ".join(map(str, document)) + '"}\n' for document in documents))
    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size, "append_eod": False, "overwrite": True}
    return run(source, folder / name, **settings)
