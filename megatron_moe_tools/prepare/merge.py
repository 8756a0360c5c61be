"""Joins indexed datasets into one: the bytes that preprocessing would have written for their inputs together."""

from __future__ import annotations

import argparse
import glob
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_writable_file
from megatron_moe.data.index_file import (
    HEADER_BYTES,
    MASK,
    SUFFIXES,
    Sidecar,
    TokenIndex,
    open_index,
    read_sidecar,
    sidecar_path,
)
from megatron_moe.io.program import DONE, run_program, say
from megatron_moe_tools.prepare.dataset_files import TokenSource, renames, write_dataset
from megatron_moe_tools.prepare.inputs import matches
from megatron_moe_tools.prepare.output import ResumeDir

NAME = "megatron-moe merge"
_SAME = ("tokenizer_type", "tokenizer_sha256", "vocab_size", "eod", "append_eod", "chat")
"""What the sidecars of merged datasets have in common."""


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = Parser(
        prog=NAME,
        description="Join indexed datasets of one tokenizer into one: what preprocessing all of their inputs writes.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="a folder, whose datasets are taken in the order of their names, or prefixes, in the order given",
    )
    p.add_argument("--output-prefix", required=True, help="path of the files to write, without .bin and .idx")
    p.add_argument("--overwrite", action="store_true", help="replace files that exist")
    return p


