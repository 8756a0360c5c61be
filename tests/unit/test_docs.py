"""README and docs steer by facts that hold: every path they name exists, every name stands in its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ROOTS = ("megatron_moe", "tests", "tools", "docs", "examples", "benchmarks", "constraints")
PATH = re.compile(rf"`((?:{'|'.join(ROOTS)})/[\w./*-]*|pretrain_moe\.py|setup\.py|Makefile|Dockerfile)`")
NAMED = re.compile(r"`(megatron_moe/[\w/]+\.py)` `(\w+)`")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    missing = [path for path in named if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


def test_every_name_in_the_journey_stands_in_its_file() -> None:
    found = NAMED.findall((ROOT / "docs" / "journey.md").read_text(encoding="utf-8"))
    assert len(found) > 10
    for path, name in found:
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            path,
            name,
        )


def test_the_readme_names_every_file_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = ("megatron_moe", "tools", "benchmarks")
    files = [str(f.relative_to(ROOT)) for folder in folders for f in (ROOT / folder).rglob("*.py")]
    rooms = [f for f in files if f.endswith("__init__.py")]
    assert len(files) > 80
    assert not [f for f in files if f not in rooms and f"`{f}`" not in readme]
