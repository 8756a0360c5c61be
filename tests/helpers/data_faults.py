"""Twenty kinds of bad data files, each as a function that does random damage of its kind to good ones.

`Scene` holds one dataset of 40 documents with its sidecar, in memory, and puts it back before every trial. A fault gets
a scene and a random generator, does its damage, and returns what to expect. `Scene.verdict` runs the door that every
run comes through, `pretrain_moe.py --dry-run`, and says what came out: the one line of an error with exit status 2, or
None. Where there was no error, `Scene.samples` shows that the samples are what they should be.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import numpy

import pretrain_moe
from megatron_moe.apps import prepare
from megatron_moe.config.schema import Run, build
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.index_file import DTYPES, HEADER_BYTES
from megatron_moe.data.preprocess import PreprocessOptions, preprocess
from megatron_moe.data.tokenizers import NullTokenizer

VOCABULARY = 1000
S = 16
SUFFIXES = (".bin", ".idx", ".json")


def documents(seed: int) -> list[list[int]]:
    """40 documents of 10 ids below 900, others for each seed: the sizes of all files are the same."""
    rng = random.Random(seed)
    return [[rng.randrange(900) for _ in range(10)] for _ in range(40)]


def write(folder: Path, name: str, content: list[list[int]]) -> str:
    """An indexed dataset and its sidecar by the project's own preprocessing; returns the prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": " ".join(map(str, ids))}) + "\n" for ids in content))
    options = PreprocessOptions(
        (str(source),), str(folder / name), "NullTokenizer", None, VOCABULARY, workers=1, overwrite=True
    )
    return next(iter(preprocess(options, show_progress=False)))


@dataclass
class Scene:
    """Good files, and what a run makes of them."""

    folder: Path
    prefix: str = ""
    other: str = ""
    good: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefix, self.other = write(self.folder, "data", documents(1)), write(self.folder, "other", documents(2))
        self.good = {
            path: Path(path).read_bytes() for p in (self.prefix, self.other) for path in map(p.__add__, SUFFIXES)
        }
        self.good_samples = self.samples()

    def restore(self) -> None:
        for path, content in self.good.items():
            if os.path.islink(path) or not os.path.isfile(path):
                _remove(path)
            Path(path).write_bytes(content)

    def run(self, **changes: object) -> Run:
        settings = {"data_path": [self.prefix], "split": "100,0,0", "seq_length": S, "eval_iters": 0, **changes}
        return build({"data_cache_path": str(self.folder / "cache"), **settings})

    def verdict(self, *flags: str, data_path: tuple[str, ...] = ()) -> str | None:
        """The error of `pretrain_moe.py --dry-run`, or None. Anything but one line and exit status 2 is a defect."""
        words = self.argv(data_path)
        if "--seq-length" in flags:  # a flag may be given once
            at = words.index("--seq-length")
            del words[at : at + 2]
        return said(pretrain_moe.main, [*words, "--dry-run", *flags])

    def argv(self, data_path: tuple[str, ...] = ()) -> list[str]:
        return [
            "--preset", "tiny", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), "--split",
            "100,0,0", "--seq-length", str(S), "--eval-iters", "0", "--train-iters", "9", "--data-path",
            *(data_path or (self.prefix,)),
        ]  # fmt: skip

    def samples(self, **changes: object) -> list[list[int]]:
        """The S + 1 ids of the first 30 samples, one epoch and a bit, as the engine's dataset gives them."""
        train, _, _ = build_datasets(self.run(**changes), NullTokenizer(VOCABULARY), 30, 0, 0)
        rows = [train[i] for i in range(30)]  # type: ignore[index]
        return [[*row["tokens"].tolist(), int(row["labels"][-1])] for row in rows]

    def patch(self, path: str, offset: int, content: bytes) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(content)

    def without_sidecar(self, rng: random.Random) -> None:
        """Half of the trials go without it: then structure and ids alone have to tell."""
        if rng.random() < 0.5:
            os.unlink(f"{self.prefix}.json")


