"""`shoal bench privacy`: for every mask mode its cost, its exactness, and each attack's success beside chance.

`ATTACKS` has all attacks in the order of the report. A new one is a function of one of the modules of
`shoal_lab.bench.attacks`, and an entry in its ``ATTACKS``. `page` writes one HTML file without external resources.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.embedding import edc
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES, find
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import open_from_member, read_head, seal_message_to_member
from crypto.seal.identity import Identity
from crypto.sums.ring import hidden, mean_of, unit_of
from shoal.owner.runs.plan import most_summed
from shoal.protocol.channels import UPLOAD
from shoal.protocol.recipe import DEFAULTS
from shoal.types import MaskedVector, Segment
from shoal_lab.bench.attacks import broker, contents, features, insiders, invariants, past, places, sums
from shoal_lab.bench.attacks.lab import CLASSES, ONE_EPOCH, Attack, Images, Lab, Result, make_lab
from shoal_lab.bench.attacks.structure import coordinates, images, linking
from shoal_lab.bench.attacks.sums import words_of
from shoal_lab.bench.numerics.kernels import Bench, one_thread

Progress = Callable[[str], None]
Document = dict[str, Any]
Attacked = Mapping[str, Sequence[Result]]
"""Every attack's results, one a variant, by the attack's name."""
LEFT: Final = {
    "sees_updates": "no mask, the aggregator has every update in clear",
    "sees_values": "a disguise that leaves all values in sight",
    "sees_magnitudes": "a disguise that leaves all absolute values in sight",
    "": "a disguise that leaves norms and dot products in sight",
}
PADS: Final = "one-time pads, and sums of at least three updates"
COSTS: Final = ("derive_ms", "apply_ms", "invert_ms", "apply_memcpy_ratio")
WIDTH: Final = 20


def measure(
    modes: Sequence[str] = (), *, quick: bool = False, data_dir: Path | None = None, progress: Progress = lambda _: None
) -> tuple[Document, dict[str, list[Result]]]:
    """Measure ``modes`` on digits, or on MNIST where ``data_dir`` holds it; one thread.

    By default all modes, and `sums.MODE`, which stands for a run with a keeper.

    Returns:
        the document, and the results that have pictures, by mode.

    Raises:
        ConfigError: a mode is not known, or scikit-learn is not installed.
        DataError: MNIST's files are not there.
    """
    chosen = tuple(dict.fromkeys(modes)) or (*MODES, sums.MODE)
    for mode in chosen:
        if mode != sums.MODE:
            find(mode)
    start = time.monotonic()
    with one_thread():
        progress("compiling the task")
        lab = make_lab(quick=quick, data_dir=data_dir)
        reports, pictures = [], {}
        for mode in chosen:
            progress(f"{mode}: cost")
            if mode == sums.MODE:
                costs, computed = measure_sums(quick), computed_of_sums(lab)
                attacked: Attacked = sums.attack_all(lab)
            else:
                costs, computed = measure_cost(mode, quick), measure_computed(lab, mode)
                attacked = attack_all(lab, mode, progress)
            reports.append(mode_report(mode, costs, computed, attacked))
            pictures[mode] = [r for results in attacked.values() for r in results if r.pictures]
            lab.forget(mode)
        seal = measure_seal(quick)
    document = {
        "modes": reports,
        "dataset": lab.name,
        "coordinates": lab.length,
        "quick": quick,
        "seal": seal,
        "sources": {a.name: a.source for a in ATTACKS},
        "seconds": time.monotonic() - start,
    }
    return document, pictures


def attack_all(lab: Lab, mode: str, progress: Progress) -> Attacked:
    """Return the results of every attack of the registry on one mode."""
    results = {}
    for attack in ATTACKS:
        progress(f"{mode}: {attack.name}")
        results[attack.name] = attack.run(lab, mode)
    return results


def mode_report(mode: str, costs: Sequence[Document], computed: Document, attacked: Attacked) -> Document:
    """Return one mode's part of the document, whose fixed costs are those of a million coordinates."""
    main = next(cost for cost in costs if cost["d"] == MAIN_SIZE)
    return {
        "mode": mode,
        **{name: main[name] for name in COSTS},
        **computed,
        "attacks": [r.data() for results in attacked.values() for r in results],
        "verdict": verdict(computed["can"], attacked),
        "sizes": costs,
    }


