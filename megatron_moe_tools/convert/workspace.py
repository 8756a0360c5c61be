"""The workspace of a conversion: a hidden folder next to the output, with a journal. This module does without torch.

    .NAME.converting/
      journal.jsonl     what is being converted, and a line for every file that is complete
      output/           renamed to NAME at the end

A conversion that was killed goes on after the last complete file if it is started again with the same source and
options; with others it starts over. One that fails leaves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_writable_folder
from megatron_moe.io.files import sync
from megatron_moe.io.program import note
from megatron_moe.io.texts import duration_text, size_text

_SECONDS_BETWEEN_LINES = 5.0
_JOURNAL, _OUTPUT = "journal.jsonl", "output"


class ConversionProgress:
    """A progress report on bytes, `done` of them by an earlier start: a line every few seconds, and a last one.

    It shows the word `what`, bytes, rate and time left.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._before = what, total, done, done
        self._started = self._last_line = time.monotonic()

    def advance(self, count: int) -> None:
        """Count more bytes as done."""
        self._done += count
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._line()

    def finish(self) -> None:
        """Print the last line."""
        self._done = self._total
        self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        seconds = max(self._last_line - self._started, 1e-3)
        rate = (self._done - self._before) / seconds
        share = 100 * self._done // self._total if self._total else 100
        left = duration_text(seconds)
        if rate and self._done < self._total:
            left = f"{duration_text((self._total - self._done) / rate)} left"
        amount = f"{size_text(self._done)} of {size_text(self._total)} ({share}%), {size_text(int(rate))}/s"
        note(f"{self._what} {amount}, {left}")


def require_free(target: Path, source: Path) -> None:
    """Check that the output overwrites nothing, and is neither the source nor in it. Raises ConfigError: it is."""
    require_writable_folder("--save", str(target.parent))
    real, other = target.resolve(), source.resolve()
    if real == other or real in other.parents or other in real.parents:
        raise ConfigError(f"--save {target}: is --load {source}, or one is inside the other; name another folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"--save {target}: is there and no folder; name another one")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"--save {target}: is not empty, and nothing is overwritten; name another folder")


class Workspace:
    """The hidden folder of one conversion.

    target: the folder that the output becomes. identity: what has to be the same for a second start to go on with the
    work of the first. output: folder that the files are written to. done: the journal's records by name, those of an
    earlier start included.
    """

    def __init__(self, target: Path, identity: dict[str, Any]) -> None:
        self.target = target
        self.hidden = hidden_folder(target)
        self.output = self.hidden / _OUTPUT
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.done: dict[str, dict[str, Any]] = {}
        self._descriptor = -1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder and go on with what is done; SIGTERM is as Ctrl-C. Raises ConfigError: it is in use."""
        missing = [folder for folder in self.hidden.parents if not folder.exists()]
        self.hidden.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)  # or a power failure could take a folder with its complete output
        self._descriptor = os.open(self.hidden / _JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise ConfigError(f"--save {self.target}: another process is converting to it; wait for it") from None
            lines, sound = _complete_lines(self.hidden / _JOURNAL)
            if lines and lines[0] == {"identity": self.identity}:
                os.ftruncate(self._descriptor, sound)
                self.done = {line["name"]: line for line in lines[1:]}
            else:
                shutil.rmtree(self.output, ignore_errors=True)
                os.ftruncate(self._descriptor, 0)
                self.output.mkdir()
                self._append({"identity": self.identity})
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                yield
            finally:
                signal.signal(signal.SIGTERM, before)
        finally:
            os.close(self._descriptor)

    def record(self, name: str, content: dict[str, Any]) -> None:
        """Append to the journal that something is complete and on the disk."""
        self.done[name] = self._append({"name": name, **content})

    def _append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Append a line, and return it in the types that a later start reads: lists, not tuples."""
        text = json.dumps(line, separators=(",", ":"))
        data = f"{text}\n".encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)
        result: dict[str, Any] = json.loads(text)
        return result

    def publish(self) -> None:
        """Rename the complete output to its target, and remove the hidden folder."""
        for path, _, _ in os.walk(self.output):
            sync(Path(path))
        os.rename(self.output, self.target)
        sync(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the hidden folder and everything in it."""
        shutil.rmtree(self.hidden, ignore_errors=True)


def published_before(target: Path, identity: dict[str, Any]) -> bool:
    """Return whether an earlier start of this conversion is complete except for the removal of the hidden folder."""
    journal, output = hidden_folder(target) / _JOURNAL, hidden_folder(target) / _OUTPUT
    if output.exists() or not journal.exists() or not target.is_dir():
        return False
    lines, _ = _complete_lines(journal)
    return bool(lines) and lines[0] == {"identity": json.loads(json.dumps(identity))}


def hidden_folder(target: Path) -> Path:
    """Return the hidden folder that a conversion to `target` writes to."""
    return target.with_name(f".{target.name}.converting")


def _complete_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the journal's complete lines and the bytes they take; a last line that was cut short is left out."""
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
