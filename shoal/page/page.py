"""Data and assets as one HTML document: the live page of a server, or a still that needs none."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from shoal.util.console import second
from shoal.util.files import write_atomic

MOST_RUNS: Final = 12
"""Runs on one page; the first ones are shown."""
READABLE: Final = 0o644
"""Mode of a saved page: it holds no secret, and people pass it on."""


Document = Mapping[str, Any]
"""A value as JSON has it."""


def live(title: str, document: Document) -> bytes:
    """Return the page that follows a server's events.

    Args:
        title: the fleet's name.
        document: see `data_of`.
    """
    return _page(title, document, meta="")


def still(
    title: str, runs: Sequence[Document], status: Document | None = None, note: str = "", now_s: int | None = None
) -> bytes:
    """Return the page as a file that needs no server.

    Args:
        title: the fleet's or the experiment's name.
        runs: their histories, `RunHistory.document`; at most MOST_RUNS of them are shown.
        status: the fleet's state, as `aggregator.status.record.FleetStatus.document` has it; None for a simulation.
        note: a sentence about where the figures come from.
        now_s: unix seconds at which they were true; None for now.
    """
    document = data_of(title, runs, status, note=note, kind="still", now_s=now_s)
    # A file has no headers. frame-ancestors has no effect in a meta element.
    policy = content_security_policy(connect=False).replace("; frame-ancestors 'none'", "")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    return _page(title, document, meta)


def write_still(path: Path, *parts: Any, **options: Any) -> None:
    """Write `still` to a file, replacing an older one at once.

    Raises:
        ConfigError: the file can't be written.
    """
    write_atomic(path, still(*parts, **options), mode=READABLE, durable=False)


def data_of(
    title: str,
    runs: Sequence[Document],
    status: Document | None,
    *,
    note: str = "",
    kind: str = "live",
    now_s: int | None = None,
) -> dict[str, Any]:
    """Return the data that the page's script reads; arguments as for `still`."""
    return {
        "title": title,
        "kind": kind,
        "note": note,
        "made_at": second(int(time.time()) if now_s is None else now_s),
        "status": status,
        "runs": list(runs[:MOST_RUNS]),
    }


def content_security_policy(*, connect: bool) -> str:
    """Return the policy under which the page works: its own script and style by their hashes, and no other source.

    Args:
        connect: whether the script may ask the server that the page came from.
    """
    own = "'self'" if connect else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash('page.js')}'; style-src '{_hash('page.css')}'; connect-src {own}; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def json_text(value: Any) -> str:
    """Return JSON that can stand in a script element, which ends at ``</script`` and is confused by ``<!--``."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(title: str, document: Document, meta: str) -> bytes:
    # One pass over the template: a marker inside inserted text stays as it is.
    parts = {
        "title": html.escape(title),
        "meta": meta,
        "style": asset("page.css"),
        "script": asset("page.js"),
        "data": json_text(document),
    }
    text = asset("page.html")
    pieces = text.split("{{")
    made = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        made += (parts[name], rest)
    return "".join(made).encode()


@cache
def asset(name: str) -> str:
    """Return the text of a file in assets/."""
    return (files("shoal.page") / "assets" / name).read_text(encoding="utf-8")


def _hash(name: str) -> str:
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
