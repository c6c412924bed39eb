"""The privacy benchmark as one self-contained HTML page: figures, and each attack's images beside the true one."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.attacks.registry import ATTACKS
from shoal_lab.bench.privacy.benchmark import ModeReport, PrivacyReport, result_rows
from shoal_lab.bench.privacy.table import shown, titled

STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fff}
h1,h2{line-height:1.2}table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid #d5dbe2;
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}.works{background:#f9d9d0}
.stopped{background:#e2f0e4}figure{display:inline-block;margin:.4rem .8rem .4rem 0;width:9rem;vertical-align:top}
img{width:8rem;height:8rem;image-rendering:pixelated;border:1px solid #8a94a0}figcaption{font-size:.8rem}
small{color:#55606c}.wide{overflow-x:auto}
"""
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def png(image: NDArray[np.float32]) -> bytes:
    """Return an image (rows, columns), values in [0, 1], as an 8-bit grey PNG (ISO 15948)."""
    levels = np.rint(np.clip(image, 0.0, 1.0) * 255).astype(np.uint8)
    rows, columns = levels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in levels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    return _PNG + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def page(report: PrivacyReport) -> str:
    """Return the report as HTML without anything to load: pictures are inside."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Shoal: what each mask lets through</title>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<style>{STYLE}</style><h1>What each mask lets through</h1>",
        f"<p>{html.escape(report.dataset)}, a model of {report.coordinates} coordinates. A mask is a disguise, not ",
        "encryption. Success stands beside chance: what guessing without the masked vectors gives. More is better for ",
        "the attacker; shaded red where an attack gets more than chance.</p>",
        _verdicts(report.modes),
        _attacks(report.modes),
        *(_pictures(mode) for mode in report.modes),
        _costs(report),
        _sources(),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f"<div class='wide'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"


def _verdicts(modes: Sequence[ModeReport]) -> str:
    lines = "".join(f"<li><b>{html.escape(m.mode)}</b>: {html.escape(m.verdict)}</li>" for m in modes)
    return f"<h2>Verdicts</h2><ul>{lines}</ul>"


def _attacks(modes: Sequence[ModeReport]) -> str:
    lines = []
    for row in result_rows(modes):
        first = next(r for r in reversed(row) if r is not None)
        cells = "".join(_cell(r) for r in row)
        title = f"{html.escape(titled(first))}<br><small>{html.escape(first.attacker)}</small>"
        chance = f"{shown(first.chance, first.unit)} {html.escape(first.unit)}"
        lines.append(f"<tr><td>{title}</td>{cells}<td>{chance}</td></tr>")
    return "<h2>Attacks</h2>" + _table(["attack, attacker", *(m.mode for m in modes), "chance"], lines)


def _cell(result: Result | None) -> str:
    if result is None:
        return "<td></td>"
    kind = "works" if result.works else "stopped"
    return (
        f"<td class='{kind}' title='{html.escape(result.note, quote=True)}'>{shown(result.success, result.unit)}</td>"
    )


def _pictures(mode: ModeReport) -> str:
    figures = []
    for result in mode.results:
        for picture in result.pictures:
            data = base64.b64encode(png(picture.image)).decode()
            caption = f"{result.name}: true" if picture is result.pictures[0] else _reached(result, picture.caption)
            figures.append(
                f"<figure><img alt='{html.escape(caption, quote=True)}' src='data:image/png;base64,{data}'>"
                f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            )
    return f"<h2>Pictures under {html.escape(mode.mode)}</h2>{''.join(figures)}"


def _reached(result: Result, caption: str) -> str:
    return f"{caption}: mean {shown(result.success, result.unit)} {result.unit}"


def _costs(report: PrivacyReport) -> str:
    modes, rows = report.modes, []
    for at, size in enumerate(modes[0].costs):
        for name in ("derive_ms", "apply_ms", "invert_ms", "apply_memcpy_ratio"):
            rows.append(_row([f"{name}, d = {size.d:.0e}", *(f"{getattr(m.costs[at], name):.2f}" for m in modes)]))
    for name in ("cosine_error", "mean_error"):
        rows.append(_row([name, *(f"{getattr(m.computed, name):.1e}" for m in modes)]))
    for name in modes[0].computed.can:
        rows.append(_row([f"aggregator: {name}", *("yes" if m.computed.can[name] else "no" for m in modes)]))
    seal = report.seal
    return (
        "<h2>Cost, exactness, and what can still be computed</h2>"
        + _table(["CPU time on one thread", *(m.mode for m in modes)], rows)
        + f"<p>Sealing {seal['seal_ms_per_mb']:.2f} ms a MB, opening {seal['open_ms_per_mb']:.2f} ms a MB, "
        f"{seal['bytes_added']:.0f} bytes added. A masked vector takes 4 bytes a coordinate in every mode.</p>"
    )


def _sources() -> str:
    rows = [_row([a.name, a.attacker, a.source]) for a in ATTACKS]
    return "<h2>Where the attacks are from</h2>" + _table(["attack", "attacker", "source"], rows)
