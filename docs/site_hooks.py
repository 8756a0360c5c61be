"""Hooks of mkdocs: what a page on a disk cannot have.

Links to files of the repository, which are not pages of the site, become their names. The script that searches without
a server is ours, and not fetched from elsewhere.
"""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SHIM = re.compile(r"https://unpkg\.com/iframe-worker/shim")
DOCS = Path(__file__).parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text without links that lead out of docs/."""
    here = (DOCS / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        is_outside = "://" not in link[2] and not target.is_relative_to(DOCS)
        return link[1] if is_outside else link[0]

    return LINK.sub(kept, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return a page's HTML with our script in the place of one from the network."""
    return SHIM.sub("../" * page.file.dest_uri.count("/") + "assets/worker.js", output)
