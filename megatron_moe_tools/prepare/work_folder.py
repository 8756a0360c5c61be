"""The folder next to the output in which a command keeps what is finished, until all of it is published.

`.NAME.parts` for the output prefix NAME has `command.json` (what the work is), `parts/KEY` (one folder per shard,
renamed to its name when it is complete), `plan.json` (all parts are there), `whole/` (the datasets while they are put
together) and `publish.json` (these are complete, and are being renamed). Whatever the moment at which a process is
killed, the same command goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.io.files import canonical_json, publish_files, replace_json
from megatron_moe.io.program import note
from megatron_moe_tools.prepare.encoding import PART_FACTS, PART_REJECTS
from megatron_moe_tools.prepare.inputs import Shard


class WorkFolder:
    """The folder of one output prefix. Used as a context manager, it is locked, and removed again if it is of no use.

    Attributes:
        path: the folder.
        parts: the folder of the finished parts.
        whole: the folder of the datasets that are put together.
    """

    def __init__(self, output_prefix: str) -> None:
        try:
            output_prefix.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--output-prefix {output_prefix!r} is not UTF-8; choose another name") from error
        prefix = Path(output_prefix).absolute()
        self.path = prefix.with_name(f".{prefix.name}.parts")
        self.parts, self.whole = self.path / "parts", self.path / "whole"
        self._command, self._plan, self._publish = (
            self.path / f"{name}.json" for name in ("command", "plan", "publish")
        )
        self._lock: IO[str] | None = None

    def sweep(self) -> None:
        """Remove what a command left that was killed after its last file was in its place."""
        shutil.rmtree(self._done, ignore_errors=True)

    def __enter__(self) -> WorkFolder:
        self.sweep()
        for folder in (self.parts, self.whole):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Workers of a command that was killed may still be writing for a moment.
        _locked(self.workers_lock, fcntl.LOCK_EX).close()
        return self

    def __exit__(self, *_: object) -> None:
        if self.path.exists():
            for unfinished in self.parts.glob("*.*"):  # of workers that were ended
                shutil.rmtree(unfinished)
            if not any(self.parts.iterdir()):
                self.remove()
        if self._lock is not None:
            self._lock.close()

    @property
    def workers_lock(self) -> Path:
        """The file that each worker has locked as long as it lives."""
        return self.path / "workers"

    @property
    def _done(self) -> Path:
        return self.path.with_suffix(".done")

    def remove(self) -> None:
        """Remove the folder, so that a kill on the way leaves nothing that looks like unfinished work."""
        publish_files([(self.path, self._done)])
        shutil.rmtree(self._done)

    # ---- what the work is

    def holds(self, command: dict[str, Any]) -> bool:
        """Return whether the folder has work of this command."""
        return _read(self._command) == command

    def begin(self, command: dict[str, Any], *, discard: bool) -> None:
        """Make the folder one of this command.

        Raises:
            ConfigError: it has parts of another command, and not `discard`.
        """
        before = _read(self._command)
        if before == command:
            return
        if before is not None and any(self.parts.iterdir()) and not discard:
            lines = [
                f"{key}: {before.get(key)}, now {command[key]}" for key in command if before.get(key) != command[key]
            ]
            head = f"{self.path} has parts of another command: run that one, or add --overwrite to drop them"
            raise ConfigError(listing(head, lines))
        self.restart()
        self.record("training", None)
        self.record("tokenizer", None)
        replace_json(self._command, command, sole_writer=True)

    def recorded(self, name: str) -> Any:
        """Return what was recorded under a name; None where nothing was."""
        return _read(self.path / f"{name}.json")

    def record(self, name: str, value: Any) -> None:
        """Keep a value until the work is done."""
        replace_json(self.path / f"{name}.json", value, sole_writer=True)

    def restart(self) -> None:
        """Remove all parts and everything that was made of them."""
        for path in (self._publish, self._plan):
            path.unlink(missing_ok=True)
        for folder in (self.whole, self.parts):
            shutil.rmtree(folder)
            folder.mkdir()

    # ---- parts

    def places(self, command: dict[str, Any], shards: Sequence[Shard]) -> list[Path]:
        """Return the place of each shard's part: its name is a hash of the command and of the state of its files.

        Parts of other names are removed, and so is everything that was made of them.
        """
        seen: dict[str, int] = {}
        places = []
        for shard in shards:
            spans = [[os.path.abspath(s.path), s.start, s.end, s.size, s.mtime_ns] for s in shard]
            key = hashlib.sha256(canonical_json([command, spans])).hexdigest()[:24]
            seen[key] = seen.get(key, 0) + 1
            places.append(self.parts / f"{key}-{seen[key]}")
        if self._plan.exists() and _read(self._plan) != [place.name for place in places]:
            note(f"the input has changed: what {self.path} has of it is done again")
            self.restart()
        wanted = set(places)
        others = [path for path in self.parts.iterdir() if path not in wanted]
        if stale := [path for path in others if (path / PART_FACTS).exists() and "." not in path.name]:
            note(f"{self.path}: {len(stale)} parts are of input that has changed, and are removed")
        for path in others:
            shutil.rmtree(path)
        return places

    def facts(self, place: Path, itemsize: int) -> dict[str, Any] | None:
        """Return what `part.json` says; None where there is no part, or a file of it is not as long as that says.

        Files of tokens may be gone once the datasets are put together.
        """
        found = _read(place / PART_FACTS)
        if not isinstance(found, dict):
            return None
        sizes = {PART_REJECTS: found["rejects"]["bytes"]}
        for key, row in enumerate(found["pieces"]):
            for number, piece in enumerate(row):
                sizes[f"{key}.{number}.lengths"] = 4 * piece["num_sequences"]
                sizes[f"{key}.{number}.counts"] = 4 * piece["num_documents"]
                if not self.assembling or (place / f"{key}.{number}.bin").exists():
                    sizes[f"{key}.{number}.bin"] = itemsize * piece["num_tokens"]
        whole = all((place / name).is_file() and (place / name).stat().st_size == size for name, size in sizes.items())
        return found if whole else None

    # ---- from parts to datasets

    @property
    def assembling(self) -> bool:
        """Whether all parts were done, so that their tokens may have been moved into the datasets."""
        return self._plan.exists()

    def begin_assembling(self, places: Sequence[Path]) -> None:
        """Say that all parts are done."""
        replace_json(self._plan, [place.name for place in places], sole_writer=True)

    @property
    def publishing(self) -> bool:
        """Whether the datasets were complete, so that files of them may be in their places."""
        return self._publish.exists()

    def publish(self, renames: Sequence[tuple[Path, Path]] = (), older: Sequence[Path] = ()) -> None:
        """Rename the files to their places, in this order, and remove this folder; or go on with that after a kill.

        Args:
            renames: (file, place); not needed for going on.
            older: files of the outputs of an earlier command, which are removed first.
        """
        if not self.publishing:
            record = {"renames": [[str(a), str(b)] for a, b in renames], "older": [str(path) for path in older]}
            replace_json(self._publish, record, sole_writer=True)
        found = _read(self._publish)
        left = [(Path(a), Path(b)) for a, b in found["renames"] if os.path.exists(a)]
        placed = {b for a, b in found["renames"] if not os.path.exists(a)}
        # An older dataset loses its index first, so that no mixture of the two ever opens.
        publish_files(left, [Path(path) for path in found["older"] if path not in placed])
        self.remove()


def _read(path: Path) -> Any:
    """Return the content of a JSON file; None where there is none, or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _locked(path: Path, how: int) -> IO[str]:
    """Open a file and lock it; the lock ends with the process, or when the file is closed.

    Raises:
        ConfigError: another process has it.
    """
    file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, how)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"{path.parent}: another process is writing this output; wait for it") from error
    except OSError as error:
        note(f"{path} cannot be locked ({error.strerror}): start this command only once at a time")
    return file


def worker_lock(path: Path) -> None:
    """Take a worker's share of the lock, for as long as the process lives."""
    _held.append(_locked(path, fcntl.LOCK_SH))


_held: list[IO[str]] = []
