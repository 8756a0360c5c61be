"""Which source of this package runs: its version, and the commit where a work tree or a build knows it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

VERSION = "0.2.0"
NAME, COMMIT = "megatron-moe", "megatron-moe commit"
"""The keys in `versions` of a checkpoint."""
_PACKAGE = Path(__file__).resolve().parents[1]


@cache
def source_version() -> dict[str, str]:
    """Return version and commit by their keys, the commit where it is known. Starts no process."""
    found = _head(_PACKAGE.parent / ".git") or _text(_PACKAGE / "commit.txt")  # which setup.py writes
    return {NAME: VERSION, **({COMMIT: found} if found else {})}


def other_source(then: Mapping[str, Any]) -> str | None:
    """Return what differs from the source with the `versions` of a checkpoint, None if nothing that is known."""
    now = source_version()
    if all(then.get(name) == now.get(name) for name in (NAME, COMMIT)):
        return None
    return f"{NAME} {_words(then)} -> {_words(now)}"


def _words(versions: Mapping[str, Any]) -> str:
    commit = versions.get(COMMIT)
    return f"{versions.get(NAME, 'unknown')} ({f'commit {commit[:12]}' if commit else 'no commit on record'})"


def _head(git: Path) -> str | None:
    """Return the commit that is checked out, by the files of `.git`; None where there are none or of another kind."""
    if (pointer := _text(git)) is not None:  # of a work tree beside the first
        git = git.parent / pointer.removeprefix("gitdir:").strip()
    head = _text(git / "HEAD") or ""
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    common = git / (_text(git / "commondir") or ".")
    packed = (line.split() for line in (_text(common / "packed-refs") or "").splitlines())
    return _text(common / name) or next((words[0] for words in packed if words[1:] == [name]), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
