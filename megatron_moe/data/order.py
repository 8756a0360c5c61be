"""What decides which sample is number n, held against the checkpoint that a run goes on from. No torch.

A run goes on at sample number n. With another seed, sequence length, blend or split, the samples below n are not those
that were trained on: some come a second time and others never, and nothing in the losses says so.
"""

from __future__ import annotations

from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.fingerprint import Fingerprint
from megatron_moe.data.sources import read_sources

_SETTINGS = ("mock_data", "seed", "seq_length")


def require_same_order(run: Run, now: Fingerprint, config: dict[str, Any], saved: Fingerprint, where: str) -> list[str]:
    """Every setting that decides the order of samples is the checkpoint's. How many ranks read them, in what
    micro-batches, and how many the run takes in all decide nothing.

    A prefix may have moved: the same content, by size and SHA-256, at the same place of the blend is the same data.

    Args:
        now, saved: the data files of this run, and of the checkpoint.
        config: the checkpoint's flat configuration.
        where: the checkpoint, for the message.

    Returns:
        What `--accept-changed-data` accepted, for the log.

    Raises:
        ConfigError: with every setting that differs.
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
    told = f"{where} was trained on another order of samples:\n  " + "\n  ".join(lines)
    if not run.data.accept_changed_data:
        raise ConfigError(
            f"{told}\nsome samples would come twice and others never; use the checkpoint's values, or go on at the same"
            " number of the new order by --accept-changed-data"
        )
    return [f"WARNING: {told}\n--accept-changed-data goes on at the same number of the new order"]


def _other_sources(run: Run, now: Fingerprint, before: Run, saved: Fingerprint) -> list[str]:
    mine, theirs = read_sources(run.data), read_sources(before.data)
    lines = []
    if mine.split != theirs.split:
        lines.append(f"--split: checkpoint {theirs.split}, this run {mine.split}")
    blends = mine.blend_of(0), theirs.blend_of(0)
    assert blends[0] is not None and blends[1] is not None, "there is training data"
    if blends[0].weights != blends[1].weights or len(blends[0].prefixes) != len(blends[1].prefixes):
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
