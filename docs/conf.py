"""Sphinx's configuration: `make docs` builds these pages to build/docs and fails on a broken link or anchor.

The source folder is the repository's root, so that links between the pages are the same here, on GitHub and in an editor. The
navigation is made from the lists of links in docs/README.md: a page that is in none of them fails the build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shoal.version import VERSION  # noqa: E402 - the path above leads to it

INDEX: Final = "docs/README"
SECTION: Final = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
PAGE: Final = re.compile(r"^- \[[^\]]+\]\(([\w./-]+)\.md\)", re.MULTILINE)

project = "Shoal"
version = release = VERSION
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = INDEX
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "docs/*/*.md",
    "deploy/*.md",
]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"Shoal {VERSION}"
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nitpicky = True


def navigation(text: str) -> str:
    """Return one hidden table of contents for each section of the index that lists pages.

    Args:
        text: docs/README.md.
    """
    tables = []
    for title, body in SECTION.findall(text):
        pages = [f"/{_document(target)}" for target in PAGE.findall(body)]
        if pages:
            tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]))
    return "\n\n".join(tables)


def _document(target: str) -> str:
    """Return Sphinx's name of a page that docs/README.md links to."""
    return str((ROOT / "docs" / target).resolve().relative_to(ROOT))


def _add_navigation(_app: Any, docname: str, source: list[str]) -> None:
    if docname == INDEX:
        source[0] += f"\n{navigation(source[0])}\n"
    elif docname == "docs/adr/README":
        records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
        names = [f"/docs/adr/{path.stem}" for path in records]
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *names, "```\n"])


def setup(app: Any) -> dict[str, bool]:
    """Add the navigation when Sphinx reads the index, and show bytes in hexadecimal as plain text."""
    from pygments.lexers.special import TextLexer  # only the extra docs has it

    app.connect("source-read", _add_navigation)
    app.add_lexer("hex", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
