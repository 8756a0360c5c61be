"""README and docs name paths, tests, links and flags that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from megatron_moe_tools import compat

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ROOTS = ("megatron_moe", "megatron_moe_tools", "tests", "tools", "docs", "examples", "benchmarks", "constraints")
PATH = re.compile(rf"`((?:{'|'.join(ROOTS)})/[\w./*-]*|pretrain_moe\.py|setup\.py|Makefile|Dockerfile)`")
NAMED = re.compile(r"`(megatron_moe/[\w/]+\.py)` `(\w+)`|(tests/[\w/]+\.py)::(\w+)")
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_and_links_exists(page: Path) -> None:
    text = text_of(page)
    assert [path for path in PATH.findall(text) if not list(ROOT.glob(path.rstrip("/")))] == []
    for groups in NAMED.findall(text):
        path, name = filter(None, groups)
        assert re.search(rf"^\s*(def|class) {name}\b", text_of(ROOT / path), re.MULTILINE), (path, name)
    links = [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not is_there(page, link)] == []


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def is_there(page: Path, link: str) -> bool:
    """Return whether a link of a page leads to a file, and to a heading of it where it names one."""
    path, _, anchor = link.partition("#")
    target = page if not path else page.parent / path
    return target.exists() and (not anchor or anchor in anchors(target))


def test_no_page_is_an_orphan() -> None:
    linked = {page for page in PAGES if str(page.relative_to(ROOT / "docs") if "docs" in page.parts else "") in SITE}
    for page in PAGES:
        for link in LINK.findall(text_of(page)):
            linked.add((page.parent / link.partition("#")[0]).resolve())
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in linked and page != README] == []


def test_every_flag_in_the_readme_is_one_of_a_program() -> None:
    known = {option for action in compat.parser()._actions for option in action.option_strings}
    for folder in ("megatron_moe", "megatron_moe_tools", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text_of(path)))
    assert sorted(set(FLAG.findall(text_of(README))) - known) == []
