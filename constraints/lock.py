"""Write the installed versions of this project's dependencies, and of theirs, as a constraints file to stdout.

Run by `make lock`, in the environment whose versions are to be kept. Left out: this project, torch's CUDA libraries
(torch pins them exactly) and local version tags. A version that does not exist for Python 3.10 gets a marker, so that
3.10 can share the file of 3.11.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT, EXTRAS = "megatron_moe", ("dev", "hf")
LEFT_OUT = ("nvidia-", "cuda-")


def dependencies(name: str, extras: tuple[str, ...], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add the installed distributions that `name` needs with these extras, and those that they need."""
    distribution = importlib.metadata.distribution(name)
    for text in distribution.requires or ():
        needed = Requirement(text)
        child = canonicalize_name(needed.name)
        wanted = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if child == canonicalize_name(PROJECT) and wanted:
            dependencies(PROJECT, tuple(needed.extras), found)
        elif wanted and child not in found and not child.startswith(LEFT_OUT):
            found[child] = importlib.metadata.distribution(child)
            dependencies(child, tuple(needed.extras), found)


def line(name: str, distribution: importlib.metadata.Distribution) -> str:
    """`name==version`, with a marker where that version does not exist for Python 3.10."""
    pinned = f"{name}=={distribution.version.split('+')[0]}"
    required = distribution.metadata.get("Requires-Python")
    if sys.version_info < (3, 12) and required and "3.10.99" not in SpecifierSet(required):
        return f"{pinned}; python_version >= '3.11'"
    return pinned


HEADER_OLD = """\
# Versions tested together on Python 3.11, with megatron-core 0.16.1; written by `make lock`. Python 3.10 uses this file
# too: a line with a marker is a version that 3.10 does not have, where pip takes one that it has.
# torch's CUDA libraries are left out: torch pins them exactly."""

HEADER_NEW = """\
# Versions tested together on Python 3.12, with megatron-core 0.19.2; written by `make lock`. Later Pythons use it too.
# torch's CUDA libraries are left out: torch pins them exactly."""


def main() -> None:
    found: dict[str, importlib.metadata.Distribution] = {}
    dependencies(PROJECT, EXTRAS, found)
    print(HEADER_OLD if sys.version_info < (3, 12) else HEADER_NEW)
    for name, distribution in sorted(found.items()):
        print(line(name, distribution))


if __name__ == "__main__":
    main()
