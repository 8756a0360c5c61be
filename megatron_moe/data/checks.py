"""The data flags, and checks of a run's data before anything is allocated. Loads no torch.

The flags say where tokens come from: `--data-config` names a file (`mixture.py`); `--data-path` names one or more
prefixes, with or without weights, that `--split` divides into train, valid and test; `--train-data-path`,
`--valid-data-path` and `--test-data-path` name prefixes for one split each. The checks name the file and the offset of
what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.progress import Progress

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_writable_folder
from megatron_moe.config.run_flags import DataConfig
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.index_file import MASK, Sidecar, TokenIndex, open_index, read_sidecar, sidecar_path
from megatron_moe.data.mixture import Named, NamedData, ValidationSet, read_data_config
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.hashing import sha256_of_file

# The data flags, without opening a file

SPLITS = ("train", "valid", "test")
_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's


@dataclass(frozen=True)
class Blend:
    """A blend of datasets: their prefixes and, where given, a weight above zero for each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def shares(self) -> list[float] | None:
        """Return the weights as the engine divides them, to sum to 1."""
        return None if self.weights is None else _shares(self.weights)


@dataclass(frozen=True)
class Sources:
    """The data of a run.

    `mock`, or what a file `named`, or one `blend` divided by `split`, or a blend (or None) per split in `per_split`.
    """

    mock: bool = False
    named: NamedData | None = None
    blend: Blend | None = None
    split: str | None = None
    per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None

    def blend_of(self, split: int) -> Blend | None:
        """Return the blend that split number `split` (0 train, 1 valid, 2 test) draws from."""
        return self.blend if self.per_split is None else self.per_split[split]

    def prefixes(self) -> list[str]:
        """Return every prefix once, in the order of the flags, or of the file."""
        if self.named is not None:
            return self.named.prefixes()
        blends = [self.blend_of(i) for i in range(len(SPLITS))]
        return list(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))

    def sequence_range(self, split: int, num_sequences: int) -> tuple[int, int]:
        """Return the range [begin, end) of a dataset's sequences that the engine assigns to a split."""
        if self.split is None:
            return 0, num_sequences
        ends = [0.0]
        for share in parse_split(self.split):
            ends.append(ends[-1] + share)
        return round(ends[split] * num_sequences), round(ends[split + 1] * num_sequences)


def sources_of(run: Run) -> Sources:
    """Return the sources of a run; with `--skip-train` those named by a file are its validation sets alone."""
    return read_sources(run.data, trains=not run.training.skip_train)


def read_sources(data: DataConfig, trains: bool = True) -> Sources:
    """Return the sources that the data flags name, which `config/rules/sources.py` has checked."""
    if data.mock_data or data.program_data:
        return Sources(mock=True)
    if data.data_config is not None:
        return Sources(named=read_data_config(data.data_config, trains))
    if data.data_path:
        return Sources(blend=_blend(data.data_path), split=data.split if data.split is not None else DEFAULT_SPLIT)
    train, valid, test = map(_blend, (data.train_data_path, data.valid_data_path, data.test_data_path))
    return Sources(per_split=(train, valid, test))


