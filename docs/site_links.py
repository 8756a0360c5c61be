"""A hook of mkdocs: links to files of the repository, which are not pages of the site, become their names."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
DOCS = Path(__file__).parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text without links that lead out of docs/."""
    here = (DOCS / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        is_outside = "://" not in link[2] and not target.is_relative_to(DOCS)
        return link[1] if is_outside else link[0]

    return LINK.sub(kept, markdown)