def verdict(can: Mapping[str, bool], attacked: Attacked) -> str:
    """Return one line made of the results and nothing else: an attack counts if any of its variants works."""
    tried = {name: results for name, results in attacked.items() if results}
    worked = [name for name, results in tried.items() if any(r.works for r in results)]
    stopped = [name for name in tried if name not in worked]
    named = ", ".join(name + _limit(tried[name]) for name in worked)
    left = LEFT[next((seen for seen in LEFT if can.get(seen)), "")] if can.get("cosines", True) else PADS
    return (
        f"{left}; {len(worked)} of {len(tried)} attacks get more than chance ({named}); "
        f"not: {', '.join(stopped) or 'none'}"
    )


def _limit(results: Sequence[Result]) -> str:
    """Return a remark if an attack was tried under fresh keys too, and works only while a key lasts a run."""
    fresh = [r.works for r in results if r.keys == "round"]
    return " with one key a run" if fresh and not any(fresh) else ""


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, list[Document | None], Document]]:
    """Return the results as rows of a table: the title, the result in each mode or None, and the one whose chance is shown.

    The last mode hides most, so that its chance is the one to compare with where modes differ.
    """
    columns = [{titled(r): r for r in mode["attacks"]} for mode in document["modes"]]
    found = []
    for title in dict.fromkeys(title for column in columns for title in column):
        row = [column.get(title) for column in columns]
        found.append((title, row, next(r for r in reversed(row) if r is not None)))
    return found


def titled(result: Mapping[str, Any]) -> str:
    """Return the title of a result's row: attack, devices, and keys where they are drawn in each round."""
    devices = f", n={result['devices']}" if result["devices"] > 1 else ""
    return f"{result['name']}{devices}{', fresh keys' if result['keys'] == 'round' else ''}"


def shown(value: float, unit: str) -> str:
    """Return a figure in a form that fits its unit."""
    return f"{value:.1f}" if unit == "dB" else f"{value:.4f}" if abs(value) < 0.01 and value else f"{value:.3f}"