def _blend(words: tuple[str, ...] | None) -> Blend | None:
    """Return the blend of `PREFIX` or of `WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if not words:
        return None
    words = tuple(word.strip() for word in words)
    weights = tuple(map(float, words[:-1:2]))
    return Blend(words[-1:] if len(words) <= 2 else words[1::2], weights if len(weights) > 1 else None)


def parse_split(split: str) -> list[float]:
    """Return three shares that sum to 1, from one to three decimal numbers separated by commas."""
    numbers = [float(part) for part in split.split(",")]
    return _shares([*numbers, 0.0, 0.0][:3])


def _shares(numbers: Sequence[float]) -> list[float]:
    array = numpy.array(numbers, dtype=numpy.float64)
    return (array / array.sum()).tolist()


# Checks of the files

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
    sources = sources_of(run)
    limit, model = run.model.vocab_size or tokenizer.vocab_size, run.checkpoint.load_hf
    if limit < tokenizer.vocab_size:
        where, way = f"--vocab-size {limit}", "leave it out to use the tokenizer's"
        if run.checkpoint.use_checkpoint_args:
            model = model or run.checkpoint.load
        if model is not None:
            where, way = f"the vocabulary of {model}, {limit},", "use the tokenizer that came with it"
        raise ConfigError(
            f"{where} is smaller than the {tokenizer.vocab_size} ids of --tokenizer-type {tokenizer.name}; {way}"
        )
    if sources.mock:
        return ["data: the program's own" if run.data.program_data else "data: made up (--mock-data)"]
    needed = [] if run.training.skip_train else [0]
    needed += [1] if run.training.eval_iters else []
    if sources.named is not None:
        _require_named(run, sources.named)
    if 1 in needed and sources.per_split is not None and sources.per_split[1] is None:
        raise ConfigError(
            f"--eval-iters {run.training.eval_iters} needs --valid-data-path PREFIX; --eval-iters 0 switches "
            "evaluation off"
        )
    indices = {}
    for prefix in sources.prefixes():
        names = [name for name in _PATHS if prefix in map(str.strip, getattr(run.data, name) or ())]
        flag = f"--{names[0].replace('_', '-')}" if names else f"--data-config {run.data.data_config}: path"
        indices[prefix] = open_index(prefix, flag)
    if run.data.data_cache_path is not None:
        require_writable_folder("--data-cache-path", run.data.data_cache_path)
    else:
        folder = Path(cache_folder(run, sources))
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"the index cache {folder}: no folder to write in; name one with --data-cache-path")
    sidecars = {prefix: read_sidecar(prefix) for prefix in indices}
    hash_bin = deep and within_verify_limit(run, list(indices))
    lines = []
    for prefix, index in indices.items():
        sidecar = sidecars[prefix]
        _require_mask(run, index, sidecar)
        if sidecar is not None:
            lines.append(_verified(index, sidecar, tokenizer, limit, deep, hash_bin))
        else:
            lines.append(_scan(index, limit) if deep else f"data {prefix}: structure")
    for part, split in _parts(sources, needed):
        require_sequence(part, split, run.model.seq_length, indices)
    return lines


def _require_named(run: Run, named: NamedData) -> None:
    """Check that a file of `--data-config` has what the run reads."""
    where = f"--data-config {run.data.data_config}"
    if not named.sources and not run.training.skip_train:
        raise ConfigError(f"{where}: there is nothing to train on; write `NAME: {{path: PREFIX}}` below `sources:`")
    if not named.validation and run.training.eval_iters:
        raise ConfigError(
            f"--eval-iters {run.training.eval_iters}, {where}: there is nothing to evaluate; write "
            "`NAME: {path: PREFIX}` below `validation:`, or use --eval-iters 0"
        )


def _parts(sources: Sources, splits: list[int]) -> Iterator[tuple[Sources, int]]:
    """Yield sources of one blend each, with the number of the split that the run reads of it."""
    if sources.named is None:
        yield from ((sources, split) for split in splits)
        return
    every: tuple[Named, ...] = (*sources.named.sources, *sources.named.validation)
    for one in every:
        split = int(isinstance(one, ValidationSet))
        if split in splits:
            yield Sources(blend=Blend(one.prefixes, None), split=one.split), split


def within_verify_limit(run: Run, prefixes: list[str]) -> bool:
    """Return whether all `.bin` files together are small enough to be read at the start (`--data-verify-gb`)."""
    return sum(os.path.getsize(f"{prefix}.bin") for prefix in prefixes) <= run.data.data_verify_gb * _GB


def hashing(path: str) -> str:
    """Return the hex SHA-256 of a file; show a progress bar for a large one."""
    with _progress(f"SHA-256 of {os.path.basename(path)}", os.path.getsize(path)) as advance:
        return sha256_of_file(path, advance)


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


def _verified(index: TokenIndex, sidecar: Sidecar, tokenizer: Tokenizer, limit: int, deep: bool, hash_bin: bool) -> str:
    """Check that the sidecar agrees with files, tokenizer and vocabulary; return the line for the log."""
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
    ids = f"ids {sidecar.min_id} to {sidecar.max_id}"
    counts = f"data {index.prefix}: {sidecar.tokens} tokens, {sidecar.documents} documents, {ids}"
    if not deep:
        return f"{counts}; structure and sizes verified"
    wanted = {".idx": sidecar.idx_sha256}
    if hash_bin:
        wanted[".bin"] = sidecar.bin_sha256
        if sidecar.mask_sha256 is not None:
            wanted[MASK] = sidecar.mask_sha256
    for suffix, expected in wanted.items():
        actual = hashing(index.prefix + suffix)
        if actual != expected:
            raise ConfigError(
                f"{index.prefix}{suffix}: SHA-256 {actual[:12]} differs from {expected[:12]} in {path}: its content "
                "changed after it was written; copy it again or run megatron-moe prepare again"
            )
    what = "SHA-256 of .bin and .idx" if hash_bin else "sizes and SHA-256 of .idx (.bin is beyond --data-verify-gb)"
    return f"{counts}; {what} verified"


def _require_mask(run: Run, index: TokenIndex, sidecar: Sidecar | None) -> None:
    """Check that the mask of a dataset of conversations is there and of its size, and that the run can use it."""
    path, named = index.prefix + MASK, sidecar is not None and sidecar.mask_sha256 is not None
    if os.path.exists(path) != named:
        what = "is missing" if named else "is there"
        about = f"{sidecar_path(index.prefix)} {'names' if named else 'does not name'} a file of trained tokens"
        raise ConfigError(f"{path} {what}, and {about}; copy all files of the dataset again")
    if not named:
        return
    if (size := os.path.getsize(path)) != index.num_tokens:
        raise ConfigError(f"{path}: {size} bytes for {index.num_tokens} tokens; copy all files of the dataset again")
    if not numpy.memmap(path, dtype=numpy.bool_, mode="r").any():
        raise ConfigError(f"{path}: no token is trained, so nothing would be learnt; prepare the data again")
    if run.data.packing == "none":
        raise ConfigError(
            f"{index.prefix} is of conversations, of which each has to be whole: add --packing best-fit "
            "--reset-attention-mask"
        )
    if run.data.document_boundaries == "eod":
        raise ConfigError(
            f"{index.prefix} is of conversations, of which each turn may end with eod: drop --document-boundaries eod, "
            "which would cut them there"
        )
    longest = int(index.lengths.max()) - 1
    if longest > run.model.seq_length:
        number = int((index.lengths - 1 > run.model.seq_length).sum())
        raise ConfigError(
            f"{index.prefix}: {number} conversations are longer than --seq-length {run.model.seq_length}, up to "
            f"{longest}: their answers would be cut off; raise it, or prepare the data with --seq-length"
        )


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


@contextmanager
def _progress(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes done; show a progress bar for a large file."""
    shown = num_bytes >= _SHOW_PROGRESS_FROM
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task(text, total=num_bytes)
        yield lambda done: progress.advance(task, done)


