"""The command line of megatron-moe prepare; flags that Megatron-LM has too have its names."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_moe.config.cli import add_flags
from megatron_moe.config.command_line import Parser, groups, parts
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe_tools.compat.megatron_flags import table, translate
from megatron_moe_tools.prepare.encoding import SKIP, STOP, PreprocessOptions
from megatron_moe_tools.prepare.preprocess import MODEL_TYPES, preprocess

NAME = "megatron-moe prepare"

_SENTENCES = (
    "sentences are for BERT and T5; where a document needs several sequences, write its text as a list of texts under "
    "the key, and each becomes one"
)
_WORKERS = "measures the speed for several numbers of workers; each run prints its own, and --workers sets the number"
_REFUSED = {
    "--split-sentences": _SENTENCES,
    "--find-optimal-num-workers": _WORKERS,
    "--workers-to-check": _WORKERS,
    "--max-documents": _WORKERS,
    "--performance-dir": _WORKERS,
    "--tokenizer-sentencepiece-legacy": "a SentencePiece model is read as it is; drop it",
}
"""Flags of Megatron-LM's preprocess_data.py that are not here -> why, and what to do."""
_IGNORED = {
    "--lang": "read with --split-sentences alone",
    "--keep-newlines": "read with --split-sentences alone",
    "--dataset-impl": "there is one format, Megatron-LM's mmap",
}
_INTERRUPTED = "interrupted; the parts that are finished are kept, and the same command goes on with them"
_ANSWERED = frozenset(
    """--chat-template --legacy-tokenizer --null-tokenizer-eod-id --null-tokenizer-pad-id --tokenizer-hf-no-use-fast
    --tokenizer-hf-no-include-special-tokens --tokenizer-hf-use-fast --tokenizer-metadata --tokenizer-special-tokens
    --trust-remote-code --use-gigatoken --vocab-extra-ids""".split()
)
"""Flags of its tokenizers whose answer in the table of training holds here too."""


def parser() -> argparse.ArgumentParser:
    """Return the parser, with one flag per field of `PreprocessOptions`."""
    p = Parser(
        prog=NAME,
        description="Tokenize text into indexed datasets: PREFIX_KEY_document.bin, .idx and a .json sidecar.",
        allow_abbrev=False,
    )
    data = p.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="JSON lines (.jsonl, .json), tables (.parquet, .arrow), texts (other files), .gz and .zst of lines and "
        "texts, folders of them or of a Hugging Face dataset, or patterns such as 'a/*.jsonl'",
    )
    data.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys of the JSON objects; one dataset each (default: text). Of a list of texts each is a sequence",
    )
    data.add_argument("--output-prefix", required=True, help="path and beginning of the names of the files to write")
    data.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    data.add_argument(
        "--workers", type=int, default=None, help="processes that tokenize (default: one per available core)"
    )
    data.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="write first the documents 0, N, 2 N, ..., then 1, N + 1, ...: Megatron-LM's order (default: 1)",
    )
    data.add_argument(
        "--keep-sequential-samples", action="store_true", help="the order of the input, whatever --partitions says"
    )
    data.add_argument("--log-interval", type=int, help="documents between lines of progress, instead of a bar")
    data.add_argument(
        "--on-bad-line",
        choices=(STOP, SKIP),
        default=STOP,
        help="what is no document ends the work, or is counted and listed in PREFIX_rejects.jsonl (default: stop)",
    )
    data.add_argument(
        "--max-bad-lines", type=float, help="with skip: the share of bad lines, from 0 to 1, beyond which it stops"
    )
    data.add_argument(
        "--overwrite", action="store_true", help="replace files that exist, and drop parts of another command"
    )
    tokenizer = p.add_argument_group("tokenizer")
    add_flags(tokenizer, TOKENIZER_FIELDS)
    tokenizer.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer: add what tokenizer.json adds to a text, such as a token that begins it",
    )
    tokenizer.add_argument("--vocab-size", type=int, help="NullTokenizer: ids, with the end-of-document id")
    _add_training_flags(p.add_argument_group("training a SentencePiece tokenizer on the input first"))
    return p


def _add_training_flags(training: argparse._ArgumentGroup) -> None:
    training.add_argument(
        "--train-tokenizer", action="store_true", help="train and write the file --tokenizer-model, then use it"
    )
    training.add_argument(
        "--tokenizer-vocab-size", type=int, default=4096, help="pieces of the new model (default: 4096)"
    )
    training.add_argument("--tokenizer-model-type", choices=MODEL_TYPES, default="bpe", help="algorithm (default: bpe)")


def main(argv: list[str]) -> int:
    """Preprocess as the flags say.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status: 0, 1 for a full disk, 2 for a wrong flag or input (one line on stderr), or 130 after Ctrl-C.
    """
    errors = (ConfigError, OSError)
    return run_program(NAME, _main, argv, interrupted=_INTERRUPTED, errors=errors, rank=0)


def _main(argv: list[str]) -> int:
    flags: dict[str, Any] = vars(parser().parse_args(_own_flags(argv)))
    options = PreprocessOptions(**{**flags, "input": tuple(flags["input"]), "json_keys": tuple(flags["json_keys"])})
    preprocess(options)
    return DONE


def _own_flags(argv: list[str]) -> list[str]:
    """Return the command line in this program's flags, and print what became of Megatron-LM's.

    Raises:
        ConfigError: for flags that are unknown or not here, all in one message.
    """
    own = [option for action in parser()._actions for option in action.option_strings]
    kept: list[str] = []
    others: list[str] = []
    problems: list[str] = []
    for group in groups(argv):
        flag, given = parts(group)
        if flag in _REFUSED:
            problems.append(f"{flag}: {_REFUSED[flag]}")
        elif flag in _IGNORED:
            note(f"{NAME}: ignored: {' '.join([flag, *given])}: {_IGNORED[flag]}")
        elif flag in own and flag != "--tokenizer-type":
            kept += group
        elif flag in table() and flag not in (*own, *_ANSWERED) and table()[flag][0].target not in own:
            problems.append(f"{flag}: is a flag of training and says nothing here; drop it")
        else:
            others += group
    found = translate(others, own)
    problems += found.problems
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else listing(f"{len(problems)} flags", problems))
    for text in found.notes:
        note(f"{NAME}: {text}")
    return kept + found.argv