def main(argv: list[str]) -> int:
    """Merge as the flags say, and return the exit status: also 1 for data that changed after it was written."""
    errors = (ConfigError, OSError)
    return run_program(NAME, _main, argv, interrupted="interrupted; nothing was written", errors=errors, rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    index = merge(flags.input, flags.output_prefix, overwrite=flags.overwrite)
    say(f"{index.prefix}: {index.num_documents:,} documents, {index.num_tokens:,} tokens ({index.dtype})")
    return DONE


def merge(inputs: Sequence[str], output_prefix: str, *, overwrite: bool = False) -> TokenIndex:
    """Write the datasets of `inputs`, one after the other, as one, and return its index.

    Each is read once, block by block, and is compared with the hash in its sidecar. Where none has a sidecar, as those
    of Megatron-LM, the result has none.

    Args:
        inputs: prefixes, patterns of `.idx` files or of prefixes, and folders, whose datasets are sorted by name.
        output_prefix: path without ending of the result.
        overwrite: replace a dataset that exists.

    Raises:
        ConfigError: an input is missing, damaged, or of another dtype or tokenizer; the output exists, or is an input;
            the disk has no room.
        RunFault: an input is not what its sidecar says.
    """
    prefixes = find_datasets(inputs)
    work = ResumeDir(output_prefix)
    # The work is the same as long as the tokens have the size and the time of their last change.
    state: list[list[str | int]] = []
    for prefix in prefixes:
        state.append([os.path.abspath(prefix)])
        if os.path.exists(f"{prefix}.bin"):  # otherwise it is refused when it is opened
            status = os.stat(f"{prefix}.bin")
            state[-1] += [status.st_size, status.st_mtime_ns]
    command = {"merge": state}
    if os.path.realpath(output_prefix) in map(os.path.realpath, prefixes):
        raise ConfigError(f"--output-prefix {output_prefix} is one of the datasets of --input; name another place")
    require_writable_file("--output-prefix", f"{output_prefix}.bin", in_new_folder=True)
    outputs = [output_prefix + suffix for suffix in SUFFIXES]
    work.require_free(outputs, command, overwrite=overwrite)
    indices = []
    for prefix in prefixes:
        index = open_index(prefix, "--input")
        expected = HEADER_BYTES + 12 * len(index.lengths) + 8 * len(index.documents)
        if os.path.getsize(f"{prefix}.idx") != expected:
            raise ConfigError(f"--input {prefix}: is multimodal, with a mode for each sequence, which is not merged")
        indices.append(index)
        if index.dtype != indices[0].dtype:
            raise ConfigError(
                f"--input {prefix} has {index.dtype} tokens, {indices[0].prefix} {indices[0].dtype}: datasets of "
                "one tokenizer can be merged"
            )
    sidecars, about = _common_sidecar(prefixes)
    sources = []
    for index, sidecar in zip(indices, sidecars):
        sha256 = mask = None
        if sidecar is None and os.path.exists(index.prefix + MASK):
            raise ConfigError(
                f"--input {index.prefix}: {sidecar_path(index.prefix)} is missing, which says whose trained tokens "
                f"{index.prefix}{MASK} has; copy all files of the dataset again"
            )
        if sidecar is not None:
            sha256 = sidecar.bin_sha256
            mask = sidecar.mask_sha256 and (Path(index.prefix + MASK), sidecar.mask_sha256)
        sources.append(
            TokenSource(
                path=Path(f"{index.prefix}.bin"),
                num_bytes=index.num_tokens * index.dtype.itemsize,
                sha256=sha256,
                num_sequences=len(index.lengths),
                num_documents=index.num_documents,
                lengths=partial(getattr, index, "lengths"),
                counts=partial(numpy.diff, index.documents),
                mask=mask or None,
            )
        )
    work.path.parent.mkdir(parents=True, exist_ok=True)
    with work:
        work.begin(command, discard=overwrite)
        aside = work.whole / "0"
        if not work.publishing:
            write_dataset(aside, sources, indices[0].dtype, about)
        older = [Path(output_prefix + suffix).absolute() for suffix in (".idx", ".json", MASK)]
        work.publish(renames(aside, os.path.abspath(output_prefix)), older)
    return open_index(output_prefix)


def find_datasets(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes in the order given, those of a folder or of a pattern sorted.

    Raises:
        ConfigError: a folder has none, or a `.bin` without its `.idx`, or the other way; a prefix does not exist.
    """
    found: list[str] = []
    for item in inputs:
        if os.path.isdir(item):
            stems = set()
            for name in os.listdir(item):
                stem, suffix = os.path.splitext(name)
                if suffix in (".bin", ".idx") and not name.startswith("."):
                    stems.add(os.path.join(item, stem))
            if not stems:
                raise ConfigError(f"--input {item} is a folder without .bin and .idx files")
            found += sorted(stems)
        elif glob.has_magic(item) and not os.path.exists(f"{item}.idx"):
            matched = matches(f"{item.removesuffix('.idx')}.idx")
            if not matched:
                raise ConfigError(f"--input {item} matches no .idx file")
            found += [path.removesuffix(".idx") for path in matched]
        else:
            found.append(item)
    return found


def _common_sidecar(prefixes: list[str]) -> tuple[Sequence[Sidecar | None], dict[str, Any] | None]:
    """Return each dataset's sidecar, and what that of all together says of the tokens; None without one."""
    found: list[Sidecar] = []
    without: list[str] = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None:
            without.append(prefix)
        else:
            found.append(sidecar)
    if not found:
        return [None] * len(prefixes), None
    if without:
        raise ConfigError(
            f"{sidecar_path(without[0])} is missing, while others have a sidecar: whether the "
            "tokenizer is the same is not known; write the dataset again, or move the other sidecars away"
        )
    first = found[0]
    about: dict[str, Any] = {name: getattr(first, name) for name in _SAME}
    rejected: Counter[str] = Counter()
    least, most = first.min_id, first.max_id
    for prefix, sidecar in zip(prefixes, found):
        for name, value in about.items():
            if name == "chat" and sidecar.chat != value:
                raise ConfigError(
                    f"--input {prefix} is of another chat template or --train-on than {prefixes[0]}, or one of them is "
                    "of texts; give training both, as a blend"
                )
            if getattr(sidecar, name) != value:
                raise ConfigError(
                    f"--input {prefix}: {name} is {getattr(sidecar, name)}, that of {prefixes[0]} is {value}; datasets "
                    "of one tokenizer can be merged"
                )
        rejected.update(sidecar.rejected)
        least, most = min(least, sidecar.min_id), max(most, sidecar.max_id)
    about |= {"min_id": least, "max_id": most, "rejected": dict(sorted(rejected.items()))}
    return found, about