# A resumed run reads the same samples: the same files, in the same order. If a file of the same name has other content,
# sample n is another text, and with another seed, sequence length, blend or split some samples are trained on twice and
# others not at all; the losses show neither. So sizes, times and hashes of the data files are saved in checkpoints, a
# resume compares them and the settings that decide the order, and a run that saves checks that no file has changed.

Fingerprint = dict[str, dict[str, dict[str, Any]]]
"""prefix, as the flags name it -> ending of a file -> bytes, mtime_ns, sha256 (hex or None), verified."""
_NO_FILE = {"bytes": 0, "mtime_ns": 0, "sha256": None, "verified": False}


def data_fingerprint(run: Run, *, deep: bool | None = None) -> Fingerprint:
    """Return the files of the data flags as they are now; empty for `--mock-data`. Call it after `check_data`.

    sha256 is the sidecar's. Without a sidecar the file is read, unless the `.bin` files together are larger than
    `--data-verify-gb`; then it is None. verified: the content has been read by this process, or by `check_data` before
    it, and has that hash.

    Args:
        deep: whether files may be read; default: only in the process of rank 0.
    """
    deep = os.environ.get("RANK", "0") == "0" if deep is None else deep
    sources = sources_of(run)
    prefixes = [] if sources.mock else sources.prefixes()
    with_bin = within_verify_limit(run, prefixes)
    found: Fingerprint = {}
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        found[prefix] = {}
        hashes: dict[str, str | None] = {".bin": None, ".idx": None}
        if sidecar is not None:
            hashes = {".bin": sidecar.bin_sha256, ".idx": sidecar.idx_sha256}
            if sidecar.mask_sha256 is not None:
                hashes[MASK] = sidecar.mask_sha256
        for suffix, digest in hashes.items():
            path, verified = prefix + suffix, deep and (with_bin or suffix == ".idx")
            about = os.stat(path)
            if sidecar is None and verified:
                digest = hashing(path)
            entry = {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "sha256": digest, "verified": verified}
            found[prefix][suffix] = entry
    return found


