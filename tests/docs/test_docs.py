"""README and docs steer by facts that hold: paths, links, flags, presets and versions that they name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_moe.config import cli
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build, flatten

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ROOTS = ("megatron_moe", "tests", "tools", "docs", "examples", "benchmarks", "constraints")
PATH = re.compile(rf"`((?:{'|'.join(ROOTS)})/[\w./*-]*|pretrain_moe\.py|setup\.py|Makefile|Dockerfile)`")
NAMED = re.compile(r"`(megatron_moe/[\w/]+\.py)` `(\w+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")

MOST_LINES, MOST_WORDS = 249, 1999
SMALL_VOCABULARIES = {"demo": 4096, "tiny": 1000, "tiny-gqa": 1000}
"""Tokens with which README counts the presets that have no vocabulary of their own."""


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = PATH.findall(text_of(page))
    missing = [path for path in named if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text_of(page)):
        assert re.search(rf"^ *def {name}\(", text_of(ROOT / path), re.MULTILINE), (path, name)


def test_every_name_in_the_journey_stands_in_its_file() -> None:
    found = NAMED.findall(text_of(ROOT / "docs" / "journey.md"))
    assert len(found) > 10
    for path, name in found:
        assert re.search(rf"^\s*(def|class) {name}\b", text_of(ROOT / path), re.MULTILINE), (path, name)


# ---- links


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def is_there(page: Path, link: str) -> bool:
    """Return whether a link of a page leads to a file, and to a heading of it where it names one."""
    path, _, anchor = link.partition("#")
    target = page if not path else page.parent / path
    return target.exists() and (not anchor or anchor in anchors(target))


def test_a_broken_link_is_noticed() -> None:
    assert (
        is_there(README, "docs/precision.md#health")
        and is_there(README, "#train")
        and is_there(README, "docs/demo.png")
    )
    assert not is_there(README, "docs/precision.md#wealth") and not is_there(README, "docs/precison.md")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(text_of(page)) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not is_there(page, link)] == []


def test_the_readme_links_every_page_and_shows_the_picture() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(text_of(README))}
    assert sorted({ids(page) for page in PAGES} - linked - {"README.md"}) == []
    assert "![" in text_of(README) and "docs/demo.png" in linked


# ---- what the README is


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES
    assert len(text_of(README).split()) <= MOST_WORDS


def test_claims_and_files_are_listed_elsewhere() -> None:
    """The tests of claims are in docs/verification.md, and a file of the package says itself what it is."""
    named = PATH.findall(text_of(README))
    assert [path for path in named if re.match(r"(megatron_moe|tests)/.*\.py", path)] == []


def test_the_readme_names_the_versions_that_are_installed_and_tested() -> None:
    setup = text_of(ROOT / "setup.py")
    table = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows_after("## Hardware and install")}
    before, after = re.findall(r"megatron-core==([\d.]+); python_version (?:<|>=) '3.12'", setup)
    assert table["Python 3.10, 3.11"] == f"megatron-core {before}"
    assert table["Python 3.12 and later"] == f"megatron-core {after}"
    (least,) = re.findall(r"torch>=([\d.]+)", setup)
    pinned = "\n".join(text_of(file) for file in ROOT.glob("constraints/*.txt"))
    tested = set(re.findall(r"^torch==(.+)$", pinned, re.MULTILINE))
    tests = f"{least} or later; tested with {', '.join(sorted(tested))}"
    assert table["torch"] in (tests, f"{tests}, and by hand with {least}.0")
    assert ">=3.10" in setup and "Python 3.10 or later" in table["system"]


def rows_after(heading: str) -> list[str]:
    """Return the lines of the first table below a heading of the README, without its head."""
    below = text_of(README).partition(f"\n{heading}\n")[2]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", below, re.MULTILINE)
    assert table is not None, heading
    return table[1].splitlines()


# ---- flags


@cache
def flags() -> set[str]:
    """Return the flags of pretrain_moe.py and torchrun, and those that programs and tests here add to a parser."""
    from torch.distributed.run import get_args_parser

    parsers = (cli._build_parser(), get_args_parser())
    found = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    for folder in ("megatron_moe", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_argument", "addoption"):
                    words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                    found |= {word for word in words if isinstance(word, str) and word.startswith("--")}
    return found


def test_every_flag_in_the_readme_is_one() -> None:
    named = set(FLAG.findall(text_of(README)))
    assert {"--preset", "--load-hf", "--world-size", "--nproc-per-node"} <= named
    assert sorted(named - flags()) == []


# ---- presets


def size(parameters: int) -> str:
    """Return a number of parameters as README writes it."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def test_the_readmes_presets_are_those_of_the_code() -> None:
    listed = {}
    for row in rows_after("## Presets"):
        _, names, total, active, _ = (cell.strip() for cell in row.split("|"))
        listed |= dict.fromkeys(re.findall(r"`([^`]+)`", names), (total, active))
    counted = {}
    for name, preset in PRESETS.items():
        run = build(preset)
        vocabulary = run.derived.padded_vocab_size(flatten(run)["vocab_size"] or SMALL_VOCABULARIES[name])
        counted[name] = tuple(
            size(count(vocabulary)) for count in (run.derived.parameter_count, run.derived.active_parameter_count)
        )
    assert listed == counted
