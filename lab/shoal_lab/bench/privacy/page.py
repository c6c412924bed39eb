"""The privacy benchmark as one self-contained HTML page: figures, and each attack's images beside the true one."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.attacks.registry import ATTACKS
from shoal_lab.bench.privacy.benchmark import other_rows, rows_of, shown

STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fff}
h1,h2{line-height:1.2}table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid #d5dbe2;
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}.works{background:#f9d9d0}
.stopped{background:#e2f0e4}figure{display:inline-block;margin:.4rem .8rem .4rem 0;width:9rem;vertical-align:top}
img{width:8rem;height:8rem;image-rendering:pixelated;border:1px solid #8a94a0}figcaption{font-size:.8rem}
small{color:#55606c}.wide{overflow-x:auto}
"""


def png(image: NDArray[np.float32]) -> bytes:
    """Return an image (rows, columns), values in [0, 1], as an 8-bit grey PNG."""
    file = io.BytesIO()
    Image.fromarray(np.rint(np.clip(image, 0.0, 1.0) * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def page(document: Mapping[str, Any], pictures: Mapping[str, Sequence[Result]]) -> str:
    """Return the report as HTML without anything to load: the pictures of each mode's results are inside."""
    modes = document["modes"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Shoal: what each mask lets through</title>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<style>{STYLE}</style><h1>What each mask lets through</h1>",
        f"<p>{html.escape(document['dataset'])}, a model of {document['coordinates']} coordinates. A mask is a disguise, not ",
        "encryption. Success stands beside chance: what guessing without the masked vectors gives. More is better for ",
        "the attacker; shaded red where an attack gets more than chance.</p><h2>Verdicts</h2><ul>",
        *(f"<li><b>{html.escape(m['mode'])}</b>: {html.escape(m['verdict'])}</li>" for m in modes),
        "</ul>",
        _attacks(document),
        *(_pictures(mode, results) for mode, results in pictures.items()),
        _costs(document),
        "<h2>Where the attacks are from</h2>",
        _table(["attack", "attacker", "source"], [_row([a.name, a.attacker, a.source]) for a in ATTACKS]),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f"<div class='wide'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"


def _attacks(document: Mapping[str, Any]) -> str:
    lines = []
    for title, row, last in rows_of(document):
        cells = "".join(_cell(r) for r in row)
        chance = f"{shown(last['chance'], last['unit'])} {html.escape(last['unit'])}"
        name = f"{html.escape(title)}<br><small>{html.escape(last['attacker'])}</small>"
        lines.append(f"<tr><td>{name}</td>{cells}<td>{chance}</td></tr>")
    modes = (m["mode"] for m in document["modes"])
    return "<h2>Attacks</h2>" + _table(["attack, attacker", *modes, "chance"], lines)


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "<td></td>"
    kind, note = "works" if result["works"] else "stopped", html.escape(result["note"], quote=True)
    return f"<td class='{kind}' title='{note}'>{shown(result['success'], result['unit'])}</td>"


def _pictures(mode: str, results: Sequence[Result]) -> str:
    figures = []
    for result in results:
        reached = f"mean {shown(result.success, result.unit)} {result.unit}"
        for picture in result.pictures:
            data = base64.b64encode(png(picture.image)).decode()
            true = picture is result.pictures[0]
            caption = html.escape(f"{result.name}: true" if true else f"{picture.caption}: {reached}", quote=True)
            figures.append(
                f"<figure><img alt='{caption}' src='data:image/png;base64,{data}'><figcaption>{caption}</figcaption></figure>"
            )
    return f"<h2>Pictures under {html.escape(mode)}</h2>{''.join(figures)}"


def _costs(document: Mapping[str, Any]) -> str:
    seal, modes = document["seal"], (m["mode"] for m in document["modes"])
    return (
        "<h2>Cost, exactness, and what can still be computed</h2>"
        + _table(["CPU time on one thread", *modes], [_row([title, *cells]) for title, cells in other_rows(document)])
        + f"<p>Sealing {seal['seal_ms_per_mb']:.2f} ms a MB, opening {seal['open_ms_per_mb']:.2f} ms a MB, "
        f"{seal['bytes_added']:.0f} bytes added. A masked vector takes 4 bytes a coordinate in every mode.</p>"
    )