def chat_template(run: Run) -> str | None:
    """Return the template by which the run's conversations were written; None without any, or of several templates."""
    sources = sources_of(run)
    sidecars = [] if sources.mock else map(read_sidecar, sources.prefixes())
    found = {sidecar.chat["template"] for sidecar in sidecars if sidecar is not None and sidecar.chat}
    return found.pop() if len(found) == 1 else None


def require_same_samples(
    run: Run,
    now: Fingerprint,
    config: dict[str, Any],
    saved: Fingerprint,
    where: str,
    taken: dict[str, dict[str, Any]] | None = None,
) -> list[str]:
    """Check that files of the same prefix are the same, and that settings which decide the order are the checkpoint's.

    Files are compared by content where it was read now, otherwise by the time of the last change. The order does not
    depend on the number of ranks, the micro-batch size or the number of samples of the run. A prefix may have moved:
    the same content, by size and SHA-256, at the same position in the blend is the same data.

    Args:
        now, saved: the data files of this run, and of the checkpoint.
        config: the checkpoint's flat configuration.
        where: the checkpoint, for the message.
        taken: what the checkpoint keeps of named sources (`Mixture.state`); None without any.

    Returns:
        What `--accept-changed-data` accepted, for the log.

    Raises:
        ConfigError: a file differs, and the message has both values; or settings differ, and it lists them all.
    """
    accepted = []
    for prefix in sorted(now.keys() & saved.keys()):
        for suffix in sorted(now[prefix].keys() | saved[prefix].keys()):
            entry, then = (files[prefix].get(suffix, _NO_FILE) for files in (now, saved))
            hashes = entry["sha256"], then["sha256"]
            if entry["bytes"] != then["bytes"]:
                difference = f"{entry['bytes']} bytes, {then['bytes']} then"
            elif None not in hashes and hashes[0] != hashes[1]:
                difference = f"SHA-256 {hashes[0][:12]}, {hashes[1][:12]} then"
            elif (None not in hashes and entry["verified"]) or entry["mtime_ns"] == then["mtime_ns"]:
                continue
            else:
                difference = (
                    "it was written to since, and its content was not compared (--data-verify-gb limits what is read)"
                )
            problem = f"{prefix}{suffix} is not the file that {where} was trained on: {difference}"
            if not run.data.accept_changed_data:
                raise ConfigError(
                    f"{problem}; restore that file, give the new data another name, or continue with it by "
                    "--accept-changed-data"
                )
            accepted.append(f"WARNING: {problem}; --accept-changed-data goes on with it")
    known = flatten(run).keys()
    before = build({name: value for name, value in config.items() if name in known})
    lines = [
        f"--{name.replace('_', '-')}: checkpoint {flatten(before)[name]}, this run {flatten(run)[name]}"
        # These decide, with the sources, what sample n is.
        for name in ("mock_data", "program_data", "seed", "seq_length", "packing")
        if flatten(before)[name] != flatten(run)[name]
    ]
    named = read_sources(run.data).named
    if (named is None) != (taken is None):
        lines.append(f"--data-config: checkpoint {before.data.data_config}, this run {run.data.data_config}")
    elif named is not None:
        lines += _other_sources(named, taken or {}, now, saved)
    elif not any(data.mock_data or data.program_data for data in (run.data, before.data)):
        mine, theirs = read_sources(run.data), read_sources(before.data)
        if (mine.split and parse_split(mine.split)) != (theirs.split and parse_split(theirs.split)):
            lines.append(f"--split: checkpoint {theirs.split}, this run {mine.split}")
        blends = mine.blend_of(0), theirs.blend_of(0)
        assert blends[0] is not None and blends[1] is not None, "there is training data"
        if blends[0].shares() != blends[1].shares() or len(blends[0].prefixes) != len(blends[1].prefixes):
            lines.append(f"weights of the training data: checkpoint {blends[1].weights}, this run {blends[0].weights}")
        for prefix, other in zip(blends[0].prefixes, blends[1].prefixes):
            if prefix != other and not _is_same(now.get(prefix, {}), saved.get(other, {})):
                lines.append(
                    f"training data: checkpoint {other}, this run {prefix}, whose content is not known to be equal"
                )
    if not lines:
        return accepted
    problem = f"{where} was trained on another order of samples:\n  " + "\n  ".join(lines)
    if not run.data.accept_changed_data:
        raise ConfigError(
            f"{problem}\nsome samples would be trained on twice and others not at all; use the checkpoint's values, or "
            "continue at the same number of the new order by --accept-changed-data"
        )
    return [*accepted, f"WARNING: {problem}\n--accept-changed-data goes on at the same number of the new order"]


