"""Checks a run's data before anything is allocated; errors name the file and the offset. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_writable_folder
from megatron_moe.config.schema import Run
from megatron_moe.data.index_file import Sidecar, TokenIndex, open_index, read_sidecar, sidecar_path
from megatron_moe.data.sources import SPLITS, Sources, flag_of, read_sources
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.hashing import sha256_of_file

_SHOW_PROGRESS_FROM = 1 << 28  # bytes
_GB = 10**9


def check_data(run: Run, tokenizer: Tokenizer, *, deep: bool | None = None) -> list[str]:
    """Check the data flags and every file that they name, without changing anything.

    Every process checks the flags, the index structure, sizes, the sidecar against files, tokenizer and vocabulary, and
    that every split that the run needs has a full sequence. With `deep`, also the SHA-256 of every `.idx`, that of the
    `.bin` files where all together are at most `--data-verify-gb`, and all ids of data without a sidecar.

    Args:
        deep: whether files are read; default: in the process of rank 0 (RANK in the environment, or none), so that the
            ranks of a run do not all read the same files.

    Returns:
        What was verified, one line per dataset, for the log.

    Raises:
        ConfigError: something is wrong; the message names the first problem.
    """
    deep = os.environ.get("RANK", "0") == "0" if deep is None else deep
    sources = read_sources(run.data)
    limit = vocabulary_limit(run, tokenizer)
    if sources.mock:
        return ["data: made up (--mock-data)"]
    needed = [0] if run.training.eval_iters == 0 else [0, 1]
    if 1 in needed and sources.per_split is not None and sources.per_split[1] is None:
        raise ConfigError(
            f"--eval-iters {run.training.eval_iters} needs --valid-data-path PREFIX; --eval-iters 0 switches "
            "evaluation off"
        )
    indices = {prefix: open_index(prefix, flag_of(run.data, prefix)) for prefix in sources.prefixes()}
    _check_cache_folder(run, sources)
    sidecars = {prefix: read_sidecar(prefix) for prefix in indices}
    hash_bin = deep and within_verify_limit(run, list(indices))
    lines = []
    for prefix, index in indices.items():
        sidecar = sidecars[prefix]
        if sidecar is not None:
            check_sidecar(index, sidecar, tokenizer, limit)
            lines.append(_verify_hashes(index, sidecar, deep, hash_bin))
        else:
            lines.append(_scan(index, limit) if deep else f"data {prefix}: structure")
    for split in needed:
        require_sequence(sources, split, run.model.seq_length, indices)
    return lines


def within_verify_limit(run: Run, prefixes: list[str]) -> bool:
    """Return whether all `.bin` files together are small enough to be read at the start (`--data-verify-gb`)."""
    return sum(os.path.getsize(f"{prefix}.bin") for prefix in prefixes) <= run.data.data_verify_gb * _GB


def hashing(path: str) -> str:
    """Return the hex SHA-256 of a file; show a progress bar for a large one."""
    with _progress(f"SHA-256 of {os.path.basename(path)}", os.path.getsize(path)) as advance:
        return sha256_of_file(path, advance)


def vocabulary_limit(run: Run, tokenizer: Tokenizer) -> int:
    """Return the bound that ids must be below: `--vocab-size` where it is given, else the tokenizer's size.

    Raises:
        ConfigError: `--vocab-size`, or the model that the run starts from, is smaller than the tokenizer.
    """
    given, checkpoint = run.model.vocab_size, run.checkpoint
    if given is None:
        return tokenizer.vocab_size
    if given < tokenizer.vocab_size:
        model = checkpoint.load_hf or (checkpoint.load if checkpoint.use_checkpoint_args else None)
        if model is not None:
            where, way = f"the vocabulary of {model}, {given},", "use the tokenizer that came with it"
        else:
            where, way = f"--vocab-size {given}", "leave it out to use the tokenizer's"
        raise ConfigError(
            f"{where} is smaller than the {tokenizer.vocab_size} ids of --tokenizer-type {tokenizer.name}; {way}"
        )
    return given


def require_sequence(
    sources: Sources, split: int, seq_length: int, indices: dict[str, TokenIndex] | None = None
) -> None:
    """Check that every dataset of the split has at least one full sequence, seq_length + 1 tokens.

    With fewer, the engine would repeat the same few tokens to fill a sequence; with none it would not return.

    Raises:
        ConfigError: there are fewer; the message names the prefix, the split and the number of tokens.
    """
    blend = sources.blend_of(split)
    if blend is None:
        raise ConfigError(f"no {SPLITS[split]} data: give --{SPLITS[split]}-data-path PREFIX")
    for prefix in blend.prefixes:
        index = open_index(prefix) if indices is None else indices[prefix]
        begin, end = sources.sequence_range(split, len(index.lengths))
        tokens = int(index.lengths[begin:end].sum(dtype="int64"))
        if tokens < seq_length + 1:
            share = f" under --split {sources.split}" if sources.split is not None else ""
            raise ConfigError(
                f"{prefix}.bin: the {SPLITS[split]} split has {tokens} tokens in {max(end - begin, 0)} "
                f"documents{share}; one sequence needs {seq_length + 1} (--seq-length {seq_length} and the next token)"
            )


def check_sidecar(index: TokenIndex, sidecar: Sidecar, tokenizer: Tokenizer, limit: int) -> None:
    """Check that the sidecar agrees with the files' sizes, with the tokenizer and with the vocabulary.

    Raises:
        ConfigError: something differs; the message names the sidecar and both values.
    """
    path = sidecar_path(index.prefix)
    found = {
        "tokens": index.num_tokens,
        "documents": index.num_documents,
        "dtype": str(index.dtype),
        "bin_bytes": os.path.getsize(f"{index.prefix}.bin"),
        "idx_bytes": os.path.getsize(f"{index.prefix}.idx"),
    }
    for name, value in found.items():
        if getattr(sidecar, name) != value:
            raise ConfigError(
                f"{index.prefix}: the files have {name} {value}, but {path} says {getattr(sidecar, name)}: they were "
                "not written together; copy all three files again"
            )
    if sidecar.tokenizer_sha256 != tokenizer.sha256:
        raise ConfigError(
            f"{path}: the data was written with {sidecar.tokenizer_type} {sidecar.tokenizer_sha256[:12]} "
            f"({sidecar.vocab_size} ids), the run has --tokenizer-type {tokenizer.name} {tokenizer.sha256[:12]} "
            f"({tokenizer.vocab_size} ids); give that tokenizer with --tokenizer-type and --tokenizer-model, or write "
            f"the data again{tokenizer.remedy(sidecar.tokenizer_sha256)}"
        )
    if sidecar.max_id >= limit or sidecar.min_id < 0:
        bad = sidecar.max_id if sidecar.max_id >= limit else sidecar.min_id
        raise ConfigError(f"{path}: the data contains token id {bad}, outside the vocabulary of {limit} ids")


def _verify_hashes(index: TokenIndex, sidecar: Sidecar, deep: bool, hash_bin: bool) -> str:
    ids = f"ids {sidecar.min_id} to {sidecar.max_id}"
    counts = f"data {index.prefix}: {sidecar.tokens} tokens, {sidecar.documents} documents, {ids}"
    if not deep:
        return f"{counts}; structure and sizes verified"
    wanted = {".idx": sidecar.idx_sha256}
    if hash_bin:
        wanted[".bin"] = sidecar.bin_sha256
    for suffix, expected in wanted.items():
        path = index.prefix + suffix
        actual = hashing(path)
        if actual != expected:
            raise ConfigError(
                f"{path}: SHA-256 {actual[:12]} differs from {expected[:12]} in {sidecar_path(index.prefix)}: "
                "its content changed after it was written; copy it again or run megatron-moe prepare again"
            )
    what = "SHA-256 of .bin and .idx" if hash_bin else "sizes and SHA-256 of .idx (.bin is beyond --data-verify-gb)"
    return f"{counts}; {what} verified"


def _scan(index: TokenIndex, limit: int) -> str:
    """Check all ids of data without a sidecar and return the line for the log."""
    path = f"{index.prefix}.bin"
    lowest, highest = 1 << 62, -1
    with _progress(f"token ids of {os.path.basename(path)}", os.path.getsize(path)) as advance:
        for first, tokens in index.chunks():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= limit:
                position = first + int(((tokens < 0) | (tokens >= limit)).argmax())
                document, inside = index.document_of(position)
                raise ConfigError(
                    f"{path}: token id {int(tokens[position - first])} at byte offset "
                    f"{position * index.dtype.itemsize} (document {document}, token {inside}) is outside the "
                    f"vocabulary of {limit} ids; is this the right tokenizer?"
                )
            lowest, highest = min(lowest, low), max(highest, high)
            advance(tokens.nbytes)
    return (
        f"data {index.prefix}: {index.num_tokens} tokens, {index.num_documents} documents, ids {lowest} to "
        f"{highest}; no sidecar: structure and every id verified, the tokenizer not"
    )


def cache_folder(run: Run, sources: Sources) -> str:
    """Return the folder of the index caches: `--data-cache-path`, or `index_cache` in the first dataset's folder."""
    if run.data.data_cache_path is not None:
        return run.data.data_cache_path
    return os.path.join(os.path.dirname(os.path.abspath(sources.prefixes()[0])), "index_cache")


def _check_cache_folder(run: Run, sources: Sources) -> None:
    if run.data.data_cache_path is not None:
        require_writable_folder("--data-cache-path", run.data.data_cache_path)
        return
    folder = cache_folder(run, sources)
    existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"the index cache {folder}: no folder to write in; name one with --data-cache-path")


@contextmanager
def _progress(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes done; show a progress bar for a large file."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=num_bytes < _SHOW_PROGRESS_FROM
    ) as progress:
        task = progress.add_task(text, total=num_bytes)
        yield lambda done: progress.advance(task, done)
