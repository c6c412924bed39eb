"""The tables of channels in docs/wire-format.md, generated from `shoal.protocol.channels`.

``python -m docs.channel_tables`` prints them, and with ``--write`` puts them into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from shoal_lab.experiments.pages import put_between

from shoal.protocol.channels import CHANNELS, EVERYONE, Party

PAGE: Final = Path(__file__).resolve().parent / "wire-format.md"
BEGIN: Final = "<!-- channels: python -m docs.channel_tables --write -->"
END: Final = "<!-- end of channels -->"


def block() -> str:
    """Return both tables: where each channel's messages travel, and what they contain."""
    travel = _table(
        ("channel", "topic", "chunk kind", "retained", "QoS", "sender", "receivers"),
        (
            (
                c.name,
                f"`{c.topic.base}`",
                c.kind.name.lower(),
                "yes" if c.retained else "no",
                "1" if c.least_qos else "0 or 1",
                c.sender.value,
                _parties(c.receivers) + (", which clears it" if c.cleared_by else ""),
            )
            for c in CHANNELS
        ),
    )
    content = _table(
        ("channel", "message", "envelope", "purpose", "recipient", "largest size"),
        (
            (
                c.name,
                c.message,
                c.seal.value,
                f"`{c.purpose}`",
                _parties(c.recipients, " or ") or f"`{EVERYONE}`",
                c.formula or f"{c.largest:,}",
            )
            for c in CHANNELS
        ),
    )
    return f"{travel}\n\n{content}"


def _parties(parties: Iterable[Party], between: str = ", ") -> str:
    return between.join(party.value for party in parties)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write(page: Path = PAGE) -> None:
    """Put the tables between the page's marks."""
    put_between(page, BEGIN, END, block())


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.stdout.write(block() + "\n")