def _other_sources(
    named: NamedData, taken: dict[str, dict[str, Any]], now: Fingerprint, saved: Fingerprint
) -> Iterator[str]:
    """Yield how sources that gave samples before are others now. Weights and ends may change: they are the future's."""
    for source in named.sources:
        then = taken.get(source.name)
        if then is None or not then["samples"]:
            continue
        if then["split"] != source.split:
            yield f"source {source.name}: checkpoint split {then['split']}, this run {source.split}"
        for prefix, other in zip_longest(source.prefixes, then["prefixes"], fillvalue=""):
            if prefix != other and not _is_same(now.get(prefix, {}), saved.get(other, {})):
                yield (
                    f"source {source.name}: checkpoint {other or 'no more'}, this run {prefix or 'no more'}, whose "
                    "content is not known to be equal; give other data another name"
                )


def changed_since(fingerprint: Fingerprint) -> str | None:
    """Return what changed in the first file that is gone or has another size or time than in the fingerprint."""
    for prefix, files in fingerprint.items():
        for suffix, entry in files.items():
            path = prefix + suffix
            try:
                about = os.stat(path)
            except OSError as error:
                return f"{path}: {error.strerror}"
            if about.st_size != entry["bytes"]:
                return f"{path} has {about.st_size} bytes, {entry['bytes']} when the run began"
            if about.st_mtime_ns != entry["mtime_ns"]:
                return f"{path} was written to after the run began"
    return None


def _is_same(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> bool:
    """Return whether two datasets are known to have the same content."""
    for suffix, entry in mine.items():
        other = theirs.get(suffix, _NO_FILE)
        if entry["sha256"] is None or (entry["sha256"], entry["bytes"]) != (other["sha256"], other["bytes"]):
            return False
    return bool(mine) and mine.keys() == theirs.keys()
