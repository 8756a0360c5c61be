#!/usr/bin/env python3
"""Write a corpus of real text that every machine has: the source files of Python's own standard library.

    python tools/corpus.py FOLDER

Files go to train, valid or test by the hash of their relative path, so that no file is in two splits and the same
interpreter always gives the same corpus. Of files with the same content only the first is taken. Left out: installed
packages, the library's tests (they repeat the code that they test), and tables that a program wrote (`encodings`,
`pydoc_data`), on which a model would look better than it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform as python_platform
import shutil
import sys
import sysconfig
import tempfile
from contextlib import ExitStack
from pathlib import Path

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import publish_files

SPLITS = ("train", "valid", "test")
SHARES = (0.90, 0.05, 0.05)
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


def write_corpus(
    folder: str | Path,
    *,
    source: str | Path | None = None,
    shares: tuple[float, float, float] = SHARES,
) -> None:
    """Write `train.jsonl`, `valid.jsonl`, `test.jsonl` and the counts, `corpus.json`.

    A line is {"text": ..., "path": ...}. All files are written to a temporary folder and renamed when they are
    complete; `corpus.json` comes last and marks a complete corpus.

    Args:
        folder: created if it does not exist.
        source: folder of .py files; default: the standard library of the running interpreter.
        shares: share of the files (not bytes) of train, valid, test; they sum to 1.

    Raises:
        ConfigError: there are no readable source files, or a split gets none.
    """
    target = Path(folder)
    library = Path(source) if source is not None else Path(sysconfig.get_path("stdlib"))
    paths = source_files(library)
    if not paths:
        raise ConfigError(
            f"no Python source files under {library}; install the standard library's sources or name another folder"
        )
    target.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".corpus-", dir=target))
    try:
        documents, text_bytes = _write_splits(library, paths, aside, shares)
        facts = {
            "python": python_platform.python_version(),
            "documents": dict(zip(SPLITS, documents)),
            "text_bytes": dict(zip(SPLITS, text_bytes)),
        }
        (aside / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        # corpus.json is the mark of a whole corpus: an older one goes first, the new one comes last.
        names = [*(f"{split}.jsonl" for split in SPLITS), "corpus.json"]
        publish_files([(aside / name, target / name) for name in names], [target / "corpus.json"])
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def source_files(library: Path) -> list[Path]:
    """Return the .py files under `library`, relative to it, sorted, without links and the folders in `LEFT_OUT`."""
    found = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and not path.is_symlink():
                found.append(path.relative_to(library))
    return sorted(found, key=lambda path: path.as_posix())


def split_of(relative_path: str, shares: tuple[float, float, float] = SHARES) -> int:
    """Return 0, 1 or 2 for train, valid or test: the share in which the path's hash, as a fraction of 1, falls."""
    fraction = int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big") / 2**64
    if fraction < shares[0]:
        return 0
    return 1 if fraction < shares[0] + shares[1] else 2


def _write_splits(
    library: Path, paths: list[Path], aside: Path, shares: tuple[float, float, float]
) -> tuple[list[int], list[int]]:
    """Write the files of the splits, and return the documents and the bytes of text of each."""
    documents, text_bytes = [0, 0, 0], [0, 0, 0]
    seen: set[bytes] = set()
    with ExitStack() as stack:
        outputs = []
        for name in SPLITS:
            file = open(aside / f"{name}.jsonl", "w", encoding="utf-8", newline="\n")  # noqa: SIM115
            outputs.append(stack.enter_context(file))
        for path in paths:
            content = (library / path).read_bytes()
            digest = hashlib.sha256(content).digest()
            if not content or digest in seen:
                continue
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:  # a few sources declare another encoding
                continue
            seen.add(digest)
            split = split_of(path.as_posix(), shares)
            outputs[split].write(json.dumps({"text": text, "path": path.as_posix()}, ensure_ascii=False) + "\n")
            documents[split] += 1
            text_bytes[split] += len(content)
    for name, count, share in zip(SPLITS, documents, shares):
        if count == 0 and share > 0:
            raise ConfigError(f"{library} has too few source files: none is in the split {name}")
    return documents, text_bytes


if __name__ == "__main__":
    write_corpus(sys.argv[1])
