"""Insert generated tables into documents, between two marks of the page."""

from __future__ import annotations

from pathlib import Path


def put_between(page: Path, begin: str, end: str, block: str) -> None:
    """Replace the text between the marks ``begin`` and ``end`` of a page by ``block``."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{block}\n{end}{after}")