def other_rows(document: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the rows of cost, exactness and the aggregator's computations: a title, and the figure in each mode."""
    modes = document["modes"]
    rows = [
        (f"{name}, d = {size['d']:.0e}", [f"{m['sizes'][at][name]:.2f}" for m in modes])
        for at, size in enumerate(modes[0]["sizes"])
        for name in COSTS
    ]
    rows += [(name, [f"{m[name]:.1e}" for m in modes]) for name in ("cosine_error", "mean_error")]
    return rows + [
        (f"aggregator: {name}", ["yes" if m["can"][name] else "no" for m in modes]) for name in modes[0]["can"]
    ]


def words(document: Mapping[str, Any]) -> list[str]:
    """Return the whole report, a line each: attacks down, modes across."""
    modes, seal = document["modes"], document["seal"]
    head = "".join(f"{m['mode']:>{WIDTH}}" for m in modes)
    out = [
        f"{document['dataset']}, model of {document['coordinates']} coordinates; * where an attack gets more than chance",
        "",
        f"{'':46}{head}{'chance':>10}  unit",
    ]
    for title, row, last in rows_of(document):
        marked = ["-  " if r is None else shown(r["success"], r["unit"]) + (" *" if r["works"] else "  ") for r in row]
        figures = "".join(f"{text:>{WIDTH}}" for text in marked)
        out.append(f"{title:46}{figures}{shown(last['chance'], last['unit']):>10}  {last['unit']}")
    out += ["", f"{'cost, CPU ms on one thread':46}{head}"]
    out += [
        f"{title:46}" + "".join(f"{cell:>{WIDTH - 2}}  " for cell in cells) for title, cells in other_rows(document)
    ]
    return [
        *out,
        "",
        f"sealing {seal['seal_ms_per_mb']:.2f} ms a MB, opening {seal['open_ms_per_mb']:.2f}, "
        f"{seal['bytes_added']:.0f} bytes added; a masked vector takes 4 bytes a coordinate in every mode",
        "",
        *(f"{m['mode']}: {m['verdict']}" for m in modes),
        f"{document['seconds']:.0f} s",
    ]


SIZES: Final = (100_000, 1_000_000, 10_000_000)
MAIN_SIZE: Final = 1_000_000
"""Coordinates that the fixed figures are of."""
DEVICES: Final = 8
TOLERANCE: Final = 1e-4
"""Relative difference up to which a result on masked vectors counts as the one on clear vectors."""
MEAN_TOLERANCE: Final = 1e-3
"""The same for a mean of fixed-point numbers, which have room for updates a thousand times longer."""
_MEGABYTE: Final = 1e6


def measure_cost(mode: str, quick: bool) -> list[dict[str, Any]]:
    """Return the cost of a mode at 1e5, 1e6 and, unless quick, 1e7 coordinates; the least of a few runs each.

    CPU milliseconds on one thread for a vector of ``d`` coordinates, applying also in units of copying the vector, and the bytes
    that the masked vector travels as: the mask adds none.
    """
    return [cost(mode, d, Bench(quick), runs=3 if d > MAIN_SIZE else 5) for d in (SIZES[:2] if quick else SIZES)]


def cost(mode: str, d: int, bench: Bench, runs: int) -> dict[str, Any]:
    """Return the cost of a mode at ``d`` coordinates, as `measure_cost` does, as the least of so many runs."""
    secret = MaskSecret.from_bytes(hashlib.sha256(b"cost").digest())
    context = MaskContext(
        fleet="lab", run_id=b"cost", task_digest=bytes(32), mode=mode, segments=(Segment("cluster", d),)
    )
    key = derive(secret, context)
    source, out = bench.normal(d), np.empty(d, np.float32)
    apply, invert, copy = bench.race(
        lambda: key.apply(source, out), lambda: key.invert(source, out), lambda: np.copyto(out, source), runs=runs
    )
    (deriving,) = bench.race(lambda: derive(secret, context), runs=1 if d > MAIN_SIZE else 3)
    return {
        "d": d,
        "derive_ms": 1e3 * deriving,
        "apply_ms": 1e3 * apply,
        "invert_ms": 1e3 * invert,
        "apply_memcpy_ratio": apply / copy,
        "bytes": mask(source, key).values.nbytes,
    }


def measure_sums(quick: bool) -> list[dict[str, Any]]:
    """Return the cost of a run with a keeper as `measure_cost` does: a pad is applied, and the mean of a sum inverts it."""
    return [_cost_of_sum(d, Bench(quick), runs=3 if d > MAIN_SIZE else 5) for d in (SIZES[:2] if quick else SIZES)]


def _cost_of_sum(d: int, bench: Bench, runs: int) -> dict[str, Any]:
    most, seed = most_summed(DEVICES), bytes(32)
    source, out, unit = (
        bench.normal(d) / np.float32(d**0.5),
        np.empty(d, np.float32),
        unit_of(DEFAULTS.norm_limit, d, most),
    )
    words = hidden(source, unit, most, ())
    apply, invert, copy = bench.race(
        lambda: hidden(source, unit, most, [seed]),
        lambda: mean_of(words, 1, unit, DEFAULTS.norm_limit),
        lambda: np.copyto(out, source),
        runs=runs,
    )
    times = {"derive_ms": 0.0, "apply_ms": 1e3 * apply, "invert_ms": 1e3 * invert, "apply_memcpy_ratio": apply / copy}
    return {"d": d, **times, "bytes": words.nbytes}


def computed_of_sums(lab: Lab) -> dict[str, Any]:
    """Return what the aggregator can compute in a run with a keeper, as `measure_computed` does: the mean, and nothing else."""
    clear = lab.once("computed", lambda: [_update(lab, i) for i in range(DEVICES)])
    error = _relative(words_of(clear)[1], np.mean(np.stack(clear).astype(np.float64), axis=0))
    can = dict.fromkeys(measure_computed(lab, "none")["can"], False) | {"mean": error < MEAN_TOLERANCE}
    return {"cosine_error": 1.0, "mean_error": error, "can": can}


def measure_seal(quick: bool) -> dict[str, float]:
    """Return CPU ms a MB for sealing and opening a masked update of 1e6 coordinates, and the bytes that sealing adds."""
    sender, recipient = Identity.generate("dev-00"), Identity.generate("aggregator")
    body = Bench(quick).normal(MAIN_SIZE).tobytes()
    head = UPLOAD.head("lab", sender.name, recipient.name)
    to, by = recipient.member.seal_key, sender.member.sign_key
    payload = seal_message_to_member(sender, to, head, b"", body).payload

    def opening() -> None:
        found, at = read_head(payload)
        open_from_member(recipient, payload, found, at, by)

    sealing, unsealing = Bench(quick).race(
        lambda: seal_message_to_member(sender, to, head, b"", body), opening, runs=2 if quick else 4
    )
    size = len(body) / _MEGABYTE
    return {
        "seal_ms_per_mb": 1e3 * sealing / size,
        "open_ms_per_mb": 1e3 * unsealing / size,
        "bytes_added": float(len(payload) - len(body)),
    }


def measure_computed(lab: Lab, mode: str) -> dict[str, Any]:
    """Compute on eight devices' updates, of two groups with different labels, under ``mode`` and in clear, and compare.

    Returns:
        ``cosine_error``, the largest absolute difference of a cosine; ``mean_error``, the relative L2 distance of the unmasked
        mean of masked updates from the mean in float64; and ``can``: computation -> whether its result equals that on the clear
        updates, to 1e-4.
    """
    clear = np.stack(lab.once("computed", lambda: [_update(lab, i) for i in range(DEVICES)]))
    key, masked = lab.key(mode), np.stack([lab.masked(u, mode) for u in clear])
    weights = np.arange(1.0, DEVICES + 1)
    exact = np.average(clear.astype(np.float64), axis=0, weights=weights)

    def opened(vector: NDArray[np.float32]) -> NDArray[np.float64]:
        return unmask(MaskedVector(np.ascontiguousarray(vector, np.float32), key.key_id), key).astype(np.float64)

    mean_error = _relative(opened(weighted_mean(masked, weights)), exact)
    before, after = cosine_matrix(clear), cosine_matrix(masked)
    cosine_error = float(np.abs(before - after).max())
    split = bipartition(after).left == bipartition(before).left
    median = _relative(opened(np.median(masked, axis=0)), np.median(clear.astype(np.float64), axis=0))
    can = {
        "norms": _relative(np.linalg.norm(masked, axis=1), np.linalg.norm(clear, axis=1)) < TOLERANCE,
        "cosines": cosine_error < TOLERANCE,
        "mean": mean_error < TOLERANCE,
        "cfl_split": split and set(bipartition(after).left) in ({0, 2, 4, 6}, {1, 3, 5, 7}),
        "singular_values": _relative(_singular(masked), _singular(clear)) < TOLERANCE,
        "fedgroup_embedding": _relative(edc(masked, 2), edc(clear, 2)) < 1e2 * TOLERANCE,
        "distances_of_kmeans": _relative(_distances(masked), _distances(clear)) < TOLERANCE,
        "coordinate_median": median < TOLERANCE,
        "sees_sparsity": bool(np.array_equal((masked == 0).sum(1), (clear == 0).sum(1))),
        "sees_values": bool(np.array_equal(np.sort(masked, axis=1), np.sort(clear, axis=1))),
        "sees_magnitudes": bool(np.array_equal(np.sort(np.abs(masked), axis=1), np.sort(np.abs(clear), axis=1))),
        "sees_updates": bool(np.array_equal(masked, clear)),
    }
    return {
        "cosine_error": cosine_error,
        "mean_error": mean_error,
        "can": {name: bool(value) for name, value in can.items()},
    }


def _update(lab: Lab, device: int) -> NDArray[np.float32]:
    images = lab.pick(f"computed {device}", 60)
    return lab.update(Images(images.x, (images.y + device % 2) % CLASSES), ONE_EPOCH, seed=device)


def _relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def _singular(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.svd(rows.astype(np.float64), compute_uv=False))


def _distances(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.asarray(np.linalg.norm(wide[:, None] - wide[None], axis=2), np.float64)


ATTACKS: Final[tuple[Attack, ...]] = (
    *contents.ATTACKS,
    *places.ATTACKS,
    *invariants.ATTACKS,
    *insiders.ATTACKS,
    *broker.ATTACKS,
    *coordinates.ATTACKS,
    *images.ATTACKS,
    *linking.ATTACKS,
    coordinates.COMPONENT_ANALYSIS,
    *features.ATTACKS,
    *past.ATTACKS,
)


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
