"""Ways in which a step on a disk goes wrong, each one applied, looked for, and taken back."""

import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_moe.checkpoint import manifest

PAGE = 512


class Damage(NamedTuple):
    """What to write or remove below a step's folder, and the files that may be named for it."""

    kind: str
    files: dict[str, bytes | None]
    named: tuple[str, ...]


def content(step: Path) -> dict[str, bytes]:
    """Every file of a step with its bytes, by its name."""
    return {path.relative_to(step).as_posix(): path.read_bytes() for path in sorted(step.rglob("*")) if path.is_file()}


def flips(sound: dict[str, bytes], number: int, rng: random.Random) -> Iterator[Damage]:
    """One bit flipped: of any byte of the step, or, every other time, of any file, so that small ones are hit too."""
    names, sizes = list(sound), [len(data) for data in sound.values()]
    for trial in range(number):
        (name,) = rng.choices(names, sizes if trial % 2 else [size > 0 for size in sizes])
        data = bytearray(sound[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield Damage("flipped bit", {name: bytes(data)}, (name,))


def truncations(sound: dict[str, bytes], number: int, rng: random.Random) -> Iterator[Damage]:
    """A file cut at any length below its own."""
    names = [name for name, data in sound.items() if data]
    for _ in range(number):
        name = rng.choice(names)
        yield Damage("truncation", {name: sound[name][: rng.randrange(len(sound[name]))]}, (name,))


def zeroed_pages(sound: dict[str, bytes], number: int, rng: random.Random) -> Iterator[Damage]:
    """A page of 512 bytes that reads as zeros, as a disk gives it that lost a write."""
    pages = [
        (name, first)
        for name, data in sound.items()
        for first in range(0, len(data), PAGE)
        if any(data[first : first + PAGE])
    ]
    for _ in range(number):
        name, first = rng.choice(pages)
        data = bytearray(sound[name])
        data[first : first + PAGE] = bytes(len(data[first : first + PAGE]))
        yield Damage("zeroed page", {name: bytes(data)}, (name,))


def misplaced(sound: dict[str, bytes], earlier: dict[str, bytes]) -> Iterator[Damage]:
    """Every file deleted, swapped with the next, taken from an earlier step; files that do not belong."""
    names = list(sound)
    for name, other in zip(names, [*names[1:], names[0]]):
        yield Damage("deleted file", {name: None}, (name,))
        # a folder without a manifest, or with that of something else, is told by its manifest
        named = (manifest.NAME,) if manifest.NAME in (name, other) else (name, other)
        yield Damage("swapped files", {name: sound[other], other: sound[name]}, named)
        if earlier.get(name, sound[name]) != sound[name]:
            yield Damage("file of an earlier step", {name: earlier[name]}, (name,))
    for name in ("__7_0.distcp", "rng/rank_00007.pt", ".metadata.bck", "__0.metadata", "deep/er/common.pt"):
        yield Damage("extra file", {name: earlier["__0_0.distcp"]}, (name,))


def complaints(
    step: Path, damages: Iterator[Damage], complaint: Callable[[Damage], str | None]
) -> dict[str, list[str | None]]:
    """Apply each damage to a step, ask for a complaint, and put everything back; the answers by kind of damage."""
    found: dict[str, list[str | None]] = defaultdict(list)
    for damage in damages:
        before = {name: (step / name).read_bytes() if (step / name).exists() else None for name in damage.files}
        write(step, damage.files)
        found[damage.kind].append(complaint(damage))
        write(step, before)
    return found


def write(step: Path, files: dict[str, bytes | None]) -> None:
    """Write these files, or remove those that are None, with the folders that this leaves empty."""
    for name, data in files.items():
        path = step / name
        if data is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            continue
        path.unlink(missing_ok=True)
        top = step / name.split("/")[0]
        if top != path and not any(entry.is_file() for entry in top.rglob("*")):
            shutil.rmtree(top, ignore_errors=True)
