"""The command line of tools/preprocess_data.py; flags that Megatron-LM has too have its names."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_moe.config.cli import add_flags
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.data.preprocess import PreprocessOptions, preprocess
from megatron_moe.data.train_tokenizer import MODEL_TYPES
from megatron_moe.io.program import DONE, run_program


def parser() -> argparse.ArgumentParser:
    """Return the parser, with one flag per field of `PreprocessOptions`."""
    p = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Tokenize text into indexed datasets: PREFIX_KEY_document.bin, .idx and a .json sidecar.",
        allow_abbrev=False,
    )
    data = p.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, help=".jsonl files, text files, or folders of them")
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys of the JSON objects; one dataset each (default: text)"
    )
    data.add_argument("--output-prefix", required=True, help="path and beginning of the names of the files to write")
    data.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    data.add_argument(
        "--workers", type=int, default=None, help="processes that tokenize (default: one per available core)"
    )
    data.add_argument("--overwrite", action="store_true", help="replace files that exist")
    tokenizer = p.add_argument_group("tokenizer")
    add_flags(tokenizer, TOKENIZER_FIELDS)
    tokenizer.add_argument("--vocab-size", type=int, help="NullTokenizer: ids, with the end-of-document id")
    training = p.add_argument_group("training a SentencePiece tokenizer on the input first")
    training.add_argument(
        "--train-tokenizer", action="store_true", help="train and write the file --tokenizer-model, then use it"
    )
    training.add_argument(
        "--tokenizer-vocab-size", type=int, default=4096, help="pieces of the new model (default: 4096)"
    )
    training.add_argument("--tokenizer-model-type", choices=MODEL_TYPES, default="bpe", help="algorithm (default: bpe)")
    return p


def main(argv: list[str]) -> int:
    """Preprocess as the flags say.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status: 0, 2 for a wrong flag or input (one line on stderr), or 130 after Ctrl-C.
    """
    return run_program("preprocess_data.py", _main, argv, interrupted="interrupted; nothing was written")


def _main(argv: list[str]) -> int:
    flags: dict[str, Any] = vars(parser().parse_args(argv))
    options = PreprocessOptions(**{**flags, "input": tuple(flags["input"]), "json_keys": tuple(flags["json_keys"])})
    preprocess(options)
    return DONE
