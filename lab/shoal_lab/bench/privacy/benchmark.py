"""`shoal bench privacy`: for every mask mode its cost, its exactness, and each attack's success beside chance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from crypto.mask.modes.registry import MODES, find
from shoal_lab.bench.attacks import sums
from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.attacks.lab import Lab, make_lab
from shoal_lab.bench.attacks.registry import ATTACKS
from shoal_lab.bench.numerics.kernels import one_thread
from shoal_lab.bench.privacy.cost import (
    MAIN_SIZE,
    computed_of_sums,
    measure_computed,
    measure_cost,
    measure_seal,
    measure_sums,
)

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
