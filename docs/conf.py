"""Sphinx's configuration: `make docs` builds these pages to build/docs and fails on a broken link or anchor.

The source folder is the repository's root, so that links between the pages are the same here, on GitHub and in an editor. The
navigation is made from the lists of links in docs/README.md: a page that is in none of them fails the build.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shoal.version import VERSION  # noqa: E402 - the path above leads to it

INDEX: Final = "docs/README"
SECTION: Final = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
PAGE: Final = re.compile(r"^- \[[^\]]+\]\(([\w./-]+)\.md\)", re.MULTILINE)

MERMAID: Final = ROOT / "build" / "mermaid"
"""Where `make docs` puts the script that draws diagrams, if npm is there."""
MERMAID_FILE: Final = "mermaid.min.js"
MERMAID_AFAR: Final = "https://cdn.jsdelivr.net/npm/mermaid@11.12.1/dist/mermaid.min.js"

project = "Shoal"
version = release = VERSION
extensions = ["myst_parser"]
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
html_static_path = [str(MERMAID)] if (MERMAID / MERMAID_FILE).exists() else []
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


class Mermaid(Directive):
    """A diagram, which a script draws in the browser: as plain script, not as a module, so that it also runs from a file."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the diagram's text as the script expects it, on white in both themes."""
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid" style="background: white">\n{text}\n</pre>', format="html")]


def _add_mermaid(app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if 'class="mermaid"' in context.get("body", ""):
        app.add_js_file(MERMAID_FILE if html_static_path else MERMAID_AFAR)


def setup(app: Any) -> dict[str, bool]:
    """Add the navigation when Sphinx reads the index, and show bytes in hexadecimal as plain text."""
    from pygments.lexers.special import TextLexer  # only the extra docs has it

    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", _add_navigation)
    app.connect("html-page-context", _add_mermaid)
    app.add_lexer("hex", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
