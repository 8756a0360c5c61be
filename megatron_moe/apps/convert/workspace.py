"""Where a conversion writes until it is done: a hidden folder beside the output, with a journal. No torch.

    .NAME.converting/
      journal.jsonl     what is being converted, and a line for every file that is complete
      output/           what is renamed to NAME at the end

A conversion that was killed goes on after the last complete file if it is started again with the same source and
options; with others it starts over. One that fails leaves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import sync
from megatron_moe.io.program import note
from megatron_moe.io.texts import duration_text, size_text

# ---- Lines of progress: bytes, rate, time left. No torch.


_BETWEEN = 5.0
"""Seconds between lines."""


class ConversionProgress:
    """What of a number of bytes is done; a line every few seconds and one at the end.

    Args:
        what: the word before the figures. total: bytes. done: those that an earlier start has done.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._before = done
        self._started = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """More bytes are done."""
        self._done += count
        if time.monotonic() - self._told >= _BETWEEN:
            self._line()

    def finish(self) -> None:
        """The last line."""
        self._done = self._total
        self._line()

    def _line(self) -> None:
        self._told = time.monotonic()
        seconds = max(self._told - self._started, 1e-3)
        rate = (self._done - self._before) / seconds
        share = 100 * self._done // self._total if self._total else 100
        left = f"{duration_text((self._total - self._done) / rate)} left" if rate and self._done < self._total else ""
        parts = [
            f"{self._what} {size_text(self._done)} of {size_text(self._total)} ({share}%)",
            f"{size_text(int(rate))}/s",
            left or f"{duration_text(seconds)}",
        ]
        note(", ".join(parts))


# ----


_JOURNAL, _OUTPUT = "journal.jsonl", "output"
PUBLISHED = "published"
"""The name in the journal of what is done last."""


def require_free(target: Path, source: Path) -> None:
    """Refuse an output that would overwrite something, or that is the source or in it.

    Raises:
        ConfigError: naming the flag.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"--save {target}: {target.parent} is no folder; create it")
    real, other = target.resolve(), source.resolve()
    if real == other or real in other.parents or other in real.parents:
        raise ConfigError(f"--save {target}: is --load {source}, or one lies in the other; name another folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"--save {target}: is there and no folder; name another one")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"--save {target}: is not empty, and nothing is overwritten; name another folder")


class Workspace:
    """The hidden folder of one conversion.

    Attributes:
        output: where its files go. done: the journal's records by name, of an earlier start.
    """

    def __init__(self, target: Path, identity: dict[str, Any]) -> None:
        self.target = target
        self.hidden = hidden_folder(target)
        self.output = self.hidden / _OUTPUT
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.done: dict[str, dict[str, Any]] = {}
        self.resumed = False
        self._descriptor = -1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Be the only one that writes here, and take over what an earlier start of the same conversion has done.

        Raises:
            ConfigError: another process converts to the same folder.
        """
        self.hidden.mkdir(exist_ok=True)
        self._descriptor = os.open(self.hidden / _JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise ConfigError(f"--save {self.target}: another process is converting to it; wait for it") from None
            self._take_over()
            yield
        finally:
            os.close(self._descriptor)

    def _take_over(self) -> None:
        lines, sound = _complete_lines(self.hidden / _JOURNAL)
        if not lines or lines[0] != {"identity": self.identity}:
            shutil.rmtree(self.output, ignore_errors=True)
            os.ftruncate(self._descriptor, 0)
            self.output.mkdir()
            self._append({"identity": self.identity})
            return
        os.ftruncate(self._descriptor, sound)
        self.done = {line["name"]: line for line in lines[1:]}
        self.resumed = bool(self.done)

    def record(self, name: str, content: dict[str, Any]) -> None:
        """Something is complete and on the disk."""
        line = {"name": name, **content}
        self._append(line)
        self.done[name] = json.loads(json.dumps(line))  # as a later start would find it, to the object

    def _append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    def publish(self) -> None:
        """Make the output visible, whole, and remove the hidden folder."""
        for path, _, _ in os.walk(self.output):
            sync(Path(path))
        if PUBLISHED not in self.done:
            self.record(PUBLISHED, {})
        os.rename(self.output, self.target)
        sync(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the hidden folder and everything in it."""
        shutil.rmtree(self.hidden, ignore_errors=True)


def published_before(target: Path, identity: dict[str, Any]) -> bool:
    """Whether an earlier start of this conversion came to its end, all but for the removal of the hidden folder."""
    hidden = hidden_folder(target)
    if not hidden.is_dir() or (hidden / _OUTPUT).exists() or not target.is_dir():
        return False
    if not (hidden / _JOURNAL).exists():  # made before the output is, removed after it
        return any(target.iterdir())
    lines, _ = _complete_lines(hidden / _JOURNAL)
    return bool(lines) and lines[0] == {"identity": json.loads(json.dumps(identity))} and lines[-1]["name"] == PUBLISHED


def hidden_folder(target: Path) -> Path:
    """Where a conversion to `target` writes."""
    return target.with_name(f".{target.name}.converting")


def _complete_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The journal's lines and the bytes they take; a last one that was cut short is none."""
    lines, sound = [], 0
    for data in path.read_bytes().splitlines(keepends=True):
        try:
            line = json.loads(data)
        except ValueError:
            break
        if not data.endswith(b"\n") or not isinstance(line, dict):
            break
        lines.append(line)
        sound += len(data)
    return lines, sound
