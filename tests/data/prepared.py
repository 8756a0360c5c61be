"""Datasets that the project's own preprocessing makes of files of text, and a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from megatron_moe_tools.prepare.preprocess import PreprocessOptions, preprocess


def byte_level_bpe(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer of GPT-2's kind with 400 ids."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def run(inputs: Sequence[str | Path] | Path, prefix: str | Path, **changes: object) -> str:
    """Preprocess in this process, with ByteTokenizer and eod unless told otherwise; the first dataset's prefix."""
    names = (inputs,) if isinstance(inputs, Path) else inputs
    settings = {"tokenizer_type": "ByteTokenizer", "append_eod": True, "workers": 1, **changes}
    options = PreprocessOptions(tuple(map(str, names)), str(prefix), **settings)  # type: ignore[arg-type]
    return next(iter(preprocess(options, show_progress=False)))


def dataset_bytes(prefix: str | Path, *suffixes: str) -> list[bytes]:
    """The files of a dataset, .bin and .idx unless told otherwise."""
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in suffixes or (".bin", ".idx")]


def ids(folder: Path, name: str, documents: list[list[int]], vocab_size: int) -> str:
    """A dataset of these ids without end-of-document ids; its prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join('{"text": "' + " ".join(map(str, document)) + '"}\n' for document in documents))
    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size, "append_eod": False, "overwrite": True}
    return run(source, folder / name, **settings)
