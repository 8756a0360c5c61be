"""The site: it is built strictly, fits into a day's reading, and is searched offline, light and dark."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.report import chromium

MOST_WORDS = {"docs": 40_000, "README.md": 1_200}


def words(page: Path) -> int:
    """The words of a page: neither marks of tables nor comments."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_pages_have_no_more_words_than_somebody_reads() -> None:
    counted = {"docs": sum(map(words, ROOT.glob("docs/**/*.md"))), "README.md": words(ROOT / "README.md")}
    assert {name: count for name, count in counted.items() if count > MOST_WORDS[name]} == {}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, from sources that give no warning."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[chromium.Page]:
    if chromium.found() is None:
        pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is installed; the site itself was not opened")
    page = chromium.Page(tmp_path / "profile")
    yield page
    page.close()


def test_the_site_is_built_searched_from_a_disk_and_has_two_colours(site: Path, browser: chromium.Page) -> None:
    browser.open(site / "index.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    first = browser.evaluate(scheme)
    browser.evaluate("document.querySelector('label[for=__palette_1], label[for=__palette_0]').click()")
    assert {first, browser.evaluate(scheme)} == {"default", "slate"}
    browser.evaluate(
        "(() => { const box = document.querySelector('.md-search__input');"
        " document.querySelector('label[for=__search]').click(); box.focus(); box.value = 'expert_bias';"
        " box.dispatchEvent(new KeyboardEvent('keyup', { bubbles: true, key: 's' })); })()"
    )
    found = browser.evaluate(
        "new Promise((then) => { (function look(left) { const links = "
        "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href);"
        " if (links.length) then(links); else if (left) setTimeout(look, 50, left - 1); else then([]); })(400); })"
    )
    assert any("precision" in link or "balancing" in link for link in found)
    assert [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    assert browser.errors == []
