"""Checks that a resumed run reads the same samples: the same files, in the same order. Loads no torch.

A run resumes at sample number n. If a file of the same name has other content, sample n is another text, and with
another seed, sequence length, blend or split some samples are trained on twice and others not at all; the losses show
neither. So sizes, times and hashes of the data files are saved in checkpoints, a resume compares them and the settings
that decide the order, and a run that saves checks that no file has changed since it began.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.checks import hashing, within_verify_limit
from megatron_moe.data.index_file import read_sidecar
from megatron_moe.data.sources import parse_split, read_sources

Fingerprint = dict[str, dict[str, dict[str, Any]]]
"""prefix, as the flags name it -> ".bin" and ".idx" -> bytes, mtime_ns, sha256 (hex or None), verified."""


def data_fingerprint(run: Run, *, deep: bool | None = None) -> Fingerprint:
    """Return the files of the data flags as they are now; empty for `--mock-data`. Call it after `check_data`.

    sha256 is the sidecar's. Without a sidecar the file is read, unless the `.bin` files together are larger than
    `--data-verify-gb`; then it is None. verified: the content has been read by this process, or by `check_data` before
    it, and has that hash.

    Args:
        deep: whether files may be read; default: only in the process of rank 0.
    """
    deep = os.environ.get("RANK", "0") == "0" if deep is None else deep
    sources = read_sources(run.data)
    prefixes = [] if sources.mock else sources.prefixes()
    with_bin = within_verify_limit(run, prefixes)
    found: Fingerprint = {}
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        found[prefix] = {}
        for suffix in (".bin", ".idx"):
            path, verified = prefix + suffix, deep and (with_bin or suffix == ".idx")
            about = os.stat(path)
            digest = None
            if sidecar is not None:
                digest = sidecar.bin_sha256 if suffix == ".bin" else sidecar.idx_sha256
            elif verified:
                digest = hashing(path)
            entry = {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "sha256": digest, "verified": verified}
            found[prefix][suffix] = entry
    return found


def require_same_data(run: Run, now: Fingerprint, saved: Fingerprint, where: str) -> list[str]:
    """Check that every file that both name by the same prefix is the same.

    Files are compared by content where it was read now, otherwise by the time of the last change. Prefixes that differ
    are for `require_same_order`, which compares the flags.

    Args:
        where: the checkpoint, for the message.

    Returns:
        What `--accept-changed-data` accepted, for the log.

    Raises:
        ConfigError: a file differs; the message names it and both values.
    """
    accepted = []
    for prefix in sorted(now.keys() & saved.keys()):
        for suffix, entry in now[prefix].items():
            difference = _difference(entry, saved[prefix][suffix])
            if difference is None:
                continue
            problem = f"{prefix}{suffix} is not the file that {where} was trained on: {difference}"
            if not run.data.accept_changed_data:
                raise ConfigError(
                    f"{problem}; restore that file, give the new data another name, or continue with it by "
                    "--accept-changed-data"
                )
            accepted.append(f"WARNING: {problem}; --accept-changed-data goes on with it")
    return accepted


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


def _difference(now: dict[str, Any], saved: dict[str, Any]) -> str | None:
    if now["bytes"] != saved["bytes"]:
        return f"{now['bytes']} bytes, {saved['bytes']} then"
    hashes = now["sha256"], saved["sha256"]
    if None not in hashes:
        if hashes[0] != hashes[1]:
            return f"SHA-256 {hashes[0][:12]}, {hashes[1][:12]} then"
        if now["verified"]:
            return None
    if now["mtime_ns"] != saved["mtime_ns"]:
        return "it was written to since, and its content was not compared (--data-verify-gb limits what is read)"
    return None


# Next to the sources, these settings decide which sample is number n.
_SETTINGS = ("mock_data", "seed", "seq_length")


def require_same_order(run: Run, now: Fingerprint, config: dict[str, Any], saved: Fingerprint, where: str) -> list[str]:
    """Check that every setting that decides the order of samples is the checkpoint's.

    The order does not depend on the number of ranks, the micro-batch size or the number of samples of the run. A prefix
    may have moved: the same content, by size and SHA-256, at the same position in the blend is the same data.

    Args:
        now, saved: the data files of this run, and of the checkpoint.
        config: the checkpoint's flat configuration.
        where: the checkpoint, for the message.

    Returns:
        What `--accept-changed-data` accepted, for the log.

    Raises:
        ConfigError: settings differ; the message lists them all.
    """
    known = flatten(run).keys()
    before = build({name: value for name, value in config.items() if name in known})
    lines = [
        f"--{name.replace('_', '-')}: checkpoint {flatten(before)[name]}, this run {flatten(run)[name]}"
        for name in _SETTINGS
        if flatten(before)[name] != flatten(run)[name]
    ]
    if not (run.data.mock_data or before.data.mock_data):
        lines += _other_sources(run, now, before, saved)
    if not lines:
        return []
    problem = f"{where} was trained on another order of samples:\n  " + "\n  ".join(lines)
    if not run.data.accept_changed_data:
        raise ConfigError(
            f"{problem}\nsome samples would be trained on twice and others not at all; use the checkpoint's values, or "
            "continue at the same number of the new order by --accept-changed-data"
        )
    return [f"WARNING: {problem}\n--accept-changed-data goes on at the same number of the new order"]


def _other_sources(run: Run, now: Fingerprint, before: Run, saved: Fingerprint) -> list[str]:
    mine, theirs = read_sources(run.data), read_sources(before.data)
    lines = []
    divided, before_divided = (split and parse_split(split) for split in (mine.split, theirs.split))
    if divided != before_divided:
        lines.append(f"--split: checkpoint {theirs.split}, this run {mine.split}")
    blends = mine.blend_of(0), theirs.blend_of(0)
    assert blends[0] is not None and blends[1] is not None, "there is training data"
    if blends[0].shares() != blends[1].shares() or len(blends[0].prefixes) != len(blends[1].prefixes):
        lines.append(f"weights of the training data: checkpoint {blends[1].weights}, this run {blends[0].weights}")
    for prefix, other in zip(blends[0].prefixes, blends[1].prefixes):
        if prefix != other and not _same_content(now.get(prefix), saved.get(other)):
            lines.append(
                f"training data: checkpoint {other}, this run {prefix}, whose content is not known to be equal"
            )
    return lines


def _same_content(now: dict[str, Any] | None, saved: dict[str, Any] | None) -> bool:
    if now is None or saved is None:
        return False
    return all(
        entry["bytes"] == saved[suffix]["bytes"]
        and entry["sha256"] is not None
        and entry["sha256"] == saved[suffix]["sha256"]
        for suffix, entry in now.items()
    )