def said(main: Callable[[list[str]], int], argv: list[str]) -> str | None:
    """The one line of an error with exit status 2, or None for exit status 0; anything else is an AssertionError."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(argv)
    told = err.getvalue()
    assert status in (0, 2), (status, told)
    if status == 0:
        return None
    line = told.strip().split("error: ", 1)[1]
    assert "\n" not in line and "Traceback" not in told, told
    return line


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def missing(scene: Scene, rng: random.Random) -> str:
    path = scene.prefix + rng.choice((".bin", ".idx"))
    kind = rng.choice(("gone", "broken link", "folder"))
    os.unlink(path)
    if kind == "broken link":
        os.symlink("nowhere", path)
    elif kind == "folder":
        os.mkdir(path)
    return f"data file {path} does not exist"


def empty(scene: Scene, rng: random.Random) -> str:
    path = scene.prefix + rng.choice((".bin", ".idx"))
    Path(path).write_bytes(b"")
    return f"{path} is empty"


def swapped(scene: Scene, rng: random.Random) -> str:
    """.bin and .idx for each other, or one of the three files from another dataset."""
    if rng.random() < 0.3:
        for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
            Path(scene.prefix + suffix).write_bytes(scene.good[scene.prefix + other])
    else:
        suffix = rng.choice(SUFFIXES)
        Path(scene.prefix + suffix).write_bytes(scene.good[scene.other + suffix])
    return scene.prefix


def bad_magic(scene: Scene, rng: random.Random) -> str:
    offset = rng.randrange(9)
    good = scene.good[f"{scene.prefix}.idx"][offset]
    scene.patch(f"{scene.prefix}.idx", offset, bytes([rng.choice([i for i in range(256) if i != good])]))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.idx: bad header at offset 0"


def bad_version(scene: Scene, rng: random.Random) -> str:
    version = rng.choice((0, 2, 1 << 40, rng.randrange(3, 1 << 64)))
    scene.patch(f"{scene.prefix}.idx", 9, struct.pack("<Q", version))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.idx: version {version} at offset 9"


def unknown_dtype(scene: Scene, rng: random.Random) -> str:
    code = rng.choice([i for i in range(256) if i not in DTYPES])
    scene.patch(f"{scene.prefix}.idx", 17, bytes([code]))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.idx: dtype code {code} at offset 17"


def other_dtype(scene: Scene, rng: random.Random) -> str:
    code = rng.choice([1, 2, 3, 4, 5])  # the data is uint16, code 8
    scene.patch(f"{scene.prefix}.idx", 17, bytes([code]))
    scene.without_sidecar(rng)
    return scene.prefix


def truncated_index(scene: Scene, rng: random.Random) -> str:
    parts = (0, HEADER_BYTES, HEADER_BYTES + 4 * 40, HEADER_BYTES + 12 * 40, HEADER_BYTES + 12 * 40 + 8 * 41)
    which = rng.randrange(4)
    os.truncate(f"{scene.prefix}.idx", rng.randrange(max(1, parts[which]), parts[which + 1]))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.idx"


def bad_count(scene: Scene, rng: random.Random) -> str:
    offset = rng.choice((18, 26))
    good = 40 if offset == 18 else 41
    count = rng.choice((0, good - 1, good + 1, 1 << 60, (1 << 64) - 1, rng.randrange(1 << 64)))
    scene.patch(f"{scene.prefix}.idx", offset, struct.pack("<Q", count))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.idx"


def bad_length(scene: Scene, rng: random.Random) -> str:
    number, length = rng.randrange(40), rng.choice((0, -1, -10, -(2**31), -rng.randrange(1, 1 << 31)))
    scene.patch(f"{scene.prefix}.idx", HEADER_BYTES + 4 * number, struct.pack("<i", length))
    scene.without_sidecar(rng)
    return f"sequence {number} has length {length} at offset {HEADER_BYTES + 4 * number}"


def bad_pointer(scene: Scene, rng: random.Random) -> str:
    number, offset = rng.randrange(40), HEADER_BYTES + 4 * 40
    pointer = rng.choice((-2, 20 * number - 2, 20 * number + 1, 20 * 40, 1 << 50, rng.randrange(-(1 << 63), 1 << 63)))
    scene.patch(f"{scene.prefix}.idx", offset + 8 * number, struct.pack("<q", pointer))
    scene.without_sidecar(rng)
    return f"sequence {number} points to byte {pointer} of the .bin file at offset {offset + 8 * number}"


def shorter_bin(scene: Scene, rng: random.Random) -> str:
    size = rng.randrange(1, 800)
    os.truncate(f"{scene.prefix}.bin", size)
    scene.without_sidecar(rng)
    return f"{scene.prefix}.bin: {size} bytes, shorter than the 800"


def longer_bin(scene: Scene, rng: random.Random) -> str:
    more = rng.randrange(1, 300)
    with open(f"{scene.prefix}.bin", "ab") as file:
        file.write(rng.randbytes(more))
    scene.without_sidecar(rng)
    return f"{scene.prefix}.bin: {800 + more} bytes, longer than the 800"


def token_beyond_vocabulary(scene: Scene, rng: random.Random) -> tuple[str, int]:
    """Returns where it is, in words, and the token."""
    position, token = rng.randrange(400), rng.randrange(VOCABULARY, 1 << 16)
    scene.patch(f"{scene.prefix}.bin", 2 * position, struct.pack("<H", token))
    return f"byte offset {2 * position} (document {position // 10}, token {position % 10})", token


def flipped_bits(scene: Scene, rng: random.Random) -> str:
    path = scene.prefix + rng.choice((".bin", ".idx", ".json"))
    content = bytearray(scene.good[path])
    for offset in rng.sample(range(len(content)), rng.choice((1, 1, 1, 4))):
        content[offset] ^= 1 << rng.randrange(8)
    Path(path).write_bytes(content)
    return scene.prefix


def replaced(scene: Scene, rng: random.Random) -> tuple[str, bool]:
    """Another file under the same name, as a copy, a longer one, or a rewriting of the same content."""
    path = scene.prefix + rng.choice((".bin", ".idx"))
    kind = rng.choice(("same content", "other content", "other size", "one token"))
    content = scene.good[path]
    if kind == "other content":
        path = f"{scene.prefix}.bin"
        for suffix in (".bin", ".json"):
            Path(scene.prefix + suffix).write_bytes(scene.good[scene.other + suffix])
    elif kind == "other size":
        path = f"{scene.prefix}.bin"
        write(scene.folder, "data", documents(3)[: rng.randrange(20, 40)])
    elif kind == "one token":
        path = f"{scene.prefix}.bin"
        changed = documents(1)
        changed[rng.randrange(40)][rng.randrange(10)] = 950
        write(scene.folder, "data", changed)
    else:
        Path(path).unlink()
        Path(path).write_bytes(content)
    os.utime(path, ns=(0, rng.randrange(1 << 60)))
    return path, kind == "same content"


def too_few_tokens(scene: Scene, rng: random.Random) -> str:
    """A split with less than one sequence: few documents, a long sequence, or a small share."""
    number = rng.randrange(1, 40)
    write(scene.folder, "data", documents(1)[:number])
    scene.without_sidecar(rng)
    return f"--seq-length {rng.randrange(10 * number, 20 * number)}"


def bad_weights(scene: Scene, rng: random.Random) -> tuple[str, ...]:
    """Words of --data-path: weights that sum to 0, are not finite or negative, or pairs that do not come out."""
    weights = [rng.choice(("0", "0.0", "nan", "NaN", "inf", "-1", "1e999", "-0.5")), rng.choice(("1", "0"))]
    words = (weights[0], scene.prefix, weights[1], scene.other)
    return rng.choice((words, ("0", scene.prefix, "0", scene.other), ("1", scene.prefix, scene.other), words))


def stale_cache(scene: Scene, rng: random.Random) -> None:
    """One cached array flipped, cut, emptied, from other data, or with a list that is damaged or gone."""
    shutil.rmtree(scene.folder / "cache", ignore_errors=True)
    scene.samples()
    arrays = sorted((scene.folder / "cache").rglob("*.npy"))
    path = rng.choice(arrays)
    content = path.read_bytes()
    kind = rng.choice(("flip", "flip", "cut", "empty", "other array", "list cut", "list gone"))
    if kind == "flip":
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
    elif kind in ("cut", "empty"):
        path.write_bytes(content[: rng.randrange(len(content)) if kind == "cut" else 0])
    elif kind == "other array":
        order = numpy.load(path)
        rng.shuffle(order)
        numpy.save(path, order)
    else:
        listing = path.parent / "verified.json"
        text = listing.read_text()
        listing.unlink() if kind == "list gone" else listing.write_text(text[: rng.randrange(len(text))])
        changed = bytearray(content)
        changed[-rng.randrange(1, 8)] ^= 1
        path.write_bytes(changed)


def bad_text(scene: Scene, rng: random.Random) -> str:
    """A file of JSON lines with one bad line; returns the words that name it."""
    bad = rng.choice(
        (
            b'{"text": "a \xff b"}', b'{"text": "caf\xc3"}', b'{"text": "cut', b"not json", b'{"text": ""}', b"",
            b'{"text": 5}', b'{"other": "x"}', b'["text"]', b'{"text": "\\ud800"}', b'{"text": "a"} {"text": "b"}',
        )
    )  # fmt: skip
    number = rng.randrange(1, 40)
    lines = [b'{"text": "1 2 3"}'] * 40
    lines[number - 1] = bad
    (scene.folder / "bad.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return f"{scene.folder / 'bad.jsonl'}, line {number}: "


def preprocessing_says(scene: Scene) -> str | None:
    """The error of tools/preprocess_data.py on what `bad_text` wrote."""
    argv = ["--input", str(scene.folder / "bad.jsonl"), "--output-prefix", str(scene.folder / "bad"), "--workers", "1"]
    return said(prepare.main, [*argv, "--tokenizer-type", "ByteTokenizer"])
